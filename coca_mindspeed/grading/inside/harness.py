"""The process that holds the tests.  Reads one job (JSON) from standard input and says how it went, with the token.

The model's program runs in another process, which never sees the tests, the expected outputs or the token: this
process gives up every privilege and cannot be traced (``PR_SET_DUMPABLE`` 0), so that a program of the same user
cannot read its memory or its files.  As the first process of its namespace it cannot be signalled either.
"""

import ast
import builtins
import ctypes
import importlib
import json
import math
import os
import resource
import select
import subprocess
import sys
import time
from typing import Any

sys.path.insert(0, __file__.rpartition("/")[0])
remote = importlib.import_module("remote")
seccomp = importlib.import_module("seccomp")

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_SIGKILL = 9
_STDERR_BYTES = 4_096
_OUTPUT_SLACK = 1 << 20
_FLOAT_TOLERANCE = 1e-6

RIGHT, WRONG, UNGRADABLE = "right", "wrong", "ungradable"


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    confine(job["limits"])
    # The program finds nothing of the job in this process's files, whatever it may open.
    sys.stdin.close()
    kinds = {"asserts": run_asserts, "stdio": run_stdio, "call": run_calls}
    try:
        outcome, reason = kinds[job["kind"]](job)
    except remote.ProgramError as error:
        outcome, reason = WRONG, f"the program {error}"
    except remote.CannotTestError as error:
        outcome, reason = UNGRADABLE, str(error)
    print(json.dumps({"token": job["token"], "outcome": outcome, "reason": reason[:500]}), flush=True)


def confine(limits: dict[str, Any]) -> None:
    """Give up root, set the limits that the program inherits, filter system calls, and forbid tracing."""
    if limits["uid"] is not None:
        os.setgroups([])
        os.setresgid(limits["uid"], limits["uid"], limits["uid"])
        os.setresuid(limits["uid"], limits["uid"], limits["uid"])
    for name, value in (
        ("RLIMIT_NPROC", limits["processes"]),
        ("RLIMIT_AS", limits["memory_bytes"]),
        ("RLIMIT_FSIZE", limits["file_bytes"]),
        ("RLIMIT_NOFILE", limits["open_files"]),
        ("RLIMIT_CPU", math.ceil(limits["cpu_seconds"])),
        ("RLIMIT_CORE", 0),
    ):
        if value is not None:
            resource.setrlimit(getattr(resource, name), (value, value))
    if limits["filter_calls"]:
        seccomp.install()
    # Changing the user has cleared what --die-with-parent had set.
    for option, value in ((_PR_SET_PDEATHSIG, _SIGKILL), (_PR_SET_DUMPABLE, 0)):
        if ctypes.CDLL(None).prctl(option, value, 0, 0, 0) != 0:
            raise OSError(f"the kernel refuses prctl({option}, {value})")


def run_asserts(job: dict[str, Any]) -> tuple[str, str]:
    """Run test code against the program's functions; the prompt's own helpers are the tests', not the program's."""
    try:
        tests = compile(job["tests"], "<tests>", "exec")
    except (SyntaxError, ValueError) as error:
        return UNGRADABLE, f"the tests do not compile: {error}"
    namespace: dict[str, Any] = {"__name__": "tests"}
    if job["prompt"]:
        try:
            exec(job["prompt"] + "\n    pass\n", namespace)  # noqa: S102  # in the sandbox
        except SyntaxError:
            namespace = {"__name__": "tests"}
    program = None
    try:
        try:
            program = remote.RemoteProgram(job["source"], job["entry_point"], job["seconds"])
        except (remote.ProgramError, remote.CannotTestError):
            raise
        except Exception as error:  # noqa: BLE001  # what the program raises is up to it
            return WRONG, f"the program does not load: {type(error).__name__}: {error}"
        provide(namespace, program, job["tests"], job["entry_point"])
        exec(tests, namespace)  # noqa: S102  # in the sandbox
    except (remote.ProgramError, remote.CannotTestError):
        raise
    except BaseException as error:  # noqa: BLE001  # tests end in any way that they like
        return WRONG, f"{type(error).__name__}: {error}"
    finally:
        if program is not None:
            program.close()
    return RIGHT, ""


def provide(namespace: dict[str, Any], program: Any, tests: str, entry_point: str | None) -> None:
    """Give the tests the program's names: the entry point, and what neither Python nor the prompt defines.

    A program may redefine ``abs`` or a helper of the prompt for itself, not for the tests that judge it.  Only
    where the tests call nothing else of the program's is a builtin's name taken from it (MBPP tests a ``sum``).
    """
    called = {
        node.func.id
        for node in ast.walk(ast.parse(tests))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    own = {name for name in program.exports if name not in namespace and not hasattr(builtins, name)}
    if entry_point in program.exports:
        own.add(entry_point)
    elif not own & called:
        own |= called & set(program.exports)
    for name in sorted(own):
        module = program.module_of(name)
        if module is None:
            namespace[name] = program.value_of(name)
        elif module in sys.stdlib_module_names:
            namespace[name] = importlib.import_module(module)


def run_calls(job: dict[str, Any]) -> tuple[str, str]:
    """Call the entry point with each case's arguments; JSON knows no tuples, so they count as lists."""
    deadline = time.monotonic() + job["total_seconds"]
    try:
        program = remote.RemoteProgram(job["source"], job["entry_point"], job["seconds"])
    except (remote.ProgramError, remote.CannotTestError):
        raise
    except Exception as error:  # noqa: BLE001  # what the program raises is up to it
        return WRONG, f"the program does not load: {type(error).__name__}: {error}"
    try:
        try:
            function = program.value_of(job["entry_point"])
        except KeyError:
            return WRONG, f"the program does not define {job['entry_point']}"
        if type(function) is not remote.Remote:
            return WRONG, f"{job['entry_point']} is not a function"
        for number, case in enumerate(job["cases"], start=1):
            if time.monotonic() > deadline:
                return WRONG, f"case {number}: all cases together took longer than {job['total_seconds']:g} s"
            try:
                found = function(*case["arguments"])
            except remote.ProgramError as error:
                return WRONG, f"case {number}: the program {error}"
            except Exception as error:  # noqa: BLE001  # what the program raises is up to it
                return WRONG, f"case {number}: {type(error).__name__}: {error}"
            if not same_result(as_json(found), case["expected"]):
                return WRONG, f"case {number}: another result"
    finally:
        program.close()
    return RIGHT, ""


def as_json(value: Any) -> Any:
    """The value with tuples as lists and keys as JSON has them."""
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): as_json(item) for key, item in value.items()}
    return value


def same_result(found: Any, expected: Any) -> bool:
    if isinstance(found, float) and isinstance(expected, int | float) and not isinstance(expected, bool):
        return found == expected or math.isclose(found, expected, rel_tol=_FLOAT_TOLERANCE, abs_tol=_FLOAT_TOLERANCE)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(same_result, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same_result(found[key], expected[key]) for key in found)
    # 1 is not True here, although Python says so.
    return isinstance(found, bool) == isinstance(expected, bool) and bool(found == expected)


def run_stdio(job: dict[str, Any]) -> tuple[str, str]:
    """Run the program once for each case, in a fresh process."""
    script = f"{job['scratch']}/program.py"
    with open(script, "w", encoding="utf-8", errors="surrogatepass") as file:  # noqa: PTH123  # pathlib takes 8 ms to import
        file.write(job["source"])
    deadline = time.monotonic() + job["total_seconds"]
    for number, case in enumerate(job["cases"], start=1):
        seconds = min(job["seconds"], deadline - time.monotonic())
        if seconds <= 0:
            return WRONG, f"case {number}: all cases together took longer than {job['total_seconds']:g} s"
        expected = case["output"].encode("utf-8", "surrogatepass")
        output, problem = run_script(script, case["input"].encode("utf-8", "surrogatepass"), len(expected), seconds)
        if problem:
            return WRONG, f"case {number}: {problem}"
        if not same_output(output.decode("utf-8", "replace"), case["output"]):
            return WRONG, f"case {number}: another output"
    return RIGHT, ""


def run_script(script: str, data: bytes, expected_bytes: int, seconds: float) -> tuple[bytes, str]:
    """Standard output of the script, and what went wrong or ``""``."""
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
    reading, writing = [stdout, stderr], [stdin]
    try:
        while reading:
            if writing and not unsent:
                process.stdin.close()
                writing = []
            left = deadline - time.monotonic()
            readable, writable, _ = select.select(reading, writing, [], max(0.0, left))
            if left <= 0 and not readable:
                return b"", f"took longer than {seconds:g} s"
            for descriptor in readable:
                chunk = os.read(descriptor, 1 << 16)
                if not chunk:
                    reading.remove(descriptor)
                elif descriptor == stdout:
                    output += chunk
                else:
                    errors = (errors + chunk)[-_STDERR_BYTES:]
            if len(output) > expected_bytes + _OUTPUT_SLACK or time.monotonic() > deadline:
                too_much = len(output) > expected_bytes + _OUTPUT_SLACK
                return b"", "printed too much" if too_much else f"took longer than {seconds:g} s"
            for descriptor in writable:
                try:
                    unsent = unsent[os.write(descriptor, unsent[: 1 << 16]) :]
                except BrokenPipeError:  # it need not read all of its input
                    unsent = unsent[len(unsent) :]
        if (code := process.wait(max(0.1, deadline - time.monotonic()))) != 0:
            last_line = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
            return b"", f"exit code {code}: {last_line}"
    except subprocess.TimeoutExpired:
        return b"", f"took longer than {seconds:g} s"
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
    return bytes(output), ""


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


if __name__ == "__main__":
    main()
