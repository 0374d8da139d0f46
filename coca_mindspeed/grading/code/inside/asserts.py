"""Tests of a program's functions: test code with asserts, and cases of arguments and results."""

import builtins
import importlib
import math
import sys
from contextlib import suppress
from typing import Any

sys.path.insert(0, __file__.rpartition("/")[0])
names = importlib.import_module("names")
remote = importlib.import_module("remote")

_FLOAT_TOLERANCE = 1e-6
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
    """The value with tuples as lists and keys as in JSON."""
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
