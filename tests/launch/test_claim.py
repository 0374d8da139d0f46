"""Two runs in one output directory: hosts and clock are those of the test."""

import json
import threading

import pytest

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.upstream import claim as module
from coca_mindspeed.upstream.claim import CLAIM, Claimant, claim_output, read_claim
from coca_mindspeed.utils.directories import LOCK
from tests.support.waiting import until


class Hosts:
    """A clock, processes that run, by number, and what happens while a process sleeps."""

    def __init__(self):
        self.seconds, self.running, self.asleep = 1000.0, {1: 7, 2: 8}, lambda: None

    def sleep(self, seconds):
        self.seconds += seconds
        self.asleep()

    def process(self, host, number=1):
        return Claimant(host, number, lambda: self.seconds, self.sleep, self.running.get)


@pytest.fixture
def hosts(monkeypatch, tmp_path):
    """No lock of this machine tells the two hosts apart."""
    monkeypatch.setattr(module, "lock_run", lambda path: claim_directory(path))
    return Hosts()


def claim_directory(path):
    path.mkdir(exist_ok=True)
    return threading.Lock()


def left_by(hosts, folder, host, number=1):
    """A claim of a process that was killed, or runs on."""
    folder.mkdir(exist_ok=True)
    (folder / CLAIM).write_text(json.dumps(vars(hosts.process(host, number).claim())))


@pytest.mark.parametrize(
    ("host", "process", "ended", "age", "wait", "waited"),
    [
        ("a", 2, True, 0, False, 0),  # this host's, gone: at once
        ("a", 2, True, 0, True, 0),
        ("a", 2, False, 1e6, True, None),  # this host's, running
        ("b", 2, False, 0, False, None),
        ("b", 2, False, 299, False, None),
        ("b", 2, False, 300, False, 0),
        ("b", 2, False, 0, True, 300),
        ("b", 2, False, 200, True, 100),
        ("b", 2, False, -5000, True, 300),  # its clock is ahead
    ],
)
def test_a_claim_that_is_there(hosts, tmp_path, capsys, host, process, ended, age, wait, waited):
    left_by(hosts, tmp_path / "run", host, process)
    if ended:
        hosts.running[process] = 9  # another process got its number
    hosts.seconds += age
    began = hosts.seconds
    ours = hosts.process("a")
    if waited is None:
        with pytest.raises(ConfigError) as refused, claim_output(tmp_path / "run", wait=wait, claimant=ours):
            pass
        assert [problem.code for problem in refused.value.problems] == ["running"]
        assert host in str(refused.value)
        assert read_claim(tmp_path / "run" / CLAIM).host == host
        return
    with claim_output(tmp_path / "run", wait=wait, claimant=ours):
        assert hosts.seconds - began == pytest.approx(waited, abs=5)
        assert read_claim(tmp_path / "run" / CLAIM).is_of(ours.claim())
    assert not (tmp_path / "run" / CLAIM).exists()
    assert (host in capsys.readouterr().out) == bool(waited)


def test_a_run_that_gives_a_sign_while_a_resume_waits_is_running(hosts, tmp_path):
    left_by(hosts, tmp_path / "run", "b")
    hosts.asleep = lambda: hosts.seconds == 1060 and left_by(hosts, tmp_path / "run", "b")
    with pytest.raises(ConfigError), claim_output(tmp_path / "run", wait=True, claimant=hosts.process("a")):
        pass
    assert hosts.seconds == 1060


def test_of_two_hosts_that_start_at_once_one_runs(hosts, tmp_path):
    left_by(hosts, tmp_path / "run", "c")
    hosts.seconds += 400
    with claim_output(tmp_path / "run", wait=False, claimant=hosts.process("a")):
        with pytest.raises(ConfigError), claim_output(tmp_path / "run", wait=False, claimant=hosts.process("b", 2)):
            pass
        assert read_claim(tmp_path / "run" / CLAIM).host == "a"


def test_a_claim_is_renewed_and_a_lost_one_ends_the_run(hosts, tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(module, "RENEWAL_SECONDS", 0.01)
    monkeypatch.setattr(module.signal, "raise_signal", sent.append)
    with claim_output(tmp_path / "run", wait=False, claimant=hosts.process("a")):
        hosts.seconds = 2000.0
        until(lambda: (claim := read_claim(tmp_path / "run" / CLAIM)) and claim.time == 2000.0)
        until(lambda: sent or left_by(hosts, tmp_path / "run", "b"))
    assert read_claim(tmp_path / "run" / CLAIM).host == "b"


def test_a_half_written_claim_is_of_another_host(hosts, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CLAIM).write_text("{")
    with pytest.raises(ConfigError), claim_output(tmp_path / "run", wait=False, claimant=hosts.process("a")):
        hosts.seconds = (tmp_path / "run" / CLAIM).stat().st_mtime


def test_the_lock_is_that_of_the_local_engine(tmp_path):
    with claim_output(tmp_path / "run", wait=False):
        assert {path.name for path in (tmp_path / "run").iterdir()} == {LOCK, CLAIM}
    assert not (tmp_path / "run").exists()  # nothing was written
