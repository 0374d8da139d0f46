"""`coca-mindspeed ask`: confidence and answer of a run's model, an exported one and a served one."""

import io
import json
import shutil
from contextlib import suppress

import pytest

from coca_mindspeed.algorithm.methods import training_method
from coca_mindspeed.algorithm.parsing import MATH_INSTRUCTION, SHORT_ANSWER
from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run, to_yaml
from coca_mindspeed.config.prompt_form import PromptForm, TrainedPrompt
from coca_mindspeed.errors import MissingDependencyError
from coca_mindspeed.utils.directories import MARKER, write_marker
from tests.chat_server import chat_server
from tests.local.models_for_tests import write_random_model

QUESTIONS = ("2100+4300", "1100+2200")


def replies(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def exported(finished_demo, tmp_path):
    assert main(["export", str(finished_demo), "--output", str(tmp_path / "exported")]) == 0
    return tmp_path / "exported"


def test_a_run_its_model_and_an_export_give_the_same_replies(finished_demo, exported, tmp_path, capsys):
    capsys.readouterr()
    found = []
    for model in (finished_demo, finished_demo / "model", exported):
        assert main(["ask", str(model), *QUESTIONS, "--samples", "3", "--json"]) == 0
        found.append(replies(capsys))
    assert found[0] == found[1] == found[2]
    assert [reply["question"] for reply in found[0]] == [each for each in QUESTIONS for _ in range(3)]
    stated = [reply for reply in found[0] if reply["confidence"] is not None]
    assert all(
        reply["response"] == f"<confidence>{reply['confidence']:.2f}</confidence>{reply['answer']}" for reply in stated
    )
    assert main(["ask", str(exported), *QUESTIONS, "--samples", "3", "--json", "--seed", "1"]) == 0
    assert replies(capsys) != found[0]


def test_a_question_that_the_model_cannot_read_is_not_asked(finished_demo, exported, capsys):
    for model, question in ((finished_demo, "What is 17 + 25?"), (finished_demo, "17+25"), (exported, "17 + 25")):
        assert main(["ask", str(model), question]) == 1
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("[unreadable]")) == ("", 1)
    assert main(["ask", str(finished_demo), "What is 17 + 25?", QUESTIONS[0]]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [QUESTIONS[0]]


def test_lines_of_standard_input(finished_demo, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("2100+4300\n\n1100+2200\n"))
    assert main(["ask", str(finished_demo), "-"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [*QUESTIONS]


def test_a_model_without_the_format_is_told_so(finished_demo, tmp_path, capsys):
    shutil.copytree(finished_demo / "untrained", tmp_path / "plain")
    assert main(["ask", str(tmp_path / "plain"), "2100+4300", "--instruction", "", "--max-tokens", "8"]) == 1
    printed = capsys.readouterr()
    assert "[no-format] 0 of 1" in printed.err
    assert printed.out.split()[0] == "--"


@pytest.mark.parametrize(
    "prompt",
    [
        {"method": {"name": "./evil.py:Method"}, "max_new_tokens": 8},
        {"method": {"name": "evil:Method"}, "max_new_tokens": 8},
        {"method": {"name": "coca", "later": 1}, "max_new_tokens": 8},
        {"method": {"name": "coca"}, "max_new_tokens": 0},
        {"method": "coca", "max_new_tokens": 8},
    ],
)
def test_a_models_file_runs_no_code_and_is_checked(exported, tmp_path, monkeypatch, capsys, prompt):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w')\nclass Method: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    (exported / "coca_prompt.json").write_text(json.dumps(prompt))
    assert main(["ask", str(exported), "2100+4300"]) == 1
    assert "coca_prompt.json: " in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_python_of_a_models_directory_is_not_run(tmp_path):
    """Whether the model is refused, or read by the class that transformers has for its kind."""
    model = write_random_model(tmp_path / "model", "qwen2")
    config = json.loads((model / "config.json").read_text())
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (model / "config.json").write_text(json.dumps({**config, "auto_map": names}))
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    main(["ask", str(model), "1+1?", "--max-tokens", "1"])
    assert not (tmp_path / "ran").exists()


def without_prompt(run):
    """Remove the form of the prompts from the marker of a run, and return it."""
    marker = json.loads((run / MARKER).read_text())
    (run / MARKER).write_text(json.dumps({**marker, "prompt": None}))
    return marker["prompt"]


def test_a_run_of_an_earlier_version_is_exported_with_the_form_of_its_questions(finished_demo, tmp_path, monkeypatch):
    """They may need a package that is not here; the model is exported all the same."""
    run = tmp_path / "run"
    shutil.copytree(finished_demo, run)
    written = without_prompt(run)
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "coca_prompt.json").read_text()) == written
    assert written["form"]["instructions"] == {"math": ""}

    def missing(*_):
        raise MissingDependencyError("not installed: pyarrow")

    monkeypatch.setattr("coca_mindspeed.local.inputs.load_data", missing)
    assert main(["export", str(run), "--output", str(tmp_path / "other")]) == 0
    found = json.loads((tmp_path / "other" / "coca_prompt.json").read_text())
    assert found == {**written, "form": {**written["form"], "instructions": {}}}


def test_a_served_model(capsys, monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with chat_server() as server:
        server.reply = lambda request: (200, "<confidence> 0.8 </confidence> Vienna.")
        assert main(["ask", server.url, "Capital of Austria?", "--json", "--samples", "2"]) == 0
        request = server.requests[0]
    assert request["messages"] == [
        {"role": "system", "content": training_method("coca").system_prompt},
        {"role": "user", "content": f"Capital of Austria? {SHORT_ANSWER}"},
    ]
    assert [(reply["confidence"], reply["answer"]) for reply in replies(capsys)] == [(0.8, "Vienna.")] * 2


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["./none", "q"], 1, "none"),
        (["model", ""], 2, "QUESTION"),
        (["model", "-"], 2, "QUESTION"),
        (["./a,(b)", "q"], 1, "a,(b)"),
        (["http://127.0.0.1:9/v1", "q"], 1, "127.0.0.1:9"),
    ],
)
def test_refusals(arguments, code, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["ask", *arguments]) == code
    assert named in capsys.readouterr().err


@pytest.fixture
def untrusted(tmp_path, monkeypatch):
    """A run whose config.yaml names a method's file, and a model whose config.json names code; both leave ``ran``."""
    monkeypatch.chdir(tmp_path)
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (tmp_path / "evil.py").write_text(f"{code}class Method: ...\n")
    run, model = tmp_path / "run", tmp_path / "model"
    write_marker(run, "run")
    config = to_yaml(compose_run("demo").run).replace("name: coca\n", f"name: {tmp_path}/evil.py:Method\n")
    (run / "config.yaml").write_text(config)
    for directory, content in (
        (run / "model", {"model_type": "llama"}),
        (model, {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}),
    ):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(content))
    (model / "evil.py").write_text(f"{code}class Config: ...\n")
    return tmp_path


@pytest.mark.parametrize("named", ["run", pytest.param("run/model", marks=pytest.mark.nightly), "model"])
def test_python_of_a_directory_is_run_only_if_it_is_trusted(untrusted, capsys, named):
    assert main(["ask", str(untrusted / named), "q"]) == 1
    assert not (untrusted / "ran").exists()
    assert "trust" in capsys.readouterr().err
    with suppress(Exception):  # neither is a whole method or model
        main(["ask", str(untrusted / named), "q", "--trust-remote-code"])
    assert (untrusted / "ran").exists()


def test_a_method_of_ones_own_is_described_only_if_it_is_trusted(untrusted, capsys):
    (untrusted / "run" / "summary.json").write_text("{}")
    command = ["export", str(untrusted / "run"), "--output", str(untrusted / "out"), "--card"]
    assert main(command) == 1
    assert not (untrusted / "ran").exists()
    assert "--trust-remote-code" in capsys.readouterr().err


SEVERAL = {"math": " Think.", "factual": " Briefly.", "code": None}
# Instructions of an export, arguments, and what follows the question; None: refused.
ASKED = [
    (SEVERAL, [], None),
    (SEVERAL, ["--category", "math"], " Think."),
    (SEVERAL, ["--category", "code"], ""),
    (SEVERAL, ["--category", "maths"], None),
    (SEVERAL, ["--instruction", "Now."], " Now."),
    ({"mine": "\nHere."}, [], "\nHere."),
    ({"mine": "\nHere."}, ["--category", "math"], f" {MATH_INSTRUCTION}"),
    ({}, [], f" {SHORT_ANSWER}"),
]


@pytest.mark.parametrize(("instructions", "arguments", "behind"), ASKED)
def test_a_server_is_asked_in_the_form_of_an_export(instructions, arguments, behind, tmp_path, monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    form = PromptForm(system_prompt="S", instructions=instructions, decimals=2)
    trained = TrainedPrompt(form=form, method="coca", max_new_tokens=9)
    (tmp_path / "coca_prompt.json").write_text(trained.model_dump_json())
    with chat_server() as server:
        server.reply = lambda request: (200, "<confidence>0.80</confidence> Vienna.")
        code = main(["ask", server.url, "Capital?", "--form", str(tmp_path), *arguments])
        assert code == (0 if behind is not None else code or 1)
        sent = [request["messages"] for request in server.requests]
    user = {"role": "user", "content": f"Capital?{behind}"}
    assert sent == ([] if behind is None else [[{"role": "system", "content": "S"}, user]])


class Asked(Exception):  # noqa: N818 - no error: it carries them out of the command
    """The settings and the prompt that a model would be asked with."""


@pytest.fixture
def asked_with(monkeypatch):
    """The settings, the instruction and the system prompt of a local `ask`, before any response is sampled."""

    def asked(policy, config, records, system_prompt, samples):
        raise Asked(config, records[0].metadata["instruction"], system_prompt)

    monkeypatch.setattr("coca_mindspeed.cli.ask.ask", asked)
    monkeypatch.setattr("coca_mindspeed.local.load.load_policy", lambda *_, **__: None)

    def settings(*arguments):
        with pytest.raises(Asked) as caught:
            main(["ask", *map(str, arguments), "2000+3000"])
        return caught.value.args

    return settings


def test_the_settings_of_a_run_hold_unless_others_are_typed(finished_demo, tmp_path, asked_with, capsys):
    run = shutil.copytree(finished_demo, tmp_path / "run")
    trained = compose_run(str(run / "config.yaml"), ["method.entropy_bonus=0.01"]).run
    (run / "config.yaml").write_text(to_yaml(trained))
    assert main(["export", str(run), "--output", str(tmp_path / "export")]) == 0
    limit = trained.rollout.max_new_tokens
    assert limit not in (3, 512)
    coca, rlvr = (training_method(name).system_prompt for name in ("coca", "rlvr"))
    for model in (run, tmp_path / "export"):
        settings, instruction, system_prompt = asked_with(model)
        assert (settings.rollout.max_new_tokens, settings.method.name) == (limit, "coca")
        assert (instruction, system_prompt) == ("", coca)
        settings, instruction, system_prompt = asked_with(
            model, "--max-tokens", 3, "--instruction", " Now.", "--method", "rlvr"
        )
        assert (settings.rollout.max_new_tokens, settings.method.name) == (3, "rlvr")
        assert (instruction, system_prompt) == (" Now.", rlvr)
        assert not hasattr(settings.method, "entropy_bonus")
    assert asked_with(run / "untrained", "--max-tokens", 4)[0].rollout.max_new_tokens == 4
    shutil.copytree(run / "untrained", tmp_path / "plain")
    (context := json.loads((tmp_path / "plain" / "config.json").read_text()))["max_position_embeddings"] = 2048
    (tmp_path / "plain" / "config.json").write_text(json.dumps(context))
    settings, instruction, _ = asked_with(tmp_path / "plain")
    assert (settings.rollout.max_new_tokens, instruction) == (512, SHORT_ANSWER)


def test_an_export_of_a_method_of_ones_own_is_asked_by_a_named_method(finished_demo, tmp_path, asked_with, capsys):
    run, export = shutil.copytree(finished_demo, tmp_path / "run"), tmp_path / "export"
    prompt = without_prompt(run)
    form = {**prompt["form"], "system_prompt": "Mine."}
    (run / "coca_prompt.json").write_text(json.dumps({**prompt, "method": None, "form": form}))  # of release 0.3
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("name: coca\n", f"name: {tmp_path}/mine.py:Method\n"))
    (tmp_path / "mine.py").write_text("raise SystemExit('run')\n")
    assert main(["export", str(run), "--output", str(export)]) == 0
    assert main(["ask", str(export), "2+3"]) == 1
    assert "--method" in capsys.readouterr().err
    settings, instruction, system_prompt = asked_with(export, "--method", "coca")
    assert (settings.method.name, instruction, system_prompt) == ("coca", "", "Mine.")
    (run / "coca_prompt.json").unlink()  # of a release before
    assert main(["export", str(run), "--output", str(export), "--overwrite"]) == 0
    assert not (export / "coca_prompt.json").exists()


def test_prompts_beyond_the_context_are_refused(finished_demo, tmp_path, capsys):
    model = shutil.copytree(finished_demo / "model", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    for question, tokens, named in (("2" * 60, "8", "its prompt has"), ("2+3", "39", "--max-tokens=39")):
        assert main(["ask", str(model), question, "--instruction", "", "--max-tokens", tokens]) == 1
        assert named in capsys.readouterr().err
