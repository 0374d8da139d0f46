"""From a model's answer to its program, and from a record to the job that the sandbox runs.

``record.metadata["tests"]`` says how the program is tested:

- ``{"kind": "asserts", "code": str, "entry_point": str or null}``: test code that uses the program's functions.  With
  ``metadata["prompt"]`` (HumanEval) the answer may also be the rest of that prompt's last function.
- ``{"kind": "stdio", "cases": [{"input": str, "output": str}, ...]}``: one run for each case.
- ``{"kind": "call", "entry_point": str, "cases": [{"arguments": list, "expected": any}, ...]}``.
"""

import re
import textwrap
from collections.abc import Mapping
from typing import Any

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError

# A fence is a line of its own; the closing one may be missing where the answer was cut off.
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*\n", re.MULTILINE)
_PYTHON = {"python", "python3", "py", "py3"}

Job = dict[str, Any]


def extract_program(answer: str) -> str:
    """The program of an answer: the last block fenced as Python, else the last fenced block, else the whole text."""
    blocks: list[tuple[str, str]] = []
    position = 0
    while opening := _FENCE.search(answer, position):
        closing = re.compile(rf"^[ \t]*{re.escape(opening[1])}[ \t]*$", re.MULTILINE).search(answer, opening.end())
        end = closing.start() if closing else len(answer)
        blocks.append((opening[2].lower(), answer[opening.end() : end]))
        if closing is None:
            break
        position = closing.end()
    python = [code for language, code in blocks if language in _PYTHON]
    if python:
        return python[-1]
    return blocks[-1][1] if blocks else answer.strip("\n")


def build_job(record: Record, answer: str) -> Job:
    """The harness's job for one answer, without limits.

    Raises:
        DataError: the record's tests are not in one of the forms above.
    """
    tests = record.metadata.get("tests")
    if not isinstance(tests, Mapping):
        raise DataError(f"{_where(record)}: metadata['tests'] should be an object, found {type(tests).__name__}")
    kind = tests.get("kind")
    program = extract_program(answer)
    if kind == "asserts":
        entry_point = _entry_point(record, tests, required=False)
        prompt = record.metadata.get("prompt")
        if prompt is not None and not isinstance(prompt, str):
            raise DataError(f"{_where(record)}: metadata['prompt'] should be a string, found {type(prompt).__name__}")
        source = program if prompt is None else _with_prompt(prompt, program, entry_point)
        code = _field(record, tests, "code", str)
        return {"kind": kind, "source": source, "tests": code, "prompt": prompt, "entry_point": entry_point}
    if kind == "stdio":
        cases = _cases(record, tests, {"input": str, "output": str})
        return {"kind": kind, "source": program, "cases": cases}
    if kind == "call":
        cases = _cases(record, tests, {"arguments": list, "expected": object})
        entry_point = _entry_point(record, tests, required=True)
        return {"kind": kind, "source": program, "cases": cases, "entry_point": entry_point}
    raise DataError(f"{_where(record)}: tests of kind {kind!r}; expected 'asserts', 'stdio' or 'call'")


def time_limit(record: Record, default: float) -> float:
    """Seconds for one run of the record's program.

    Raises:
        DataError: ``metadata["time_limit"]`` is not a positive number.
    """
    seconds = record.metadata.get("time_limit")
    if seconds is None:
        return default
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise DataError(f"{_where(record)}: metadata['time_limit'] should be seconds above 0, found {seconds!r}")
    return float(seconds)


def _with_prompt(prompt: str, program: str, entry_point: str | None) -> str:
    name = re.escape(entry_point) if entry_point else r"\w+"
    if re.search(rf"^(?:async\s+)?def\s+{name}\b|^{name}\s*=|^class\s", program, re.MULTILINE):
        # A whole function: the prompt's imports and helpers come first, and its unfinished function is replaced.
        return f"{prompt}\n    pass\n\n{program}"
    body = program if program.startswith((" ", "\t")) else textwrap.indent(program, "    ")
    return prompt + ("" if prompt.endswith("\n") else "\n") + body


def _where(record: Record) -> str:
    return f"record {record.id!r} of {record.dataset!r}"


def _entry_point(record: Record, tests: Mapping[str, Any], required: bool) -> str | None:
    name = tests.get("entry_point")
    if name is None and not required:
        return None
    if not isinstance(name, str) or not name.isidentifier():
        raise DataError(f"{_where(record)}: tests['entry_point'] should be the name of a function, found {name!r}")
    return name


def _field(record: Record, tests: Mapping[str, Any], name: str, kind: type) -> Any:
    if name not in tests or not isinstance(tests[name], kind):
        raise DataError(
            f"{_where(record)}: tests[{name!r}] should be {kind.__name__}, found {type(tests.get(name)).__name__}"
        )
    return tests[name]


def _cases(record: Record, tests: Mapping[str, Any], fields: Mapping[str, type]) -> list[dict[str, Any]]:
    cases = _field(record, tests, "cases", list)
    if not cases:
        raise DataError(f"{_where(record)}: tests['cases'] is empty, so that any program would pass")
    for number, case in enumerate(cases, start=1):
        for name, kind in fields.items():
            if not isinstance(case, Mapping) or name not in case or not isinstance(case[name], kind):
                raise DataError(f"{_where(record)}: case {number} should have {name!r} of type {kind.__name__}")
    return [{name: case[name] for name in fields} for case in cases]
