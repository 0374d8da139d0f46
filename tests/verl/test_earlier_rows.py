"""verl's log file over several starts, each of which truncates it and may be killed at any moment."""

import json
from pathlib import Path

import pytest

from coca_mindspeed.errors import DataError
from coca_mindspeed.verl.checkpoints import MetricsBeforeResume, file_of_verls_log


class Killed(BaseException):
    """The process is gone."""


def start(log, step, until, killed=""):
    """One start of a run: in verl's order, from the checkpoint of ``step`` to the row of step ``until``."""
    log.parent.mkdir(exist_ok=True)
    earlier = MetricsBeforeResume(log, step)
    if killed == "before verl opens its log":
        raise Killed
    with log.open("wb", buffering=0) as file:
        if killed == "with an empty log":
            raise Killed

        def write(data, number):
            if killed == f"while step {number} is logged again":
                file.write(b'{"step": ')
                raise Killed
            file.write(json.dumps({"step": number, "data": data}).encode() + b"\n")

        earlier.replay(write)
        earlier.replay(write)  # at the next validation
        killed = ""
        for number in range(step + 1, until + 1):
            write({"reward/confidence": -0.1 * number, "eval/ece": None}, number)


def steps(log):
    return [json.loads(line)["step"] for line in log.read_text().splitlines()]


DEATHS = ["", "before verl opens its log", "with an empty log", "while step 3 is logged again"]


@pytest.mark.parametrize("killed", DEATHS)
def test_a_resumed_run_has_every_step_once(tmp_path, killed):
    log = tmp_path / "metrics.jsonl"
    start(log, 0, 5)
    before = log.read_text().splitlines()
    log.write_text(log.read_text() + '{"step": 6, "da')
    for _ in range(2 if killed else 0):
        with pytest.raises(Killed):
            start(log, 3, 7, killed)
    start(log, 3, 7)
    assert steps(log) == [1, 2, 3, 4, 5, 6, 7]
    assert [json.loads(line) for line in log.read_text().splitlines()[:3]] == list(map(json.loads, before[:3]))
    start(log, 6, 8)
    assert steps(log) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_that_starts_afresh_has_its_own_log_alone(tmp_path):
    log = tmp_path / "metrics.jsonl"
    start(log, 0, 5)
    with pytest.raises(Killed):
        start(log, 4, 5, "with an empty log")
    start(log, 0, 2)
    assert steps(log) == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_damaged_log_is_named_and_kept(tmp_path):
    start(tmp_path / "other" / "metrics.jsonl", 3, 5)  # a checkpoint from elsewhere brings no log
    assert steps(tmp_path / "other" / "metrics.jsonl") == [4, 5]
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1, "data": {}}\nnot verl\'s\n{"step": 2, "data": {}}\n')
    before = log.read_bytes()
    with pytest.raises(DataError, match=r"/metrics\.jsonl:2: "):
        MetricsBeforeResume(log, 2)
    assert log.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "other"]


def test_the_file_is_found_as_verl_finds_it(tmp_path):
    assert file_of_verls_log("p", "e", {"VERL_FILE_LOGGER_PATH": "/a/b.jsonl"}) == Path("/a/b.jsonl")
    assert file_of_verls_log("p", "e", {"VERL_FILE_LOGGER_ROOT": str(tmp_path)}) == tmp_path / "p" / "e.jsonl"
    assert file_of_verls_log("p", "e", {}) == Path("p/e.jsonl")
