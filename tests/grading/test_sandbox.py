"""The sandbox: attacks as root and as a normal user, its system call filter, several graders, and its end."""

import errno
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from coca_sandbox import sandbox as sandbox_module
from coca_sandbox.inside.seccomp import filter_program
from coca_sandbox.sandbox import Limits, Sandbox, SandboxError, locked_user_id
from tests.grading import sandbox_attacks
from tests.grading.dying_trainer import PROCESSES, descendants, end_survivors
from tests.grading.sandbox_package import REPOSITORY, needs_sandbox, script_of
from tests.grading.tables import read_table
from tests.tables import check_rows


@pytest.fixture(scope="module")
def server_port():
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module", params=["this user", pytest.param("nobody", marks=pytest.mark.nightly)])
def reports(request, server_port):
    """Every attack's report; run once as the user of these tests and, where that is root, once as nobody."""
    if request.param == "this user":
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("GRADING_SECRET", "x")
            return sandbox_attacks.run_all(str(REPOSITORY), server_port)
    with script_of("nobody", "sandbox_attacks.py", "attacks.txt") as (command, options):
        options["env"]["GRADING_SECRET"] = "x"
        arguments = [str(REPOSITORY), str(server_port)]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, **options)
    if "no sandbox" in done.stderr or "there is none" in done.stderr:
        pytest.skip(f"a normal user has no sandbox here: {done.stderr.strip().splitlines()[-1]:.200}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_sandbox
def test_nothing_of_the_host_can_be_reached(reports):
    found = {name: (reports[name]["outcome"], reports[name]["reason"]) for name in sandbox_attacks.PROBES}
    assert {name: report for name, report in found.items() if report != ("right", "")} == {}


def longest_seconds(name):
    """In wall time, with the sandbox's start; a machine may be so busy that a program that computes is tried twice."""
    charged = sandbox_attacks.seconds_of(name) + sandbox_attacks.MARGIN
    once = sandbox_module.START_SECONDS + sandbox_module.WALL_FACTOR * charged + sandbox_module.GRACE_SECONDS
    return 2 * once if name in sandbox_attacks.COMPUTING else once


@needs_sandbox
def test_no_hostile_program_passes_or_outlives_its_limit(reports):
    def check(name):
        report = reports[name]
        assert report["outcome"] == "wrong" or (report["starved"] and name in sandbox_attacks.COMPUTING), report
        assert report["reason"]
        assert isinstance(report["seconds"], float)
        assert report["seconds"] < longest_seconds(name), report
        assert sandbox_attacks.MEET_A_LIMIT.get(name, "") in str(report["reason"]), report

    check_rows(check, [(name,) for name in sandbox_attacks.HOSTILE])


def programs_that_run():
    """Command lines, by process and time of its start, of programs of a sandbox; other tests may be running theirs."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, stat = (process / "cmdline").read_text(), (process / "stat").read_text()
        except OSError:
            continue
        if sandbox_attacks.MARKER in command or "/inside/program.py" in command:
            found[f"{process.name} {stat.rpartition(')')[2].split()[19]}"] = command
    return found


@needs_sandbox
@pytest.mark.usefixtures("reports")
def test_no_process_is_left_behind():
    """What outlives every limit of a program; the attacks' own would sleep for a quarter of an hour."""
    left = programs_that_run()
    deadline = time.monotonic() + 60
    while left and time.monotonic() < deadline:
        time.sleep(0.2)
        left = {key: command for key, command in programs_that_run().items() if key in left}
    assert left == {}
    assert not list(REPOSITORY.glob("attack"))


def test_running_without_a_sandbox_is_an_explicit_choice(monkeypatch):
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda name: None)
    with pytest.raises(SandboxError, match="allow_unsandboxed"):
        Sandbox()
    sandbox = Sandbox(allow_unsandboxed=True)
    assert not sandbox.sandboxed
    job = {"kind": "asserts", "prompt": None, "entry_point": None, "seconds": 5.0, "tests": "assert answer(6) == 42"}
    assert sandbox.run({**job, "source": "def answer(x): return 7 * x"}, 5.0).outcome == "right"
    assert sandbox.run({**job, "source": "import os\ndef answer(x): os._exit(0)"}, 5.0).outcome == "wrong"
    stdio = {"kind": "stdio", "cases": [{"input": "6", "output": "42"}], "seconds": 5.0}
    assert sandbox.run({**stdio, "source": "print(7 * int(input()))"}, 5.0).outcome == "right"


X86_64, AARCH64 = 0xC000003E, 0xC00000B7
ALLOWED, KILLED, FAKED = "allowed", "killed", 0


def verdict(machine, number, *arguments, architecture=None):
    """The filter's verdict on a system call: an error number, or one of the words above."""
    found = {"x86_64": X86_64, "aarch64": AARCH64}[machine] if architecture is None else architecture
    words = {0: number, 4: found}
    for place, argument in enumerate(arguments):
        words |= {16 + 8 * place: argument & 0xFFFFFFFF, 20 + 8 * place: argument >> 32}
    program, at, accumulator = filter_program(machine), 0, 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x20:
            accumulator = words.get(operand, 0)
        elif code == 0x06:
            return {0x7FFF0000: ALLOWED, 0x80000000: KILLED}.get(operand, operand & 0xFFFF)
        else:
            taken = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: accumulator & operand != 0}[code]
            at += if_true if taken else if_false


def test_the_filter():
    def check(name, arguments, on_x86_64, on_aarch64, expected):
        for machine, number in (("x86_64", on_x86_64), ("aarch64", on_aarch64)):
            found = verdict(machine, int(number), *(int(argument, 0) for argument in arguments.split()))
            assert found == {"allowed": ALLOWED, "0": FAKED}.get(expected, getattr(errno, expected, None)), machine

    check_rows(check, read_table("system_calls.tsv"))


def test_calls_of_another_machine_are_not_taken_for_this_ones():
    assert verdict("x86_64", 0, architecture=AARCH64) == KILLED
    assert verdict("x86_64", 0x40000000) == errno.ENOSYS


def test_an_unknown_machine_has_no_filter():
    with pytest.raises(ValueError, match="riscv64"):
        filter_program("riscv64")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has several user ids")


@needs_sandbox
@pytest.mark.parametrize("user", ["this user", "nobody"])
def test_programs_that_use_all_their_processes_stay_right(user):
    with script_of(user, "greedy_programs.py") as (command, options):
        graders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) for _ in range(2)]
        for grader in graders:
            said, _ = grader.communicate()
            assert json.loads(said) == [["right", ""]] * 4


@needs_sandbox
@needs_root
def test_a_user_id_is_taken_until_the_last_holder_of_its_lock_ends(monkeypatch):
    monkeypatch.setattr(sandbox_module, "UID_RANGES", ((1_900_000_000, 2),))
    with locked_user_id() as (first, lock):
        with locked_user_id() as (second, _):
            assert {first, second} == {1_900_000_000, 1_900_000_001}
            with pytest.raises(SandboxError, match="in use"), locked_user_id():
                pass
        holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
    for _ in range(20):
        with locked_user_id() as (free, _):
            assert free == second
    holder.communicate(b"\n")
    found = set()
    for _ in range(50):
        with locked_user_id() as (free, _):
            found.add(free)
    assert found == {first, second}


@needs_sandbox
@needs_root
def test_a_directory_of_locks_that_somebody_else_made_is_not_used(monkeypatch, tmp_path):
    elsewhere = tmp_path / "coca-mindspeed-user-ids"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    monkeypatch.setattr(sandbox_module, "Path", lambda name: tmp_path if name == "/run" else Path(name))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with pytest.raises(SandboxError, match="can be used"), locked_user_id():
        pass


@needs_sandbox
def test_what_a_case_leaves_behind_does_not_count_against_the_next():
    source = """
import os, time
print(input())
for _ in range(24):
    if os.fork() == 0:
        for number in (1, 2): os.close(number)
        time.sleep(100)
"""
    cases = [{"input": str(number), "output": str(number)} for number in range(4)]
    report = Sandbox().run({"kind": "stdio", "source": source, "cases": cases, "seconds": 5.0}, 20.0)
    assert (report.outcome, report.reason) == ("right", "")


STANDARD_INPUT = """
import errno, mmap, os, resource
def attempt(what, *arguments):
    try:
        what(*arguments)
    except (OSError, ValueError) as error:
        return error
    return what
won = [attempt(os.write, 0, b"x"), attempt(os.ftruncate, 0, 0), attempt(mmap.mmap, 0, 0)]  # the last one to write to
size = os.fstat(0).st_size
os.fchmod(0, 0o600)
again = os.open("/proc/self/fd/0", os.O_RDWR)
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
won += [attempt(os.ftruncate, again, most + 1), attempt(os.posix_fallocate, again, most, 1)]
names = os.listdir(".")
print(won if any(map(callable, won)) or names != ["program.py"] else size)
"""


@pytest.mark.parametrize("sandboxed", [pytest.param(True, marks=needs_sandbox), False])
def test_standard_input_is_a_file_without_a_name_for_reading_within_the_limits(sandboxed, monkeypatch):
    if not sandboxed:
        monkeypatch.setattr(sandbox_module.shutil, "which", lambda name: None)
    sandbox = Sandbox(Limits(file_bytes=1 << 20), allow_unsandboxed=not sandboxed)
    assert sandbox.sandboxed is sandboxed
    fits, too_large = "x" * (1 << 19), "x" * (3 << 20)
    programs = {
        STANDARD_INPUT: [(fits, len(fits)), ("", 0), ("123", 3)],
        # A larger one is a pipe.
        "import sys\nprint(len(sys.stdin.read()), sys.stdin.seekable())": [
            (too_large, "3145728 False"),
            ("1", "1 True"),
        ],
    }
    for source, cases in programs.items():
        job = {"kind": "stdio", "source": source, "seconds": 10.0}
        job["cases"] = [{"input": text, "output": str(output)} for text, output in cases]
        report = sandbox.run(job, 30.0)
        assert (report.outcome, report.reason) == ("right", "")


LIMITS = """
import resource
for name in input().split():
    print(*resource.getrlimit(getattr(resource, name)))
"""


@pytest.mark.parametrize("sandboxed", [pytest.param(True, marks=needs_sandbox), False])
def test_a_program_has_limits_of_its_own(sandboxed, monkeypatch):
    """Of message queues too, which only the sandbox's system call filter denies."""
    if not sandboxed:
        monkeypatch.setattr(sandbox_module.shutil, "which", lambda name: None)
    limits = Limits(memory_bytes=512 << 20, file_bytes=1 << 20, open_files=99)
    wanted = {
        "RLIMIT_AS": limits.memory_bytes, "RLIMIT_FSIZE": limits.file_bytes, "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_SIGPENDING": 128, "RLIMIT_MSGQUEUE": 0, "RLIMIT_CORE": 0,
    }  # fmt: skip
    cases = [{"input": " ".join(wanted), "output": "\n".join(f"{value} {value}" for value in wanted.values())}]
    job = {"kind": "stdio", "source": LIMITS, "cases": cases, "seconds": 10.0}
    report = Sandbox(limits, allow_unsandboxed=not sandboxed).run(job, 30.0)
    assert (report.outcome, report.reason) == ("right", "")


WORKERS = """
import os, time
from coca_mindspeed.grading.workers import Workers
from tests.grading.processes import announce_and_hang_in_one_bytecode, double
workers = Workers(count=2, seconds=300.0)
list(workers.map(double, [1, 2]))
child = os.fork()
if child == 0:  # as a data loader's worker, which lives on for a while
    os.close(1)
    time.sleep(1000)
    os._exit(0)
print(child, flush=True)
list(workers.map(announce_and_hang_in_one_bytecode, [0] * 2))
"""


@needs_sandbox
@pytest.mark.parametrize(("how", "user"), [(signal.SIGKILL, "this user"), (signal.SIGTERM, "nobody")])
def test_sandboxes_end_with_the_trainer(how, user):
    with (
        script_of(user, "dying_trainer.py") as (command, options),
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as trainer,
    ):
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "running\n"
        processes = descendants(trainer.pid)
        trainer.send_signal(how)
    assert len(processes) >= PROCESSES
    assert end_survivors(processes, 60.0) == []


def test_workers_end_with_the_trainer_whatever_it_forked():
    command = [sys.executable, "-c", WORKERS]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        child = int(trainer.stdout.readline())
        assert [trainer.stdout.readline() for _ in range(2)] == ["running\n"] * 2
        workers = descendants(trainer.pid)
        forked = {child: workers.pop(child)}
        trainer.kill()
    assert len(workers) == 2
    left = end_survivors(workers, 60.0)
    assert end_survivors(forked, 0.0)  # it lived on
    assert left == []


def test_a_program_that_takes_away_its_own_directory_is_wrong(monkeypatch):
    """The next case cannot start then, which without a sandbox a program can bring about."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    sandbox = Sandbox(allow_unsandboxed=True)
    program = "import os, shutil\nshutil.rmtree(os.path.dirname(__file__))\nprint(input())"
    job = {"kind": "stdio", "cases": [{"input": "1", "output": "1"}] * 2, "source": program, "seconds": 10.0}
    report = sandbox.run(job, total_seconds=10.0)
    assert report.outcome == "wrong", report.reason
