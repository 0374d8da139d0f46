"""The request log: no acknowledged record is lost by a kill, a full disk, a second proxy or a second start."""

import json
import resource
import signal
import sqlite3
import threading
from collections import Counter

import httpx
import pytest

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.predictions import read_predictions
from coca_mindspeed.utils.json_files import read_json_lines
from coca_router.cli import main
from coca_router.request_log import LogError, RequestLog
from coca_router.trace import Trace
from tests.router.servers_for_tests import (
    CLIENT_SECONDS,
    QUESTION,
    SURE,
    WHOLE,
    FakeEngine,
    RawEngine,
    ask,
    http,
    labelled,
    logged,
    proxy_process,
    routed,
    stream,
)
from tests.support.waiting import until


def written(log, name, outcome="ok", **more):
    trace = Trace(name, tier="t", action="answer", basis="confidence", stated_confidence=0.9, confidence=0.9,
                  tokens_to_confidence=5, **more)  # fmt: skip
    log.write(trace, outcome, trace.started + 1, "q", "a")


def test_one_label_for_each_answer(tmp_path):
    log = RequestLog(tmp_path, "coca")
    written(log, "a")
    written(log, "b", outcome="client_gone")
    assert (tmp_path / "requests.sqlite").stat().st_mode & 0o007 == 0
    assert log.label("a", True)
    for name in ("a", "b", "c"):
        assert not log.label(name, False)
    other = RequestLog(tmp_path, "coca")  # a second proxy of the same log
    written(other, "d")
    assert log.label("d", True)
    assert not other.label("d", False)
    assert [(p.id, p.correct) for p in labelled(tmp_path)] == [("a", True), ("d", True)]


def test_the_tokens_of_a_prediction_are_those_of_its_tier_with_the_confidence(tmp_path):
    log = RequestLog(tmp_path, "coca")
    written(log, "a", tokens=Counter({"s": 8, "t": 25}), answer_tokens=20)
    assert log.label("a", True)
    [prediction] = labelled(tmp_path)
    assert (prediction.tokens, prediction.tokens_to_confidence) == (25, 5)


def test_old_records_are_deleted(tmp_path):
    for days, kept in ((2, 2), (1, 1)):
        log = RequestLog(tmp_path, "coca")
        written(log, f"old{days}")
        log.close()
        with sqlite3.connect(tmp_path / "requests.sqlite") as database:
            database.execute("UPDATE requests SET time = time - 90000")
        with routed(FakeEngine(*SURE), log={"directory": str(tmp_path), "max_days": days}) as (url, _):
            ask(url)
        assert len(logged(tmp_path)) == kept


class FullDisk:
    """No file of this process can grow beyond ``size`` bytes."""

    def __init__(self, size):
        self.size = size

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_proxy_starts_on_a_full_disk(earlier, tmp_path):
    if earlier:
        log = RequestLog(tmp_path, "coca")
        written(log, "a")
        log.close()
    with FullDisk(0):
        log = RequestLog(tmp_path, "coca")
        assert log.problem is not None
        written(log, "b")
        with pytest.raises(LogError):
            log.label("a", True)
    written(log, "c")
    assert log.problem is None
    assert [row["id"] for row in logged(tmp_path)] == (["a", "b", "c"] if earlier else ["b", "c"])


def test_a_file_that_is_no_log_is_refused(tmp_path):
    (tmp_path / "requests.sqlite").write_bytes(b"x" * 5000)
    with pytest.raises(ConfigError, match="cannot be opened"):
        RequestLog(tmp_path, "coca")
    with pytest.raises(ConfigError, match="cannot be opened"):
        RequestLog(tmp_path / "requests.sqlite", "coca")


def test_a_full_disk_spoils_no_answer_and_is_told(tmp_path):
    with routed(FakeEngine(*SURE), log={"directory": str(tmp_path)}) as (url, _):
        health = url.replace("/v1", "/health")
        assert http.get(health).json()["status"] == "ok"
        first = ask(url).id
        with FullDisk(0):
            answers = [ask(url) for _ in range(3)]
            streamed = [c for c in ask(url, stream=True) if c.choices]
            assert {a.choices[0].message.content for a in answers} == {"Forty-two."}
            assert streamed[-1].choices[0].finish_reason == "stop"
            found = http.get(health).json()
            assert (found["status"], found["log"]["waiting"]) == ("degraded", 4)
            label = http.post(f"{url}/coca/labels", json={"id": first, "correct": True})
            assert (label.status_code, label.json()["error"]["code"]) == (503, "log_error")
        assert http.post(f"{url}/coca/labels", json={"id": answers[0].id, "correct": True}).status_code == 200
        assert http.get(health).json()["status"] == "ok"
    assert len(logged(tmp_path)) == 5


@pytest.mark.slow
def test_kill_loses_no_acknowledged_record(tmp_path):
    """Clients ask and label without pause; the proxy is killed; every answer and label that arrived is in the log."""
    answered, acknowledged, log = set(), set(), tmp_path / "log"

    def asking(url):
        body = {"model": "coca", "messages": QUESTION}
        with httpx.Client(timeout=CLIENT_SECONDS) as http:
            try:
                while True:
                    id_ = http.post(f"{url}/chat/completions", json=body).json()["id"]
                    answered.add(id_)
                    label = http.post(f"{url}/coca/labels", json={"id": id_, "correct": True})
                    acknowledged.update([id_] if label.status_code == 200 else [])
            except httpx.HTTPError:
                return

    with RawEngine(stream(WHOLE), close=False).served() as engine:
        for _ in range(2):
            with proxy_process(tmp_path, engine, log={"directory": str(log)}) as (url, process):
                threads = [threading.Thread(target=asking, args=(url,)) for _ in range(4)]
                for thread in threads:
                    thread.start()
                before = len(acknowledged)
                until(lambda before=before: len(acknowledged) > before + 20, 60)
                process.send_signal(signal.SIGKILL)
                for thread in threads:
                    thread.join()
    assert {row["id"] for row in logged(log)} >= answered
    assert {p.id for p in labelled(log)} >= acknowledged


def test_the_export_of_a_running_proxy(tmp_path, capsys):
    log = tmp_path / "log"
    with routed(FakeEngine(*SURE), log={"directory": str(log)}) as (url, _):
        ids = [ask(url).id for _ in range(2)]
        http.post(f"{url}/coca/labels", json={"id": ids[0], "correct": False})
        config = {
            "log": {"directory": "log"},
            "backends": {"a": {"url": url, "model": "m"}},
            "tiers": [{"name": "t", "backend": "a", "bands": [{"at_least": 0, "action": "answer"}]}],
        }
        (tmp_path / "s.yaml").write_text(json.dumps(config))
        assert main(["serve", str(tmp_path / "s.yaml"), "--export", str(tmp_path / "out")]) == 0
    rows = [row for _, row in read_json_lines(tmp_path / "out" / "requests.jsonl")]
    assert [(row["id"], row["correct"]) for row in rows] == [(ids[0], False), (ids[1], None)]
    assert [p.id for p in read_predictions(tmp_path / "out" / "labelled.jsonl")] == ids[:1]
    del config["log"]
    (tmp_path / "s.yaml").write_text(json.dumps(config))
    assert main(["serve", str(tmp_path / "s.yaml"), "--export", str(tmp_path / "out")]) == 2
