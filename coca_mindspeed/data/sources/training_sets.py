"""The paper's training sets: Big-Math-Verified (SynthLabsAI/Big-Math-RL-Verified) and TACO (BAAI/TACO)."""

import math
import re
from collections.abc import Mapping
from typing import Any

from coca_mindspeed.data.records import Record
from coca_mindspeed.data.sources.fields import (
    RowError,
    Ungradable,
    column,
    describe,
    literal,
    optional,
    scalar_text,
    text,
)
from coca_mindspeed.utils.text_formats import JsonError, JsonLimitError, parse_json

BIG_MATH_COLUMNS = frozenset({"problem", "answer", "source", "domain", "llama8b_solve_rate"})


def big_math(row: Mapping[str, Any], number: int) -> Record:
    """Convert a row with ``problem``, ``answer``, ``source``, ``domain``, ``llama8b_solve_rate``.

    The solve rate (of 64 attempts by Llama-3.1-8B) becomes ``metadata["solve_rate"]``; ``metadata["difficulty"]`` is
    one minus it, so that 0 is easiest.
    """
    metadata = {**optional(row, source="source", domain="domain"), **_solve_rate(column(row, "llama8b_solve_rate"))}
    return Record(
        f"big_math-{number}", "big_math", "math", text(row, "problem"), scalar_text(row, "answer"), None, metadata
    )


def _solve_rate(value: Any) -> dict[str, float]:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return {}
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise RowError(f"column 'llama8b_solve_rate' should be between 0 and 1 or null, found {describe(value)}")
    return {"solve_rate": float(value), "difficulty": 1.0 - value}


# The solutions, most of the data, are not needed.
_TESTS = ("question", "starter_code", "input_output", "time_limit")
TACO_COLUMNS = frozenset((*_TESTS, "difficulty", "name", "source", "tags", "skill_types", "url"))
_LEVELS = ("EASY", "MEDIUM", "MEDIUM_HARD", "HARD", "VERY_HARD")
_SECONDS = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:s|sec|secs|second|seconds)?\s*", re.IGNORECASE)


def taco(row: Mapping[str, Any], number: int) -> Record:
    """Convert a row; its tests become ``metadata["tests"]`` of kind ``stdio`` or ``call``.

    Difficulty is the level's position among TACO's five: EASY is 0, VERY_HARD is 1; UNKNOWN_DIFFICULTY sets none.

    Raises:
        RowError: the row is not in TACO's form.
        Ungradable: it has no tests, or tests that JSON cannot represent.
    """
    tests = _tests(column(row, "input_output"))
    starter = row.get("starter_code") or ""
    if not isinstance(starter, str):
        raise RowError(f"column 'starter_code' should be a string, found {describe(starter)}")
    metadata: dict[str, Any] = {
        "tests": tests,
        "instruction": _instruction(starter, tests.get("entry_point")),
        "grader": "code",
        **optional(row, source="source", name="name", url="url"),
        **{key: names for key in ("tags", "skill_types") if (names := _names(row.get(key), key))},
    }
    level = row.get("difficulty")
    if level in _LEVELS:
        metadata |= {"level": level, "difficulty": _LEVELS.index(level) / (len(_LEVELS) - 1)}
    elif level not in (None, "", "UNKNOWN_DIFFICULTY"):
        raise RowError(f"column 'difficulty' should be one of {', '.join(_LEVELS)}, found {describe(level)}")
    if (limit := row.get("time_limit")) not in (None, ""):
        match = _SECONDS.fullmatch(str(limit))
        if match is None:
            raise RowError(f"column 'time_limit' should be seconds like '2.0 seconds', found {describe(limit)}")
        metadata["time_limit"] = float(match[1])
    return Record(f"taco-{number}", "taco", "code", text(row, "question"), "", None, metadata)


def _names(value: Any, name: str) -> list[str]:
    """TACO writes lists as Python literals in strings."""
    names = literal(value, name, "a list") if isinstance(value, str) and value else value or []
    if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
        raise RowError(f"column {name!r} should be a list of strings, found {describe(value)}")
    return names


def _tests(value: Any) -> dict[str, Any]:
    if value in (None, "", "{}"):
        raise Ungradable("no tests")
    try:
        parsed = parse_json(value, surrogates=True) if isinstance(value, str) else value
    except JsonLimitError as error:
        raise Ungradable(f"tests cannot be read: {error}") from error
    except JsonError as error:
        raise RowError(f"column 'input_output' is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise RowError(f"column 'input_output' should hold a JSON object, found {describe(parsed)}")
    inputs, outputs = parsed.get("inputs"), parsed.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise RowError("column 'input_output' should hold 'inputs' and 'outputs', lists of one length")
    if not inputs:
        raise Ungradable("no tests")
    if not (entry_point := parsed.get("fn_name")):
        pairs = zip(map(_stream, inputs), map(_stream, outputs), strict=True)
        return {"kind": "stdio", "cases": [{"input": i, "output": o} for i, o in pairs]}
    if not isinstance(entry_point, str):
        raise RowError(f"column 'input_output': 'fn_name' should be a string, found {describe(entry_point)}")
    if _has_integer_keys(inputs):
        raise Ungradable("an argument is a dictionary with integer keys, which JSON has turned into strings")
    calls = [
        {"arguments": i if isinstance(i, list) else [i], "expected": o}
        for i, o in zip(inputs, _unwrapped(outputs), strict=True)
    ]
    return {"kind": "call", "entry_point": entry_point, "cases": calls}


def _stream(value: Any) -> str:
    """Text of stdin or stdout; some rows hold a list of lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise RowError(f"column 'input_output': a test's text should be a string, found {describe(value)}")
    return value


def _unwrapped(outputs: list[Any]) -> list[Any]:
    """Remove the one-element list that most call-based problems put around each expected value.

    TACO's own checker accepts both readings of a one-element list.  Here a problem is wrapped if all of its outputs are
    such lists, and plain otherwise.
    """
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    return [output[0] for output in outputs] if wrapped else outputs


def _has_integer_keys(value: Any) -> bool:
    """Whether an argument had integer keys, which JSON turned into strings."""
    if isinstance(value, dict):
        integers = bool(value) and all(re.fullmatch(r"-?[0-9]+", key) for key in value)
        return integers or any(_has_integer_keys(item) for item in value.values())
    return isinstance(value, list) and any(_has_integer_keys(item) for item in value)


def _instruction(starter: str, entry_point: str | None) -> str:
    if entry_point is None and not starter.strip():
        task = "Write a Python program that reads standard input and prints the result to standard output."
    elif starter.strip():
        task = f"Write it in Python, going on from this code:\n```python\n{starter.rstrip()}\n```"
    else:
        task = f"Write it as a Python function named {entry_point}."
    return f"\n\n{task}\nGive the whole program in one ```python code block."
