"""Extracting a program from an answer, and building its job."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError
from coca_mindspeed.grading.code import build_job, extract_program, time_limit
from tests.grading.tables import read_table
from tests.processor import within
from tests.tables import check_rows

PROMPT = 'import math\n\ndef helper(x):\n    return x\n\ndef answer(x):\n    """Say it."""\n'


def record(metadata):
    return Record("r1", "test", "code", "?", "", metadata=metadata)


def test_the_table_of_extractions():
    def check(answer, program):
        assert extract_program(answer) == program

    check_rows(check, read_table("extraction.tsv"))


def test_the_block_that_defines_what_the_tests_call_is_the_program():
    answer = "```python\ndef f(x): return x\n```\n```python\ndef test():\n    assert f(1)\n```"
    assert extract_program(answer, {"f"}) == "def f(x): return x\n"
    assert extract_program(answer, {"test"}).startswith("def test")
    method = "```python\nclass Solution:\n    def f(self): pass\n```\n```python\ns = Solution()\ns.f()\n```"
    assert extract_program(method, {"f"}).startswith("class Solution")


@pytest.mark.timing
@pytest.mark.parametrize(
    "hostile",
    [
        "`" * 300_000,
        "```" + "a" * 300_000,
        "```python\nasync" * 20_000,
        "```python\ndef f\n```\n" * 15_000,
        "`\n" * 150_000,
        "def f" + "\n" * 300_000 + "async ",
        ">" * 300_000 + "```",
        "- " * 150_000 + "```\n```",
        "> ```python\n" + "> x\n" * 70_000,
        "    ```python\n" + "     x\n" * 35_000 + "def f",
        '"""' + '" ' * 150_000 + "\ndef f",
        "from __future__ import a\n" * 15_000 + "def f",
        "\n" * 300_000 + "def f",
    ],
    ids=range(13),
)
def test_extraction_is_linear(hostile):
    started = time.process_time()
    extract_program(hostile, {"f"})
    build_job(
        record({"tests": {"kind": "asserts", "code": "assert f()", "entry_point": "f"}, "prompt": PROMPT}), hostile
    )
    assert within(time.process_time() - started, 2.0)


@given(st.text(alphabet="`~python \nx", max_size=200))
def test_extraction_gives_a_part_of_the_answer(answer):
    assert "".join(extract_program(answer).split()) in "".join(answer.split())


def test_a_completion_continues_the_prompt_and_a_function_replaces_it():
    tests = {"kind": "asserts", "code": "assert answer(1) == 2", "entry_point": "answer"}
    r = record({"tests": tests, "prompt": PROMPT})
    function = "def answer(x: Unknown):\n    return helper(x) + 1"
    for answer in (
        "    return x + 1", "return x + 1", "  ```python\n    return x + 1\n  ```", "```python\n\treturn x + 1\n```",
        "```python\ndef answer(x):\n    return helper(x) + 1\n```", f"from __future__ import annotations\n{function}",
        f"# Mine.\n\n'''Words.'''\nfrom __future__ import (  \n    annotations)  # late\n\nimport os\n{function}",
    ):  # fmt: skip
        source = build_job(r, answer)["source"]
        names = {}
        exec(source, names)  # noqa: S102  # written here
        assert callable(names["answer"])
        assert names["answer"](1) == 2
        assert names["math"]


@pytest.mark.parametrize("before", ["import os", "x = 1", "'''Words.'''; x = 1", "def answer(x): pass"])
def test_an_import_from_the_future_behind_code_stays_an_error(before):
    tests = {"kind": "asserts", "code": "assert answer(1) == 2", "entry_point": "answer"}
    program = f"{before}\nfrom __future__ import annotations\ndef answer(x):\n    return x + 1"
    source = build_job(record({"tests": tests, "prompt": PROMPT}), program)["source"]
    with pytest.raises(SyntaxError, match="__future__"):
        compile(source, "program", "exec")


@pytest.mark.parametrize(
    "tests",
    [
        None,
        {"kind": "unit"},
        {"kind": "asserts"},
        {"kind": "asserts", "code": "", "entry_point": "a b"},
        {"kind": "stdio", "cases": []},
        {"kind": "stdio", "cases": [{"input": "1"}]},
        {"kind": "stdio", "cases": [{"input": "1", "output": 2}]},
        {"kind": "call", "cases": [{"arguments": [], "expected": None}]},
    ],
)
def test_malformed_tests_are_refused_with_the_record(tests):
    with pytest.raises(DataError, match="'r1' of 'test'"):
        build_job(record({"tests": tests}), "x = 1")


@pytest.mark.parametrize("seconds", [0, -1, "2", True, float("inf"), float("nan")])
def test_time_limits(seconds):
    assert time_limit(record({}), 10.0) == 10.0
    assert time_limit(record({"time_limit": 2}), 10.0) == 2.0
    with pytest.raises(DataError, match="time_limit"):
        time_limit(record({"time_limit": seconds}), 10.0)
