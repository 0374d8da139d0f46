"""The kinds of jobs: test code, calls, programs that read standard input, and digests of outputs."""

import ast
import builtins
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, NamedTuple

names = importlib.import_module("names")
processes = importlib.import_module("process")
remote = importlib.import_module("remote")
values = importlib.import_module("values")

# Of a program's output; float() would also take 1_0, nan and the digits of other scripts.
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_FLOAT_TOLERANCE = 1e-6
_STDERR_BYTES = 4_096
_OUTPUT_SLACK = 1 << 20
# For reading the rest of a program that ended in time; its children may go on writing.
_LATE_SECONDS = 0.5
# Poll interval, and least time, for a program that has closed its output to exit.
_EXIT_SECONDS = 0.1
JobResult, RIGHT, WRONG, UNGRADABLE = remote.JobResult, remote.RIGHT, remote.WRONG, remote.UNGRADABLE


def run_asserts(job: dict[str, Any]) -> Any:
    """Run test code against the program's functions; helpers of the prompt belong to the tests."""
    namespace = _after_prompt(job["prompt"])
    try:
        tests = compile(job["tests"], "<tests>", "exec")
        wanted = names.undefined(job["tests"], namespace.keys(), job["entry_point"])
        modules = names.imported(job["tests"])
    except (SyntaxError, ValueError) as error:
        return JobResult(UNGRADABLE, f"the tests do not compile: {error}")
    if not wanted.program:
        return JobResult(UNGRADABLE, "the tests use nothing of the program")
    for module in sorted(modules):
        _import(module)
    for name, (module, attribute) in wanted.standard.items():
        found = _import(module)
        namespace[name] = found if attribute is None else getattr(found, attribute)
    program = remote.load(job, wanted.program)
    try:
        for name in program.exports:
            namespace[name] = program.value_of(name)
        exec(tests, namespace)  # noqa: S102  # in the sandbox
    except (remote.ProgramError, remote.CannotTestError):
        raise
    except BaseException as error:  # noqa: BLE001  # any exception of the tests
        return JobResult(WRONG, f"{type(error).__name__}: {error}")
    finally:
        program.close()
    # Tests that expect an exception may have caught these.
    if program.failure is not None:
        raise program.failure
    return JobResult(RIGHT)


def _after_prompt(prompt: str | None) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    if prompt:
        try:
            exec(prompt + "\n    pass\n", namespace)  # noqa: S102  # in the sandbox
        except SyntaxError:
            return {"__name__": "tests", "__builtins__": builtins}
        except Exception as error:  # noqa: BLE001  # a prompt may raise anything
            raise remote.CannotTestError(f"the prompt does not run: {type(error).__name__}: {error}") from None
    return namespace


def _import(module: str) -> Any:
    """Import a module that the tests need, from where the program finds its own."""
    with suppress(ImportError):
        return importlib.import_module(module)
    importlib.import_module("site").main()  # this process starts without it, which is faster
    try:
        return importlib.import_module(module)
    except ImportError:
        raise remote.CannotTestError(f"the tests need {module}, which the sandbox's Python does not have") from None


def run_calls(job: dict[str, Any]) -> Any:
    """Call the program with each case's arguments; tuples count as lists, because JSON has none."""
    program = remote.load(job, [job["entry_point"]])
    try:
        try:
            function = program.value_of(job["entry_point"])
        except KeyError:
            return JobResult(WRONG, f"the program does not define {job['entry_point']}")
        if type(function) is not remote.Remote:
            return JobResult(WRONG, f"{job['entry_point']} is not a function")
        for number, case in enumerate(job["cases"], start=1):
            try:
                found = function(*case["arguments"])
            except remote.ProgramError as error:
                return JobResult(WRONG, f"case {number}: the program {error}", error.timed_out)
            except Exception as error:  # noqa: BLE001  # any exception of the program
                return JobResult(WRONG, f"case {number}: {type(error).__name__}: {error}")
            if not same_result(as_json(found), case["expected"]):
                return JobResult(WRONG, f"case {number}: another result")
    finally:
        program.close()
    return JobResult(RIGHT)


def as_json(value: Any) -> Any:
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
    # 1 is not True here.
    return isinstance(found, bool) == isinstance(expected, bool) and bool(found == expected)


class ScriptRun(NamedTuple):
    output: bytes  # empty if there is a problem
    problem: str = ""  # why the output does not count
    timed_out: bool = False
    exit_code: int | None = None  # if the program ended by itself, and not with 0
    error: str = ""  # last line of its standard error in that case


def run_stdio(job: dict[str, Any]) -> Any:
    script = write_script(job)
    deadline = processes.program_clock().deadline(job["total_seconds"])
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
    """Run the script; its output may not be far longer than expected. Raises ``StarvedError`` on a busy machine.

    Args:
        data: standard input.
        seconds: limit for this run, as ``process.Clock`` counts.
        within: deadline of all runs together, if there are several.
    """
    deadline = within.sooner(seconds) if within else processes.program_clock().deadline(seconds)
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
    if "." not in expected or not (_DECIMAL.fullmatch(found) and _DECIMAL.fullmatch(expected)):
        return False
    return math.isclose(float(found), float(expected), rel_tol=_FLOAT_TOLERANCE, abs_tol=_FLOAT_TOLERANCE)


def collect(job: dict[str, Any]) -> Any:
    """Return the result ``right`` with a digest for each of ``job["inputs"]``.

    None equals nothing, not even itself: no result in time, a program that died, an object.
    """
    import hashlib  # takes milliseconds, and the other kinds do without

    found = _of_script(job) if "stdin" in job["inputs"][0] else _of_functions(job)
    digests = (None if text is None else hashlib.sha256(text.encode()).hexdigest()[:32] for text in found)
    return JobResult(RIGHT, outputs=tuple(digests))


def _of_script(job: dict[str, Any]) -> list[str | None]:
    script = write_script(job)
    deadline = processes.program_clock().deadline(job["total_seconds"])
    found: list[str | None] = []
    for case in job["inputs"]:
        if remote.expired(deadline, job["total_seconds"]):
            found.append(None)
            continue
        data = case["stdin"].encode("utf-8", "surrogatepass")
        run = run_script(script, data, 0, job["seconds"], deadline)
        end_leftovers(job)
        if run.exit_code is not None:
            # Without the message of the error.
            found.append(json.dumps(["fails", run.exit_code, run.error.partition(": ")[0]]))
        elif run.problem:
            found.append(None)
        else:
            found.append(json.dumps(["prints", *run.output.decode("utf-8", "replace").split()]))
    return found


def _of_functions(job: dict[str, Any]) -> list[str | None]:
    calls = [_call(case) for case in job["inputs"]]
    found: list[str | None] = []
    program = None
    try:
        program = remote.load(job, sorted({name for name, _, _ in calls}))
        for name, arguments, keywords in calls:
            found.append(_result(program, name, arguments, keywords, job["tuples_are_lists"]))
    except remote.LoadError as error:
        return [json.dumps(["raises", _kind(error.__cause__)])] * len(calls)
    except remote.ProgramError:
        pass  # the remaining calls have no result
    finally:
        if program is not None:
            program.close()
    return found + [None] * (len(calls) - len(found))


def _result(
    program: Any, name: str, arguments: list[Any], keywords: dict[str, Any], tuples_are_lists: bool
) -> str | None:
    try:
        if name not in program.exports:
            return json.dumps(["raises", "NameError"])
        value = program.value_of(name)(*arguments, **keywords)
        if type(value) is remote.Remote:
            try:
                value = ("iterates", list(value))  # a generator, as a rule
            except TypeError:
                return None  # an object
    except (remote.ProgramError, remote.CannotTestError):
        raise
    except Exception as error:  # noqa: BLE001  # any exception of the program
        return json.dumps(["raises", _kind(error)])
    try:
        encoded = values.encode(as_json(value) if tuples_are_lists else value, _no_reference)
    except values.CannotCrossError:
        return None
    return json.dumps(["gives", _canonical(encoded)])


def _call(case: dict[str, Any]) -> tuple[str, list[Any], dict[str, Any]]:
    if "function" in case:
        return case["function"], case["arguments"], {}
    call = ast.parse(case["call"], mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    arguments = [ast.literal_eval(argument) for argument in call.args]
    return call.func.id, arguments, {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}


def _kind(error: BaseException | None) -> str:
    return str(error).partition(":")[0] if isinstance(error, remote.RemoteError) else type(error).__name__


def _no_reference(value: Any) -> int:
    raise values.CannotCrossError(type(value).__name__)


def _canonical(encoded: Any) -> Any:
    """The JSON of a value, with unordered collections sorted."""
    if isinstance(encoded, list):
        return [_canonical(item) for item in encoded]
    if isinstance(encoded, dict):
        ((name, content),) = encoded.items()
        items = _canonical(content)
        return {name: sorted(items, key=json.dumps) if name in ("set", "frozenset", "dict") else items}
    return encoded


KINDS = {"asserts": run_asserts, "call": run_calls, "stdio": run_stdio, "outputs": collect}
