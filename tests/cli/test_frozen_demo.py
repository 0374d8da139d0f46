"""Files of a small demo, as ``demo.txt`` has frozen them as far as no processor's rounding decides, and of its resume.

Frozen are the configuration, the marker, names and order of all keys, questions in their order, schedules and headings.
The rest is compared with another run of the same session: here, and in ``test_train.py``.

``python -m tests.cli.test_frozen_demo`` writes the text anew.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coca_mindspeed.cli import main
from tests.cli.conftest import run_demo
from tests.frozen import compare
from tests.local.runs_for_tests import SMALL, killed, result, rows

FROZEN = Path(__file__).with_name("demo.txt")
_MODEL = ("config.json", "model.safetensors")  # other files of a model are transformers' own
_VALUES = ("method", "seed", "data", "prompt", "questions")  # of JSON files
_COLUMNS = ("id", "question", "gold", "dataset", "category", "method", "seed", "step", "stage", "lr", "epoch")


def _keys(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield above + key
        if isinstance(value, dict):
            yield from _keys(value, f"{above}{key}.")


def _described(path: Path) -> list[str]:
    """The lines of a file that hold on every machine."""
    if path.suffix == ".yaml":
        return path.read_text(encoding="utf-8").splitlines()
    if path.name == "report.md":
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(("# ", "## "))]
    if path.suffix == ".jsonl":
        lines = rows(path)
        names = dict.fromkeys(name for line in lines for name in line)
        values = {name: dict.fromkeys(json.dumps(line.get(name)) for line in lines) for name in names}
        columns = [f"{name} {' '.join(values[name])}" for name in names if name in _COLUMNS]
        return [f"{len(lines)} rows of {' '.join(names)}", *columns]
    if path.suffix == ".json" and path.name not in _MODEL:
        content = json.loads(path.read_text(encoding="utf-8"))
        values = [f"{name} {json.dumps(content[name])}" for name in content if name in _VALUES]
        return [f"keys {' '.join(_keys(content))}", *values]
    return []


def describe(output: Path) -> str:
    lines = []
    for path in sorted(path for path in output.rglob("*") if path.is_file()):
        if (path.parent / "model.safetensors").exists() and path.name not in _MODEL:
            continue
        lines += [str(path.relative_to(output)), *(f"    {line}" for line in _described(path))]
    return "\n".join([*lines, ""])


def test_a_demo_leaves_what_is_frozen(finished_demo):
    compare(FROZEN.read_text(encoding="utf-8"), describe(finished_demo), __name__)


def test_a_resumed_demo_leaves_the_same(finished_demo, tmp_path, no_pictures):
    output = killed(finished_demo, tmp_path / "demo")
    assert main(["demo", "--seed", "1", "--output", str(output), "--quiet", "--resume", *SMALL]) == 0
    assert result(output) == result(finished_demo)
    compare(FROZEN.read_text(encoding="utf-8"), describe(output), __name__)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        FROZEN.write_text(describe(run_demo(Path(directory) / "demo")), encoding="utf-8")
