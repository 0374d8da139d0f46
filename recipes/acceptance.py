"""Fill the acceptance table of a recipe from a run: ``python recipes/acceptance.py RUN [--into README.md]``.

RUN is the output directory of a run on verl or MindSpeed-RL.  Exits with 1 if a check fails.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

_STEPS = 100
_WINDOW = 10  # steps of a mean
BEGIN, END = "<!-- acceptance -->", "<!-- end of acceptance -->"
Rows = Sequence[dict[str, Any]]


class Run(NamedTuple):
    """The files of a run: rows of its steps, samples of step 1, and the number of its starts."""

    steps: Rows
    samples: Rows
    starts: int
    names: dict[str, str]


class Check(NamedTuple):
    """A row of the table; ``measure`` returns the cell, and whether it passes (None: a measurement)."""

    name: str
    expected: str
    measure: Callable[[Run], tuple[str, bool | None]]


_VERL = {
    "speed": "perf/throughput",
    "memory": "actor/perf/max_memory_allocated_gb",
    "gap": "training/rollout_probs_diff_mean",
}
_MINDSPEED_RL = {
    "speed": "e2e_tps",
    "memory": "actor/max_memory_allocated_gib",
    "gap": "rollout/log_prob_gap",
}


def read_run(directory: Path) -> Run:
    stage = directory / "stage0"
    place, names = (stage, _MINDSPEED_RL) if stage.is_dir() else (directory, _VERL)
    steps = [{**row, **row.get("data", {})} for row in _json_lines(place / "metrics.jsonl")]  # verl nests them
    samples = [row for path in place.glob("samples/*_000001.jsonl") for row in _json_lines(path)]
    return Run(steps, samples, len(list((directory / "logs").glob("*.log"))), names)


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        sys.exit(f"{path}: no such file; expected the output directory of a run")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _column(run: Run, key: str | None) -> list[float]:
    return [row[key] for row in run.steps if isinstance(row.get(key), int | float)]


def _mean_of_ends(key: str) -> Callable[[Run], tuple[str, bool | None]]:
    def measure(run: Run) -> tuple[str, bool | None]:
        values = _column(run, key)
        if not values:
            return "not logged", False
        first, last = statistics.fmean(values[:_WINDOW]), statistics.fmean(values[-_WINDOW:])
        return f"{first:.4f} to {last:.4f}", None

    return measure


def _measured(name: str) -> Callable[[Run], tuple[str, bool | None]]:
    def measure(run: Run) -> tuple[str, bool | None]:
        values = _column(run, run.names.get(name))
        if not values:
            return "not logged", None
        return f"{statistics.fmean(values):.4g} (most {max(values):.4g})", None

    return measure


def _ratio(run: Run) -> tuple[str, bool | None]:
    """With one update a step, the policy of step 1's update is the one that sampled: no clipping, no KL."""
    keys = [f"{segment}/{name}" for segment in ("confidence", "answer") for name in ("clip_fraction", "kl")]
    found = [run.steps[0].get(key) for key in keys] if run.steps else [None]
    if None in found:
        return "not logged", False
    return ", ".join(f"{value:.1e}" for value in found), all(abs(value) <= 1e-3 for value in found)


def _moments(run: Run) -> tuple[str, bool | None]:
    """Advantages of a group have mean 0; those of answers also deviation 1, or 0 where all answers are alike."""
    worst_mean, worst_deviation, groups = 0.0, 0.0, 0
    for _, rows in groupby(run.samples, key=lambda row: row.get("prompt", row.get("question"))):
        kept = [row for row in rows if row["correct"] is not None]
        if len(kept) < 2:
            continue
        groups += 1
        for name in ("confidence_advantage", "answer_advantage"):
            worst_mean = max(worst_mean, abs(statistics.fmean(row[name] for row in kept)))
        deviation = statistics.stdev(row["answer_advantage"] for row in kept)
        varies = len({row["correct"] for row in kept}) > 1
        worst_deviation = max(worst_deviation, abs(deviation - varies))
    passed = groups > 0 and worst_mean <= 1e-3 and worst_deviation <= 1e-2
    return f"{groups} groups, off by {worst_mean:.1e} and {worst_deviation:.1e}", passed


def _finite(run: Run) -> tuple[str, bool | None]:
    values = _column(run, "actor/pg_loss")
    finite = len(values) == len(run.steps) > 0 and all(map(math.isfinite, values))
    return f"{values[0]:.4f} to {values[-1]:.4f}" if values else "not logged", finite


def _whole(run: Run) -> tuple[str, bool | None]:
    numbers = [row["step"] for row in run.steps]
    return f"{len(numbers)} rows", numbers == list(range(1, _STEPS + 1))


CHECKS = (
    Check("step 1: clip fractions and KL of both segments", "0 (ratio 1), at most 1e-3", _ratio),
    Check("step 1: moments of the advantages", "mean 0, deviation 1 (answers)", _moments),
    Check(f"{_STEPS} steps, each once", f"1 to {_STEPS}", _whole),
    Check("loss, first to last step", "finite in every step", _finite),
    Check("reward of the confidence, first to last ten steps", "rises", _mean_of_ends("reward/confidence")),
    Check("reward of the answer, first to last ten steps", "", _mean_of_ends("reward/answer")),
    Check("ECE of a step's responses, first to last ten steps", "falls", _mean_of_ends("rollout/ece")),
    Check("difference of rollout and training probabilities", "rounding error", _measured("gap")),
    Check("tokens/s per NPU", "", _measured("speed")),
    Check("memory of an NPU in the update, GiB", "below 60.9", _measured("memory")),
    Check("resumed after a stop", "2 starts or more", lambda run: (f"{run.starts} starts", run.starts >= 2)),
)


def table(run: Run | None) -> tuple[str, bool]:
    """The table, and whether no check failed; without a run, its cells are empty."""
    cells = [("", None) if run is None else check.measure(run) for check in CHECKS]
    shown = [f"{text}{ {True: ': passed', False: ': FAILED', None: ''}[passed] }" for text, passed in cells]
    lines = [f"| {check.name} | {check.expected} | {cell} |" for check, cell in zip(CHECKS, shown, strict=True)]
    head = ["| check | expected | found |", "| --- | --- | --- |"]
    return "\n".join([*head, *lines]) + "\n", all(passed is not False for _, passed in cells)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--into", type=Path, metavar="README", help="replace the table of this file")
    parsed = parser.parse_args(arguments)
    text, passed = table(read_run(parsed.run))
    print(text, end="")
    if parsed.into is not None:
        before, found, rest = parsed.into.read_text(encoding="utf-8").partition(BEGIN)
        _, closed, after = rest.partition(END)
        if not (found and closed):
            sys.exit(f"{parsed.into}: expected a table between {BEGIN} and {END}")
        parsed.into.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
