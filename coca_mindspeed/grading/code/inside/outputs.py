"""Digests of a program's outputs on given inputs, for comparison with another program. Knows no expected outputs."""

import ast
import hashlib
import importlib
import json
import sys
from typing import Any

sys.path.insert(0, __file__.rpartition("/")[0])
asserts = importlib.import_module("asserts")
clock = importlib.import_module("clock")
remote = importlib.import_module("remote")
scripts = importlib.import_module("scripts")
values = importlib.import_module("values")


def collect(job: dict[str, Any]) -> Any:
    """Return the result ``right`` with a digest for each of ``job["inputs"]``.

    None equals nothing, not even itself: no result in time, a program that died, an object.
    """
    found = _of_script(job) if "stdin" in job["inputs"][0] else _of_functions(job)
    digests = (None if text is None else hashlib.sha256(text.encode()).hexdigest()[:32] for text in found)
    return remote.JobResult(remote.RIGHT, outputs=tuple(digests))


def _of_script(job: dict[str, Any]) -> list[str | None]:
    script = scripts.write_script(job)
    deadline = clock.program_clock().deadline(job["total_seconds"])
    found: list[str | None] = []
    for case in job["inputs"]:
        if remote.expired(deadline, job["total_seconds"]):
            found.append(None)
            continue
        data = case["stdin"].encode("utf-8", "surrogatepass")
        run = scripts.run_script(script, data, 0, job["seconds"], deadline)
        scripts.end_leftovers(job)
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
        encoded = values.encode(asserts.as_json(value) if tuples_are_lists else value, _no_reference)
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
