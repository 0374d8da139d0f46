"""A confidence before the thought: ``python -m experiments.thinking ARCHIVE [--runs DIRECTORY]``.

``--runs`` packs the finished trainings of the plan ``thinking`` into the archive, from which the tables are made.  The
rule is in ``experiments/results/thinking/README.md``.
"""

import argparse
import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coca_mindspeed.evaluation.intervals import Interval
from coca_mindspeed.evaluation.metrics import calibration_metrics
from coca_mindspeed.evaluation.predictions import Prediction, read_predictions
from coca_mindspeed.utils.console import markdown_table, print_text
from coca_mindspeed.utils.json_files import read_json_lines
from coca_mindspeed.utils.tokenization import TokenCounter
from coca_router.replay import join_tiers, random_mix, setting_of_share
from experiments.forms import Floats, archive_contents, csv_text, float_columns, short_number, write_archive
from experiments.reproduce.results import mean_interval

_CURVE = {"step": "step", "rollout/accuracy": "accuracy", "response/open_thought_share": "open"}
_ANSWER = ("id", "kind", "confidence", "correct", "opening", "tokens")
_FIRST, _LAST = 10, 20  # steps that are averaged
_SHARES = [tenth / 10 for tenth in range(1, 10)]
_MARGIN = 0.01  # of right answers below always thinking


@dataclass(frozen=True)
class Arm:
    """One training: columns of its ``curve``, float64 ``[steps]``, and its answers to the held-out questions."""

    curve: Mapping[str, Floats]
    kinds: Sequence[str]
    answers: Sequence[Prediction]

    def measure(self) -> dict[str, float]:
        """Figures of the held-out answers; lengths are in tokens."""
        stated = np.array([math.nan if a.confidence is None else a.confidence for a in self.answers])
        values = calibration_metrics(stated, np.array([a.correct is True for a in self.answers])).values
        return {
            "accuracy": values["accuracy"],
            "stated": float(np.nanmean(stated)),
            "ECE": values["ece"],
            "Brier": values["brier"],
            "AUROC": values["auroc"],
            "tokens until the decision": _mean(a.tokens_to_confidence for a in self.answers),
            "tokens": _mean(a.tokens for a in self.answers),
        }

    def first(self, column: str) -> float:
        return float(np.mean(self.curve[column][:_FIRST]))

    def last(self, column: str) -> float:
        return float(np.mean(self.curve[column][-_LAST:]))


Arms = Mapping[str, Mapping[int, Arm]]  # arm -> seed -> training


def _mean(values: Iterable[float | None]) -> float:
    return float(np.mean([value for value in values if value is not None]))


@dataclass(frozen=True)
class Routed:
    """Routing of one seed's questions between answers at once and behind a thought.

    Attributes:
        gain: right answers less those of a random mix of equal tokens, averaged over the shares that think.
        tokens: of the cheapest threshold that is about as good as always thinking, as a share of its tokens; NaN: none.
    """

    gain: float
    tokens: float


def route(direct: Arm, thinking: Arm) -> Routed:
    """Replay "answer at once from a confidence on, else think"."""
    tiers = join_tiers({"direct": direct.answers, "thinking": thinking.answers}, [1.0, 1.0])
    settings = [setting_of_share(tiers, share) for share in _SHARES]
    always, cost = float(tiers.correct[1].mean()), float(tiers.whole[1].mean())
    enough = [s.cost / cost for s in settings if s.quality >= always - _MARGIN]
    gains = [s.quality - random_mix(tiers, s.cost) for s in settings]
    return Routed(float(np.mean(gains)), min(enough, default=math.nan))


def rule(arms: Arms) -> list[tuple[str, Interval, bool | None]]:
    """Each interval of the rule, and whether it is as the rule expects; None: not decided."""

    def over(names: Sequence[str], value: Callable[..., float]) -> Interval:
        seeds = sorted(set.intersection(*(set(arms[name]) for name in names)))
        return mean_interval([value(*(arms[name][seed] for name in names)) for seed in seeds])

    def outcome(name: str, interval: Interval, bound: float = 0.0, *, above: bool) -> tuple[str, Interval, bool | None]:
        expected, contrary = interval.low > bound, interval.high < bound
        return name, interval, None if not (expected or contrary) else expected == above

    cut = ("cut off", "thinking")
    return [
        outcome("1: AUROC of thinking", over(["thinking"], lambda a: a.measure()["AUROC"]), 0.5, above=True),
        outcome(
            "1: Brier score, thinking less long",
            over(["thinking", "long"], lambda a, b: a.measure()["Brier"] - b.measure()["Brier"]),
            0.05,
            above=False,
        ),
        outcome("2: right at first, cut off less thinking", over(cut, _difference_at_first), above=False),
        outcome("2: growth of open thoughts", over(cut[:1], lambda a: a.last("open") - a.first("open")), above=False),
        outcome("2: growth of right", over(cut[:1], lambda a: a.last("accuracy") - a.first("accuracy")), above=True),
        outcome("3: routed less random mix", over(["direct", "thinking"], lambda a, b: route(a, b).gain), above=True),
    ]


def _difference_at_first(cut: Arm, whole: Arm) -> float:
    return cut.first("accuracy") - whole.first("accuracy")


def add_runs(archive: Path, runs: Path) -> None:
    """Add the finished trainings below ``runs`` to the archive."""
    contents = archive_contents(archive) if archive.exists() else {}
    for cell in sorted(runs.glob("*/seed_*/*/cell.json")):
        job, questions = cell.parent, cell.parents[2] / "tasks" / "evaluate.jsonl"
        if not (job / "run" / "model").is_dir():
            continue
        kinds = {row["id"]: row["metadata"]["kind"] for _, row in read_json_lines(questions)}
        counter = TokenCounter(job / "run" / "model")
        rows = [
            (
                p.id,
                kinds[p.id],
                "" if p.confidence is None else p.confidence,
                int(p.correct is True),
                "" if p.tokens_to_confidence is None else p.tokens_to_confidence,
                counter.before(p.response, len(p.response)) + 1,  # and the end
            )
            for p in read_predictions(job / "predictions.jsonl")
        ]
        curve = [row for _, row in read_json_lines(job / "run" / "metrics.jsonl")]
        name = f"{job.parent.name}/{job.name}"
        contents[f"{name}/answers.csv"] = csv_text(_ANSWER, rows).encode()
        contents[f"{name}/metrics.csv"] = csv_text(
            tuple(_CURVE.values()), [[short_number(row.get(key)) for key in _CURVE] for row in curve]
        ).encode()
        contents[f"{name}/cell.json"] = cell.read_bytes()
    write_archive(archive, contents)


def read_archive(archive: Path) -> dict[str, dict[int, Arm]]:
    """The trainings of an archive of :func:`add_runs`."""
    contents = archive_contents(archive)
    arms: dict[str, dict[int, Arm]] = {}
    for name in sorted(contents):
        if not re.fullmatch(r"seed_\d+/[^/]+/cell\.json", name):
            continue
        cell, directory = json.loads(contents[name]), name.rpartition("/")[0]
        tables = [
            list(csv.DictReader(io.StringIO(contents[f"{directory}/{file}.csv"].decode())))
            for file in ("answers", "metrics")
        ]
        answers = [
            Prediction(
                id=row["id"],
                dataset="recurrences",
                question="",
                response="",
                confidence=float(row["confidence"]) if row["confidence"] else None,
                correct=row["correct"] == "1",
                tokens_to_confidence=int(row["opening"]) if row["opening"] else None,
                tokens=int(row["tokens"]),
            )
            for row in tables[0]
        ]
        arm = Arm(float_columns(tables[1], _CURVE.values()), [row["kind"] for row in tables[0]], answers)
        arms.setdefault(cell["name"], {})[cell["seed"]] = arm
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, metavar="ARCHIVE")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="output of the plan, packed into the archive")
    arguments = parser.parse_args()
    if arguments.runs is not None:
        add_runs(arguments.archive, arguments.runs)
    arms = read_archive(arguments.archive)
    figures = [
        (name, str(seed), {**arm.measure(), "right at first": arm.first("accuracy"), "open": arm.last("open")})
        for name, of_seeds in arms.items()
        for seed, arm in of_seeds.items()
    ]
    rows = [(name, seed, *(f"{value:.3f}" for value in values.values())) for name, seed, values in figures]
    print_text(f"{markdown_table(('arm', 'seed', *figures[0][2]), rows)}\n")
    rows = [
        (name, str(seed), kind, f"{np.mean([a.correct for a in chosen]):.3f}", f"{_stated(chosen):.3f}")
        for name, of_seeds in arms.items()
        for seed, arm in of_seeds.items()
        for kind in dict.fromkeys(arm.kinds)
        if (chosen := [a for a, of in zip(arm.answers, arm.kinds, strict=True) if of == kind])
    ]
    print_text(f"{markdown_table(('arm', 'seed', 'kind', 'right', 'stated'), rows)}\n")
    paired = [(seed, route(arms["direct"][seed], arms["thinking"][seed])) for seed in sorted(arms["direct"])]
    rows = [(str(seed), f"{routed.gain:+.3f}", f"{routed.tokens:.3f}") for seed, routed in paired]
    print_text(f"{markdown_table(('seed', 'routed less random mix', 'tokens of always thinking'), rows)}\n")
    words = {True: "as expected", False: "the contrary", None: "not decided"}
    rows = [(name, f"{i.estimate:+.3f} ({i.low:+.3f} to {i.high:+.3f})", words[held]) for name, i, held in rule(arms)]
    print_text(markdown_table(("part of the rule", "95% interval", "outcome"), rows))


def _stated(answers: Sequence[Prediction]) -> float:
    return _mean(a.confidence for a in answers)


if __name__ == "__main__":
    main()
