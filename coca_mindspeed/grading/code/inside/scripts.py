"""Programs that read standard input and print: one fresh process for each case."""

import importlib
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, NamedTuple

sys.path.insert(0, __file__.rpartition("/")[0])
clock = importlib.import_module("clock")
processes = importlib.import_module("process")
remote = importlib.import_module("remote")

_STDERR_BYTES = 4_096
_OUTPUT_SLACK = 1 << 20
# For reading the rest of a program that ended in time; its children may go on writing.
_LATE_SECONDS = 0.5
# Poll interval, and least time, for a program that has closed its output to exit.
_EXIT_SECONDS = 0.1
_FLOAT_TOLERANCE = 1e-6
JobResult, RIGHT, WRONG = remote.JobResult, remote.RIGHT, remote.WRONG


class ScriptRun(NamedTuple):
    """One run of a program that reads standard input.

    Attributes:
        output: of the program; empty if there is a problem.
        problem: why the output does not count, or ``""``.
        timed_out: whether the problem is a time limit.
        exit_code: if it ended by itself, and not with 0.
        error: last line of its standard error in that case.
    """

    output: bytes
    problem: str = ""
    timed_out: bool = False
    exit_code: int | None = None
    error: str = ""


def run_stdio(job: dict[str, Any]) -> Any:
    """Run the program once for each case, in a fresh process."""
    script = write_script(job)
    deadline = clock.program_clock().deadline(job["total_seconds"])
    for number, case in enumerate(job["cases"], start=1):
        if remote.expired(deadline, job["total_seconds"]):
            reason = f"case {number}: all cases together took longer than {job['total_seconds']:g} s"
            return JobResult(WRONG, reason, timed_out=True)
        expected = case["output"].encode("utf-8", "surrogatepass")
        data = case["input"].encode("utf-8", "surrogatepass")
        try:
            run = run_script(script, data, len(expected), job["seconds"], deadline)
        except remote.CannotTestError as error:
            # It has run before, so that a failure to start, other than on a busy machine, is its own fault.
            if number == 1 or type(error) is not remote.CannotTestError:
                raise
            return JobResult(WRONG, f"case {number}: {error}")
        end_leftovers(job)
        if run.problem:
            return JobResult(WRONG, f"case {number}: {run.problem}", run.timed_out)
        if not same_output(run.output.decode("utf-8", "replace"), case["output"]):
            return JobResult(WRONG, f"case {number}: another output")
    return JobResult(RIGHT)


def write_script(job: dict[str, Any]) -> str:
    """Write the program into its scratch directory and return the path."""
    script = f"{job['scratch']}/program.py"
    with open(script, "w", encoding="utf-8", errors="surrogatepass") as file:  # noqa: PTH123  # pathlib takes 8 ms to import
        file.write(job["source"])
    return script


def end_leftovers(job: dict[str, Any]) -> None:
    """Kill processes that a run has left behind: they count against the next run's limits."""
    if job["limits"]["alone"]:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, 0)[0]:
                pass


def run_script(script: str, data: bytes, expected_bytes: int, seconds: float, within: Any = None) -> ScriptRun:
    """Run the script on ``data``; its output may not be far longer than expected.

    Args:
        script: path of the program.
        data: standard input.
        expected_bytes: length of the expected output.
        seconds: limit for this run, as ``clock.py`` counts.
        within: deadline of all runs together, if there are several.

    Raises:
        StarvedError: the machine was too busy to tell whether the program is too slow.
    """
    deadline = within.sooner(seconds) if within else clock.program_clock().deadline(seconds)
    process = remote.start(
        [sys.executable, "-I", "-B", "-X", "utf8", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=script.rpartition("/")[0],
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    stdin, stdout, stderr = process.stdin.fileno(), process.stdout.fileno(), process.stderr.fileno()
    os.set_blocking(stdin, False)
    output, errors, unsent = bytearray(), bytearray(), memoryview(data)
    late_since: float | None = None
    too_slow = ScriptRun(b"", f"took longer than {seconds:g} s", timed_out=True)
    reading, writing = [stdout, stderr], [stdin]
    try:
        while reading:
            if writing and not unsent:
                process.stdin.close()
                writing = []
            late = remote.expired(deadline, seconds)
            readable, writable = processes.until_ready(reading, writing, deadline)
            if late and not readable:
                return too_slow
            for descriptor in readable:
                chunk = os.read(descriptor, 1 << 16)
                if not chunk:
                    reading.remove(descriptor)
                elif descriptor == stdout:
                    output += chunk
                else:
                    errors = (errors + chunk)[-_STDERR_BYTES:]
            if len(output) > expected_bytes + _OUTPUT_SLACK:
                return ScriptRun(b"", "printed too much")
            if remote.expired(deadline, seconds):  # if it has ended, read the rest
                late_since = late_since or time.monotonic()
                if process.poll() is None or time.monotonic() - late_since > _LATE_SECONDS:
                    return too_slow
            for descriptor in writable:
                try:
                    unsent = unsent[os.write(descriptor, unsent[: 1 << 16]) :]
                except BrokenPipeError:  # it need not read all of its input
                    unsent = unsent[len(unsent) :]
        while (code := _exit_code(process)) is None:
            if remote.expired(deadline, seconds):
                return too_slow
        if code != 0:
            last_line = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
            return ScriptRun(b"", f"exit code {code}: {last_line}", exit_code=code, error=last_line)
    except processes.TooManyFilesError as error:
        return ScriptRun(b"", str(error))
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
    return ScriptRun(bytes(output))


def _exit_code(process: "subprocess.Popen[bytes]") -> int | None:
    """The exit code of a program that has closed its output; None if it is still running."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(_EXIT_SECONDS)
    return None


def same_output(found: str, expected: str) -> bool:
    """Whether the words are equal; decimals, if expected, may differ by one part in a million."""
    found_words, expected_words = found.split(), expected.split()
    return len(found_words) == len(expected_words) and all(map(_same_word, found_words, expected_words))


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    if "." not in expected:
        return False
    try:
        a, b = float(found), float(expected)
    except ValueError:
        return False
    return math.isclose(a, b, rel_tol=_FLOAT_TOLERANCE, abs_tol=_FLOAT_TOLERANCE)
