"""The example grader by math-verify, with the package or, without it, with a stub of its two functions."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from coca_mindspeed.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "math_verify_grader.py"


@pytest.fixture(autouse=True)
def math_verify(monkeypatch):
    if importlib.util.find_spec("math_verify") is None:
        stub = ModuleType("math_verify")
        stub.ExprExtractionConfig = stub.LatexExtractionConfig = lambda: None
        stub.parse = lambda text, forms, parsing_timeout: text.strip("$").rpartition("boxed{")[2].rstrip("}")
        stub.verify = lambda gold, answer, timeout_seconds: gold == answer
        monkeypatch.setitem(sys.modules, "math_verify", stub)


def test_evaluate_grades_by_the_file(tmp_path):
    rows = [("4", "<confidence> 0.9 </confidence> \\boxed{4}"), ("4", "<confidence> 0.2 </confidence> \\boxed{5}")]
    lines = [
        json.dumps({"question": "2+2?", "gold": gold, "response": text, "id": str(n)})
        for n, (gold, text) in enumerate(rows)
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out"
    assert main(["evaluate", str(tmp_path / "r.jsonl"), "--grader", f"{EXAMPLE}:MathVerify", "--output", str(out)]) == 0
    graded = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert [row["correct"] for row in graded] == [True, False]
