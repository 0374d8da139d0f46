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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

codec = importlib.import_module("program")
names = importlib.import_module("names")
processes = importlib.import_module("process")
remote = importlib.import_module("remote")

# Of a program's output; float() would also take 1_0, nan and the digits of other scripts.
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_FLOAT_TOLERANCE = 1e-6
_STDERR_BYTES = 4_096
_OUTPUT_SLACK = 1 << 20
# For reading the rest of a program that ended in time; its children may go on writing.
_LATE_SECONDS = 0.5
# Poll interval, and least time, for a program that has closed its output to exit.
_EXIT_SECONDS = 0.1
Report, JobError = processes.Report, processes.JobError
RIGHT, WRONG, UNGRADABLE = processes.RIGHT, processes.WRONG, processes.UNGRADABLE


def run_asserts(job: dict[str, Any]) -> Any:
    """Run test code against the program's functions; helpers of the prompt belong to the tests."""
    namespace = _after_prompt(job["prompt"])
    try:
        tests = compile(job["tests"], "<tests>", "exec")
        wanted = names.undefined(job["tests"], namespace.keys(), job["entry_point"])
        modules = names.imported(job["tests"])
    except (SyntaxError, ValueError) as error:
        raise JobError(UNGRADABLE, f"the tests do not compile: {error}") from None
    if not wanted.program:
        raise JobError(UNGRADABLE, "the tests use nothing of the program")
    for module in sorted(modules):
        _import(module)
    for name, (module, attribute) in wanted.standard.items():
        found = _import(module)
        namespace[name] = found if attribute is None else getattr(found, attribute)
    with remote.RemoteProgram(job, wanted.program) as program:
        try:
            namespace |= {name: program.value_of(name) for name in program.exports}
            exec(tests, namespace)  # noqa: S102  # in the sandbox
        except BaseException as error:  # noqa: BLE001  # any exception of the tests
            if program.failure is None:
                return Report(WRONG, f"{type(error).__name__}: {error}")
    # Tests that expect an exception may have caught these.
    if program.failure is not None:
        raise program.failure
    return Report(RIGHT)


def _after_prompt(prompt: str | None) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    try:
        exec(f"{prompt}\n    pass\n" if prompt else "", namespace)  # noqa: S102  # in the sandbox
    except SyntaxError:
        return {"__name__": "tests", "__builtins__": builtins}
    except Exception as error:  # noqa: BLE001  # a prompt may raise anything
        raise JobError(UNGRADABLE, f"the prompt does not run: {type(error).__name__}: {error}") from None
    return namespace


def _import(module: str) -> Any:
    """Import a module that the tests need, from where the program finds its own."""
    with suppress(ImportError):
        return importlib.import_module(module)
    importlib.import_module("site").main()  # this process starts without it, which is faster
    try:
        return importlib.import_module(module)
    except ImportError:
        raise JobError(UNGRADABLE, f"the tests need {module}, which the sandbox's Python does not have") from None


def run_calls(job: dict[str, Any]) -> Any:
    """Call the program with each case's arguments; tuples count as lists, because JSON has none."""
    name = job["entry_point"]
    with remote.RemoteProgram(job, [name]) as program:
        if name not in program.exports:
            return Report(WRONG, f"the program does not define {name}")
        function = program.value_of(name)
        if type(function) is not remote.Remote:
            return Report(WRONG, f"{name} is not a function")
        for number, case in enumerate(job["cases"], start=1):
            try:
                found = function(*case["arguments"])
            except JobError as error:
                if error.outcome != WRONG:
                    raise
                return Report(WRONG, f"case {number}: the program {error}", error.timed_out)
            except Exception as error:  # noqa: BLE001  # any exception of the program
                return Report(WRONG, f"case {number}: {type(error).__name__}: {error}")
            if not same_result(as_json(found), case["expected"]):
                return Report(WRONG, f"case {number}: another result")
    return Report(RIGHT)


def as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): as_json(item) for key, item in value.items()}
    return value


def same_result(result: Any, expected: Any) -> bool:
    if isinstance(result, float) and isinstance(expected, int | float) and not isinstance(expected, bool):
        return result == expected or _close(result, expected)
    if isinstance(result, list) and isinstance(expected, list):
        return len(result) == len(expected) and all(map(same_result, result, expected))
    if isinstance(result, dict) and isinstance(expected, dict):
        return result.keys() == expected.keys() and all(same_result(result[key], expected[key]) for key in result)
    # 1 is not True here.
    return isinstance(result, bool) == isinstance(expected, bool) and bool(result == expected)


def _close(result: float, expected: float) -> bool:
    return math.isclose(result, expected, rel_tol=_FLOAT_TOLERANCE, abs_tol=_FLOAT_TOLERANCE)


class ScriptRun(NamedTuple):
    output: bytes
    exit_code: int = 0
    error: str = ""  # last line of its standard error


def run_stdio(job: dict[str, Any]) -> Any:
    runs = _runs(job, [case["input"] for case in job["cases"]], [case["output"] for case in job["cases"]])
    for number, (run, case) in enumerate(zip(runs, job["cases"], strict=True), start=1):
        if isinstance(run, JobError):
            # It has run before, so that a failure to start, other than on a busy machine, is its own fault.
            own = number > 1 and run.outcome == UNGRADABLE
            if run.outcome != WRONG and not own:
                raise run
            return Report(WRONG, f"case {number}: {run}", run.timed_out)
        if run.exit_code:
            return Report(WRONG, f"case {number}: exit code {run.exit_code}: {run.error}")
        if not same_output(run.output.decode("utf-8", "replace"), case["output"]):
            return Report(WRONG, f"case {number}: another output")
    return Report(RIGHT)


def _runs(job: dict[str, Any], inputs: list[str], outputs: list[str]) -> Any:
    """Run the script on one input after the other: a ``ScriptRun``, or a ``JobError``, which does not end the runs."""
    script, total = f"{job['scratch']}/program.py", job["total_seconds"]
    with open(script, "w", encoding="utf-8", errors="surrogatepass") as file:  # noqa: PTH123  # pathlib takes 8 ms to import
        file.write(job["source"])
    deadline = processes.program_clock().deadline(total)
    for text, output in zip(inputs, outputs, strict=True):
        most = len(output.encode("utf-8", "surrogatepass")) + _OUTPUT_SLACK
        try:
            if deadline.expired(total):
                raise JobError(WRONG, f"all cases together took longer than {total:g} s", timed_out=True)
            yield run_script(script, text.encode("utf-8", "surrogatepass"), most, job["seconds"], deadline)
        except JobError as error:
            yield error
        if job["limits"]["alone"]:  # processes that a run has left behind count against the next run's limits
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            with suppress(ChildProcessError):
                while os.waitpid(-1, 0)[0]:
                    pass


def run_script(script: str, data: bytes, most: int, seconds: float, within: Any = None) -> ScriptRun:
    """Run the script with ``data`` as its standard input; ``JobError`` if its output does not count.

    Args:
        most: bytes of output.
        seconds: limit for this run, as ``process.Clock`` counts.
        within: deadline of all runs together, if there are several.
    """
    deadline = within.sooner(seconds) if within else processes.program_clock().deadline(seconds)
    command, directory = [sys.executable, "-I", "-B", "-X", "utf8", script], script.rpartition("/")[0]
    with _standard_input(directory, data) as stdin:
        process = processes.start(command, stdin=stdin, stderr=subprocess.PIPE, cwd=directory)
    pipes = processes.Pipes(process, data if stdin == subprocess.PIPE else b"", close_input=True)
    too_slow = JobError(WRONG, f"took longer than {seconds:g} s", timed_out=True)
    late_since: float | None = None
    try:
        while pipes.open:
            late = deadline.expired(seconds)
            readable, _ = pipes.move(lambda *descriptors: processes.until_ready(*descriptors, deadline))
            if late and not readable:
                raise too_slow
            del pipes.errors[:-_STDERR_BYTES]
            if len(pipes.output) > most:
                raise JobError(WRONG, "printed too much")
            if deadline.expired(seconds):  # if it has ended, read the rest
                late_since = late_since or time.monotonic()
                if process.poll() is None or time.monotonic() - late_since > _LATE_SECONDS:
                    raise too_slow
        while (code := _exit_code(process)) is None:
            if deadline.expired(seconds):
                raise too_slow
    finally:
        pipes.close()
    return ScriptRun(bytes(pipes.output), code, pipes.errors.decode("utf-8", "replace").strip().rpartition("\n")[2])


@contextmanager
def _standard_input(directory: str, data: bytes) -> Iterator[int]:
    """A descriptor of a file with ``data``, which a program may map or read by its size; a pipe if it does not fit.

    The file is open for reading and has no name. A program that opens it again for writing, by ``/proc/self/fd``,
    changes nothing but its own input, within its limits on files.
    """
    path, descriptor = f"{directory}/.input-{os.urandom(8).hex()}", subprocess.PIPE
    with suppress(OSError), open(path, "xb", buffering=0) as file:  # noqa: PTH123  # as above
        descriptor = os.open(path, os.O_RDONLY)
        os.unlink(path)  # noqa: PTH108
        unwritten = memoryview(data)
        while unwritten:
            unwritten = unwritten[file.write(unwritten) :]
    try:
        whole = descriptor != subprocess.PIPE and os.fstat(descriptor).st_size == len(data)
        yield descriptor if whole else subprocess.PIPE
    finally:
        if descriptor != subprocess.PIPE:
            os.close(descriptor)


def _exit_code(process: "subprocess.Popen[bytes]") -> int | None:
    with suppress(subprocess.TimeoutExpired):
        return process.wait(_EXIT_SECONDS)
    return None


def same_output(output: str, expected: str) -> bool:
    """Whether the words are equal; decimals, if expected, may differ by one part in a million."""
    found_words, expected_words = output.split(), expected.split()
    return len(found_words) == len(expected_words) and all(map(_same_word, found_words, expected_words))


def _same_word(output: str, expected: str) -> bool:
    if output == expected:
        return True
    if "." not in expected or not (_DECIMAL.fullmatch(output) and _DECIMAL.fullmatch(expected)):
        return False
    return _close(float(output), float(expected))


def collect(job: dict[str, Any]) -> Any:
    """Return the result ``right`` with a digest for each of ``job["inputs"]``.

    None equals nothing, not even itself: no result in time, a program that died, an object.
    """
    import hashlib  # takes milliseconds, and the other kinds do without

    found = _of_script(job) if "stdin" in job["inputs"][0] else _of_functions(job)
    digests = (text and hashlib.sha256(text.encode()).hexdigest()[:32] for text in found)
    return Report(RIGHT, outputs=tuple(digests))


def _of_script(job: dict[str, Any]) -> list[str | None]:
    inputs = [case["stdin"] for case in job["inputs"]]
    outcomes: list[str | None] = []
    for run in _runs(job, inputs, [""] * len(inputs)):
        if isinstance(run, JobError):
            if run.outcome != WRONG:
                raise run
            outcomes.append(None)
        elif run.exit_code:  # without the message of the error
            outcomes.append(json.dumps(["fails", run.exit_code, run.error.partition(": ")[0]]))
        else:
            outcomes.append(json.dumps(["prints", *run.output.decode("utf-8", "replace").split()]))
    return outcomes


def _of_functions(job: dict[str, Any]) -> list[str | None]:
    calls = [_call(case) for case in job["inputs"]]
    outcomes: list[str | None] = []
    try:
        with remote.RemoteProgram(job, {name for name, _, _ in calls}) as program:
            for call in calls:
                outcomes.append(_result(program, *call, tuples_are_lists=job["tuples_are_lists"]))
    except remote.LoadError as error:
        return [json.dumps(["raises", _kind(error.__cause__)])] * len(calls)
    except JobError as error:
        if error.outcome != WRONG:
            raise
    return outcomes + [None] * (len(calls) - len(outcomes))  # after a failure the remaining calls have no result


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
    except JobError:
        raise
    except Exception as error:  # noqa: BLE001  # any exception of the program
        return json.dumps(["raises", _kind(error)])
    try:
        encoded = codec.encode(as_json(value) if tuples_are_lists else value, _no_reference)
    except codec.CannotCrossError:
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
    raise codec.CannotCrossError(type(value).__name__)


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
