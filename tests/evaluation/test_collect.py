"""`coca-mindspeed collect`, against a stub of an OpenAI-compatible server, and `evaluate` of what it collected."""

import json
import re
import shlex
import subprocess
import sys
import threading
from collections import Counter

import pytest

from coca_mindspeed.algorithm.methods import method_settings, training_method
from coca_mindspeed.cli import main
from coca_mindspeed.data.records import Record, write_records
from coca_mindspeed.evaluation.predictions import read_predictions
from coca_mindspeed.utils import chat_client
from tests.chat_server import chat_server
from tests.support.waiting import until

pytest.importorskip("openai")
QUESTIONS = 6


def number(request):
    """Of the question."""
    return int(re.search(r"\d+", request["messages"][-1]["content"])[0])


def asked(server):
    """How often each question was asked since this was last called."""
    counts, server.requests = Counter(map(number, server.requests)), []
    return counts


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with chat_server() as server:
        server.reply = lambda request: (200, f"<confidence> 0.8 </confidence> \\boxed{{{number(request)}}}")
        yield server


@pytest.fixture
def command(server, tmp_path):
    """The arguments of a command whose last question the stub answers wrongly."""
    golds = [str(i) for i in range(QUESTIONS - 1)] + ["77"]
    records = [Record(f"q{i}", "sums", "math", f"{i} + 0?", gold) for i, gold in enumerate(golds)]
    write_records(tmp_path / "data.jsonl", records)
    options = {"--model": "tiny", "--data": tmp_path / "data.jsonl", "--output": tmp_path / "out"}

    def arguments(*, url=server.url, **changes):
        changed = {**options, **{f"--{name.replace('_', '-')}": value for name, value in changes.items()}}
        return ["collect", url, *(str(each) for pair in changed.items() for each in pair)]

    return arguments


def graded(tmp_path, *more):
    """The predictions of the command that `collect` names."""
    out = tmp_path / "out"
    gold = ["--gold", str(tmp_path / "data.jsonl"), "--output", str(out)]
    assert main(["evaluate", str(out / "responses.jsonl"), *gold, *more]) == 0
    return read_predictions(out / "predictions.jsonl")


def rows(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out" / "responses.jsonl").read_text().splitlines()]


def test_it_asks_and_evaluate_grades(server, command, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    settings = {"temperature": 0.5, "max_tokens": 99, "chat_template_kwargs": '{"enable_thinking": false}'}
    assert main(command(samples=2, concurrency=3, **settings)) == 0
    predictions = graded(tmp_path, "--method", "coca")
    assert [(p.id, p.sample) for p in predictions] == [(f"q{i}", s) for i in range(QUESTIONS) for s in range(2)]
    assert {(p.confidence, p.tokens, p.method) for p in predictions} == {(0.8, 7, "coca")}
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())["results"]["coca"]["sums"]
    assert metrics["metrics"]["accuracy"]["estimate"] == pytest.approx(5 / 6)
    assert set(server.keys) == {"Bearer secret"}
    assert "secret" not in (tmp_path / "out" / "settings.json").read_text()
    assert server.most_at_once <= 3
    request = server.requests[0]
    assert (request["temperature"], request["max_tokens"]) == (0.5, 99)
    assert request["chat_template_kwargs"] == {"enable_thinking": False}
    assert request["messages"][0] == {"role": "system", "content": training_method("coca").system_prompt}


STATED = "<confidence> 0.8 </confidence>"


@pytest.mark.parametrize(
    ("thinking", "message"),
    [
        (True, {"content": f"<think>\n{STATED}\\boxed{{1}}</think>%s"}),
        (True, {"content": f"{STATED}<think>\\boxed{{1}}</think>%s"}),
        (True, {"reasoning": f"{STATED}\\boxed{{1}}", "content": "%s"}),
        (True, {"reasoning_content": f"\n{STATED}\\boxed{{1}}", "content": "\n\n%s"}),
        (False, {"reasoning": f"{STATED} %s", "content": None}),
    ],
)
def test_thoughts_are_read_in_the_field_that_the_server_has_for_them(
    server, command, tmp_path, capsys, thinking, message
):
    def reply(request):
        answer = f"\\boxed{{{number(request)}}}"
        return 200, {name: text and text.replace("%s", answer) for name, text in message.items()}

    server.reply = reply
    assert main([*command(), *["--thinking"] * thinking]) == 0
    out = capsys.readouterr()
    assert ("--thinking" in out.out, "--reasoning-parser" in out.err) == (thinking, not thinking)
    predictions = graded(tmp_path, *["--thinking"] * thinking)
    assert [(p.confidence, p.correct) for p in predictions] == [(0.8, i < QUESTIONS - 1) for i in range(QUESTIONS)]
    method = method_settings(thinking=thinking)
    assert server.requests[0]["messages"][0]["content"] == method.system_prompt


def test_a_thought_that_is_cut_off_has_no_answer(server, command, tmp_path):
    server.reply = lambda request: (200, {"reasoning": f"{STATED}\\boxed{{{number(request)}}}", "content": None})
    assert main([*command(), "--thinking"]) == 0
    assert {(p.confidence, p.correct) for p in graded(tmp_path, "--thinking")} == {(0.8, False)}


def test_the_method_gives_prompt_and_position(server, command, tmp_path):
    server.reply = lambda request: (200, f"\\boxed{{{number(request)}}} <confidence> 0.3 </confidence>")
    assert main(command(method="rlcr")) == 0
    assert {p.confidence for p in graded(tmp_path, "--method", "rlcr")} == {0.3}
    assert server.requests[0]["messages"][0]["content"] == training_method("rlcr").system_prompt
    assert main(command(method="cocoa")) == 2


def test_a_failed_command_is_resumed_and_other_settings_are_refused(server, command, tmp_path, capsys):
    good = server.reply
    server.reply = lambda request: good(request) if number(request) < 3 else (400, "bad")
    assert main(command(concurrency=1)) == 1
    assert {row["id"] for row in rows(tmp_path)} == {"q0", "q1", "q2"}
    with (tmp_path / "out" / "responses.jsonl").open("a") as file:
        file.write('{"id": "q3", "sam')  # as a killed process leaves it
    server.reply = good
    asked(server)
    others = [Record(f"q{i}", "sums", "math", f"{i} + 1?", str(i)) for i in range(QUESTIONS)]
    write_records(tmp_path / "others.jsonl", others)
    data = {"data": tmp_path / "others.jsonl"}
    for change in (data, {"temperature": 0.1}, {"samples": 2}, {"method": "joint"}, {"max_tokens": 7}):
        assert main(command(**change)) == 1
        assert "settings" in capsys.readouterr().err
    assert main(command(concurrency=2)) == 0  # what changes no response may change
    assert asked(server) == {3: 1, 4: 1, 5: 1}
    assert [row["id"] for row in rows(tmp_path)] == [f"q{i}" for i in range(QUESTIONS)]
    assert main(command()) == 0
    assert not server.requests


def test_a_password_of_the_url_is_neither_written_nor_printed(server, command, tmp_path, capsys):
    host = server.url.removeprefix("http://")
    assert main(command(url=f"http://me:s3cret@{host}")) == 0
    assert json.loads((tmp_path / "out" / "settings.json").read_text())["URL"] == server.url
    assert main(command(url=f"http://me:other@{host}")) == 0  # it may change
    for url in ("http://me:s3cret@127.0.0.1:9/v1", "http://me:s3cret@[", "https:/me:s3cret@x"):
        assert main(command(url=url, output=tmp_path / "other")) > 0
    server.reply = lambda request: (500, f"no http://me:s3cret@{host}")
    assert main(command(output=tmp_path / "third", url=f"http://me:s3cret@{host}", concurrency=1)) == 1
    printed = "".join(capsys.readouterr())
    assert "s3cret" not in printed
    assert "127.0.0.1:9/v1" in printed


def test_the_next_command_can_be_pasted_and_empty_responses_are_counted(server, command, tmp_path, capsys):
    good = server.reply
    server.reply = lambda request: (200, None) if number(request) < 2 else good(request)
    (tmp_path / "data dir").mkdir()
    data = (tmp_path / "data.jsonl").rename(tmp_path / "data dir" / "it's.jsonl")
    assert main(command(output=tmp_path / "c out", data=data)) == 0
    printed = capsys.readouterr()
    program, *arguments = shlex.split(printed.out.rpartition("grade them: ")[2])
    assert (program, main(arguments)) == ("coca-mindspeed", 0)
    assert "2 of 6 responses are empty" in printed.err
    assert "2 of 6 responses hold no answer" in capsys.readouterr().err


def test_kill_9_loses_no_response(server, command, tmp_path):
    hold = threading.Event()
    good = server.reply

    def slow(request):
        if number(request) >= 4:
            hold.wait(240)
        return good(request)

    server.reply = slow
    process = subprocess.Popen([sys.executable, "-m", "coca_mindspeed.cli", *command(concurrency=2)])
    file = tmp_path / "out" / "responses.jsonl"
    until(lambda: (file.is_file() and file.read_bytes().count(b"\n") == 4) or process.poll() is not None)
    assert process.poll() is None
    process.kill()
    process.wait()
    hold.set()
    asked(server)
    assert main(command()) == 0
    assert asked(server) == {4: 1, 5: 1}
    assert len(graded(tmp_path)) == QUESTIONS


HOSTILE = [
    ("<confidence> 0.5 </confidence> \x1b[2J\x1b]0;owned\x07 \\boxed{0}", 0.5),
    ("<confidence> 0.5 </confidence> <script>alert(1)</script> | a | b |\n# \\boxed{0}", 0.5),
    ("\ud83d\ud83d", None),
    ("<confidence> 1e999 </confidence> 0", None),
    (None, None),
    ("\\boxed{" * 20_000, None),
]


def test_hostile_text_is_harmless(server, command, tmp_path, capsys):
    server.reply = lambda request: (200, HOSTILE[number(request)][0])
    assert main(command()) == 0
    found = graded(tmp_path)
    printed = "".join(capsys.readouterr()) + (tmp_path / "out" / "metrics.md").read_text()
    assert "\x1b" not in printed
    assert "<script>" not in printed
    assert [p.confidence for p in found] == [confidence for _, confidence in HOSTILE]
    assert main(command()) == 0  # its own rows are read again


@pytest.mark.parametrize(
    ("status", "text", "named"),
    [
        (400, "This model's maximum context length is 32 tokens", ("q0", "--max-tokens")),
        (422, "\x1b[31mno", ("q0", r"\x1b")),
        (401, "who are you?", ("OPENAI_API_KEY",)),
        (500, "out of order", ("out of order", "resumes")),
    ],
)
def test_refusals_of_the_server(server, command, capsys, status, text, named):
    server.reply = lambda request: (status, text)
    assert main(command(concurrency=1)) == 1
    error = capsys.readouterr().err
    assert all(each in error for each in named)
    assert "\x1b" not in error
    assert asked(server)[0] == (6 if status == 500 else 1)  # a server's own errors may pass


def test_a_server_cannot_make_the_command_sleep(server, command, monkeypatch):
    monkeypatch.setattr(chat_client, "FIRST_PAUSE_SECONDS", 0.01)
    server.retry_after_ms = 3_600_000
    server.reply = lambda request: (503, "later")
    assert main(command(concurrency=1)) == 1
    assert asked(server) == {0: 6}


CHOICES = [b'{"choices": 7}', b'{"choices": [7]}', b'{"choices": [{"message": {"content": 7}}]}', b'{"choices": [{"m']


@pytest.mark.parametrize("raw", [b"<html>", b"{}", b"null", b"[1]", b"", b"[" * 100_000, *CHOICES])
def test_a_reply_that_is_no_completion_is_refused(server, command, capsys, raw):
    server.raw = lambda: raw
    assert main(command(concurrency=1)) == 1
    assert server.url in capsys.readouterr().err
    assert asked(server) == {0: 6}


def test_an_unknown_model_a_wrong_key_and_no_server(server, command, capsys, monkeypatch, tmp_path):
    assert main(command(model="tony")) == 1
    assert re.search(r"--model tony: .*tiny", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()  # the right name may follow
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    assert main(command(output=tmp_path / "other")) == 1
    assert "OPENAI_API_KEY" in capsys.readouterr().err
    assert main(command(url="http://127.0.0.1:9/v1", output=tmp_path / "third")) == 1
    assert "http://127.0.0.1:9/v1" in capsys.readouterr().err
    assert not asked(server) - Counter(range(QUESTIONS))


@pytest.mark.parametrize("url", ["127.0.0.1:8000/v1", "ftp://127.0.0.1/v1", "http:///v1", "https://", "file:///v1"])
def test_a_url_of_no_server_is_refused_first(command, capsys, tmp_path, url):
    assert main(command(url=url)) == 2
    assert url in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
