"""Preparation report: counts in JSON and Markdown, and one line for every dropped row."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coca_mindspeed.utils.console import markdown_table, one_line
from coca_mindspeed.utils.files import to_json_line, write_atomically, write_json

# In the order of the pipeline.
STAGES = {
    "malformed": "not in the source's form",
    "ungradable": "well-formed, but nothing to grade an answer by",
    "split": "not in the benchmark's test split",
    "source": "excluded source",
    "difficulty": "excluded difficulty",
    "length": "prompt too short or too long",
    "contamination": "shares a passage with an evaluation question",
    "gold": "gold answer cannot be graded",
    "duplicate": "repeats an earlier question",
}
_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding about one row: a stage of :data:`STAGES`, a reason shared by many rows, and a detail of this one."""

    file: str
    row: int
    stage: str
    reason: str
    detail: str = ""
    dropped: bool = True


class FindingLog:
    """Writes each finding as a line of JSON and counts them."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self.dropped: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.kept: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.examples: defaultdict[str, list[Finding]] = defaultdict(list)

    def close(self) -> None:
        self._file.close()

    def add(self, finding: Finding) -> None:
        (self.dropped if finding.dropped else self.kept)[finding.stage][finding.reason] += 1
        if len(self.examples[finding.stage]) < _EXAMPLES:
            self.examples[finding.stage].append(finding)
        line = {name: getattr(finding, name) for name in Finding.__slots__}
        # A row may hold a lone surrogate, which UTF-8 cannot encode.
        self._file.write(to_json_line(line).encode("utf-8", "backslashreplace").decode("utf-8"))


def sorted_counts(counts: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Order stages as in the pipeline, and the reasons of each by falling count."""
    return {
        stage: dict(sorted(counts[stage].items(), key=lambda item: (-item[1], item[0])))
        for stage in STAGES
        if stage in counts
    }


@dataclass(frozen=True, slots=True)
class PreparationReport:
    """Result of ``prepare``; ``dropped`` and ``reported`` (kept) are of :func:`sorted_counts`."""

    dataset: str
    inputs: list[dict[str, Any]]
    options: dict[str, Any]
    rows_in: int
    dropped: Mapping[str, Mapping[str, int]]
    reported: Mapping[str, Mapping[str, int]]
    outputs: dict[str, dict[str, Any]]
    examples: Mapping[str, list[Finding]] = field(default_factory=dict)

    @property
    def rows_out(self) -> int:
        return sum(int(output["rows"]) for output in self.outputs.values())

    def write(self, directory: Path) -> None:
        """Write ``report.json`` and ``report.md``."""
        values = {
            "dataset": self.dataset,
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "dropped": self.dropped,
            "reported_and_kept": self.reported,
            "outputs": self.outputs,
            "inputs": self.inputs,
            "options": self.options,
        }
        write_json(directory / "report.json", values)
        write_atomically(directory / "report.md", self.markdown())

    def markdown(self) -> str:
        lines = [
            f"# {self.dataset}: {self.rows_in} rows in, {self.rows_out} rows out",
            "",
            _table(("output", "rows"), [(name, output["rows"]) for name, output in self.outputs.items()]),
            "",
            "## Dropped",
            "",
            _counts(self.dropped),
            "",
            "`findings.jsonl` has a line for each dropped row, with file, row and reason.",
        ]
        if self.reported:
            lines += ["", "## Reported and kept", "", _counts(self.reported)]
        if self.examples:
            lines += ["", "## Examples", ""]
            for f in (f for stage in STAGES for f in self.examples.get(stage, ())):
                text = f"{f.reason}: {f.detail}" if f.detail else f.reason
                lines.append(f"- `{f.file}:{f.row}` {f.stage}: {_inline(text)}")
        lines += ["", "## Inputs", "", _table(("file", "rows"), [(i["file"], i["rows"]) for i in self.inputs])]
        lines += ["", "## Options", "", _table(("option", "value"), list(self.options.items())), ""]
        return "\n".join(lines)


def _counts(counts: Mapping[str, Mapping[str, int]]) -> str:
    rows = [
        (stage, reason, number, STAGES[stage])
        for stage, reasons in counts.items()
        for reason, number in reasons.items()
    ]
    return _table(("stage", "reason", "rows", "meaning"), rows) if rows else "Nothing."


def _inline(value: Any) -> str:
    return one_line(str(value))[:300]


def _table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    return markdown_table(header, [[_inline(cell) for cell in row] for row in rows], padded=False).rstrip()
