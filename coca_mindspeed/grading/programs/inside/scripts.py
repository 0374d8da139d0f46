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
ending = importlib.import_module("ending")
remote = importlib.import_module("remote")
waiting = importlib.import_module("waiting")

_STDERR_BYTES = 4_096
_OUTPUT_SLACK = 1 << 20
# For reading what a program has left that ended in time, once that is seen to be late; its children may write on.
_LATE_SECONDS = 0.5
_FLOAT_TOLERANCE = 1e-6
Ending, RIGHT, WRONG = ending.Ending, ending.RIGHT, ending.WRONG


class ScriptRun(NamedTuple):
    """One run of a program that reads standard input.

    Attributes:
        output: what it printed; empty where there is a problem.
        problem: why the output does not count, or ``""``.
        timed_out: whether the problem is its time.
        exit_code: where it ended by itself, and not well.
        error: the last line of its standard error, of such an end.
    """

    output: bytes
    problem: str = ""
    timed_out: bool = False
    exit_code: int | None = None
    error: str = ""


def run_stdio(job: dict[str, Any]) -> Any:
    """The ending of a program that is run once for each case, in a fresh process."""
    script = write_script(job)
    deadline = time.monotonic() + job["total_seconds"]
    for number, case in enumerate(job["cases"], start=1):
        seconds = min(job["seconds"], deadline - time.monotonic())
        if seconds <= 0:
            reason = f"case {number}: all cases together took longer than {job['total_seconds']:g} s"
            return Ending(WRONG, reason, timed_out=True)
        expected = case["output"].encode("utf-8", "surrogatepass")
        try:
            run = run_script(script, case["input"].encode("utf-8", "surrogatepass"), len(expected), seconds)
        except remote.CannotTestError as error:
            # The program has run in the cases before: what keeps it from starting now, other than a busy machine, is
            # its own doing.
            if number == 1 or type(error) is not remote.CannotTestError:
                raise
            return Ending(WRONG, f"case {number}: {error}")
        end_leftovers(job)
        if run.problem:
            return Ending(WRONG, f"case {number}: {run.problem}", run.timed_out)
        if not same_output(run.output.decode("utf-8", "replace"), case["output"]):
            return Ending(WRONG, f"case {number}: another output")
    return Ending(RIGHT)


def write_script(job: dict[str, Any]) -> str:
    """Put the program into its scratch directory, and say where."""
    script = f"{job['scratch']}/program.py"
    with open(script, "w", encoding="utf-8", errors="surrogatepass") as file:  # noqa: PTH123  # pathlib takes 8 ms to import
        file.write(job["source"])
    return script


def end_leftovers(job: dict[str, Any]) -> None:
    """End what a run of the program has left behind: it would count against the next run's limits."""
    if job["limits"]["alone"]:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, 0)[0]:
                pass


def run_script(script: str, data: bytes, expected_bytes: int, seconds: float) -> ScriptRun:
    """Run the script on ``data``, for so long at most and as long as its output is not far longer than expected."""
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
    deadline = time.monotonic() + seconds
    late_since: float | None = None
    reading, writing = [stdout, stderr], [stdin]
    too_slow = ScriptRun(b"", f"took longer than {seconds:g} s", timed_out=True)
    try:
        while reading:
            if writing and not unsent:
                process.stdin.close()
                writing = []
            left = deadline - time.monotonic()
            readable, writable = waiting.until_ready(reading, writing, deadline)
            if left <= 0 and not readable:
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
            if (now := time.monotonic()) > deadline:  # what has ended by then is read to its end
                late_since = late_since or now
                if process.poll() is None or now - late_since > _LATE_SECONDS:
                    return too_slow
            for descriptor in writable:
                try:
                    unsent = unsent[os.write(descriptor, unsent[: 1 << 16]) :]
                except BrokenPipeError:  # it need not read all of its input
                    unsent = unsent[len(unsent) :]
        if (code := process.wait(max(0.1, deadline - time.monotonic()))) != 0:
            last_line = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
            return ScriptRun(b"", f"exit code {code}: {last_line}", exit_code=code, error=last_line)
    except waiting.TooManyFilesError as error:
        return ScriptRun(b"", str(error))
    except subprocess.TimeoutExpired:
        return too_slow
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
    return ScriptRun(bytes(output))


def same_output(found: str, expected: str) -> bool:
    """Equal words, white space apart; decimals where decimals are expected may differ by one part in a million."""
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
