"""Compare forms of CoCA's reward: ``python -m experiments.forms ARCHIVE [ARCHIVE ...] [--runs DIRECTORY]``.

``--runs`` answers the held-out questions of each finished job of the plan ``forms`` 32 times, and adds its answers and
training curve to the first archive.  The tables are made from the archives alone.
"""

import argparse
import csv
import io
import itertools
import json
import math
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.utils.logging import disable_progress_bar

from coca_mindspeed.algorithm.methods import MethodSettings, method_settings
from coca_mindspeed.config.values import checked_method
from coca_mindspeed.data.records import read_records
from coca_mindspeed.evaluation.metrics import calibration_metrics
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.respond import predict
from coca_mindspeed.utils.console import markdown_table, print_text
from coca_mindspeed.utils.files import write_atomically
from coca_mindspeed.utils.json_files import read_json_lines
from experiments.reproduce.plan import saved_config
from experiments.reproduce.results import mean_interval

Floats = npt.NDArray[np.float64]
_SAMPLES = 32
_LAST = 40  # steps whose entropy is averaged
_WINDOW = 10  # steps over which the share of groups with equal confidences is averaged
_EQUAL = 0.95  # of the groups: nearly nothing is left to learn for the confidence
_CURVE = {
    "step": "step",
    "rollout/accuracy": "accuracy",
    "rollout/confidence": "stated",
    "rollout/ece": "ece",
    "rollout/brier": "brier",
    "rollout/auroc": "auroc",
    "confidence/entropy": "entropy",
    "group/no_confidence_variance_share": "equal",
}
_EQUAL_COLUMN = "equal from step"
_ACCURACY_MARGIN = 0.02
_DEFAULT = "scripts, two decimals"


@dataclass(frozen=True)
class FormRun:
    """One training.

    Attributes:
        name: of the form.
        seed: of the training.
        method: its settings.
        curve: columns of training, float64 ``[steps]`` each.
        kinds: kind of each answered question, ``[n]``; a question has one row per answer.
        confidence: stated, float64 ``[n]``; NaN where invalid.
        correct: bool ``[n]``.
    """

    name: str
    seed: int
    method: MethodSettings
    curve: Mapping[str, Floats]
    kinds: npt.NDArray[np.str_]
    confidence: Floats
    correct: npt.NDArray[np.bool_]

    def measure(self, *kinds: str) -> Mapping[str, float]:
        """Accuracy, ECE, Brier score and AUROC on the questions of these kinds; without any, on all."""
        chosen = np.isin(self.kinds, kinds) if kinds else np.ones(len(self.kinds), bool)
        return calibration_metrics(self.confidence[chosen], self.correct[chosen]).values

    @cached_property  # the tables and the rule use it
    def row(self) -> dict[str, float]:
        """The columns of the table; NaN where undefined."""
        products = [kind for kind in dict.fromkeys(self.kinds) if "*" in kind]
        sums = [kind for kind in dict.fromkeys(self.kinds) if "*" not in kind]
        everything = self.measure()
        return {
            "accuracy": everything["accuracy"],
            "stated": float(np.nanmean(self.confidence)),
            "ECE": everything["ece"],
            "Brier": everything["brier"],
            "AUROC": everything["auroc"],
            "products right": self.measure(*products)["accuracy"],
            "AUROC, products": self.measure(*products)["auroc"],
            "AUROC, sums": float(np.mean([self.measure(kind)["auroc"] for kind in sums])),
            "entropy": float(np.mean(self.curve["entropy"][-_LAST:])),
            _EQUAL_COLUMN: self.step_of_equal_groups,
        }

    @property
    def step_of_equal_groups(self) -> float:
        """First step of the first window in which 95% of the groups state one confidence; NaN if there is none."""
        means = np.convolve(self.curve["equal"], np.ones(_WINDOW) / _WINDOW, mode="valid")
        found = np.flatnonzero(means >= _EQUAL)
        return float(self.curve["step"][found[0]]) if len(found) else math.nan

    @property
    def changed_keys(self) -> list[str]:
        """Keys that differ from the paper's form."""
        paper = method_settings(separate_format=False)
        keys = ("advantage_eps", "advantage_scale", "confidence_decimals", "entropy_bonus", "separate_format")
        return [key for key in keys if getattr(self.method, key) != getattr(paper, key)]


def answer(job: Path) -> str:
    """Answer the held-out questions 32 times with a job's final model; CSV of kind, confidence and correctness."""
    config = saved_config(job / "run")
    assert config.data.evaluate is not None
    records = list(read_records(Path(config.data.evaluate)))[: config.evaluation.questions]
    policy = load_policy(job / "run" / "model", config.model, torch.device("cpu"))
    draw = torch.Generator().manual_seed(config.seed)
    with closing(build_grader(config.data.grader, config.data.grader_options)) as grader:
        found = predict(policy, records, grader, config.method, config.rollout, draw, samples=_SAMPLES)
    kinds = [record.metadata["kind"] for record in records for _ in range(_SAMPLES)]
    rows = [
        (kind, "" if p.confidence is None else p.confidence, int(p.correct is True))
        for kind, p in zip(kinds, found, strict=True)
    ]
    return csv_text(("kind", "confidence", "correct"), rows)


def curve_of(job: Path) -> str:
    """The columns of a job's training that the tables need, as CSV."""
    rows = [row for _, row in read_json_lines(job / "run" / "metrics.jsonl")]
    return csv_text(tuple(_CURVE.values()), [[short_number(row.get(name)) for name in _CURVE] for row in rows])


def short_number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def add_runs(archive: Path, runs: Path) -> None:
    """Add the finished trained jobs below ``runs`` to the archive, which is written anew after each."""
    contents = archive_contents(archive) if archive.exists() else {}
    for cell in sorted(runs.glob("*/seed_*/*/cell.json")):
        job, name = cell.parent, f"{cell.parent.parent.name}/{cell.parent.name}"
        if not (job / "run" / "model").is_dir() or f"{name}/cell.json" in contents:
            continue
        contents[f"{name}/answers.csv"] = answer(job).encode()
        contents[f"{name}/metrics.csv"] = curve_of(job).encode()
        contents[f"{name}/cell.json"] = cell.read_bytes()
        write_archive(archive, contents)
        print_text(f"{name}: {_SAMPLES} answers to each question")


def write_archive(archive: Path, contents: Mapping[str, bytes]) -> None:
    """Write files by their names; equal contents give equal bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as tar:
        for name, content in sorted(contents.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    write_atomically(archive, packed.getvalue())


def archive_contents(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        files = ((member.name, tar.extractfile(member)) for member in tar.getmembers() if member.isfile())
        return {name.removeprefix("./"): file.read() for name, file in files if file is not None}


def read_archive(archive: Path) -> list[FormRun]:
    """Read the trainings of an archive of this module, or of ``experiments/results/long``."""
    contents = archive_contents(archive)
    kinds = {}
    if "evaluate.jsonl" in contents:
        kinds = {row["id"]: row["metadata"]["kind"] for row in map(json.loads, contents["evaluate.jsonl"].splitlines())}
    runs = []
    for name in sorted(contents):
        if not (found := re.fullmatch(r"(seed_\d+/[^/]+)/cell\.json", name)):
            continue
        cell, directory = json.loads(contents[name]), found[1]
        if f"{directory}/answers.csv" in contents:
            rows = list(csv.DictReader(io.StringIO(contents[f"{directory}/answers.csv"].decode())))
            curve = float_columns(
                list(csv.DictReader(io.StringIO(contents[f"{directory}/metrics.csv"].decode()))), _CURVE.values()
            )
        else:
            predictions = [json.loads(line) for line in contents[f"{directory}/predictions.jsonl"].splitlines()]
            rows = [{**p, "kind": kinds[p["id"]]} for p in predictions]
            metrics = [json.loads(line) for line in contents[f"{directory}/metrics.jsonl"].splitlines()]
            curve = {short: float_columns(metrics, [long])[long] for long, short in _CURVE.items()}
        runs.append(
            FormRun(
                cell["name"],
                cell["seed"],
                checked_method(cell["made_from"]["settings"]["method"]),
                curve,
                np.array([row["kind"] for row in rows]),
                float_columns(rows, ["confidence"])["confidence"],
                np.array([bool(int(row["correct"])) for row in rows]),
            )
        )
    return runs


def float_columns(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Floats]:
    return {
        name: np.array([math.nan if row[name] in ("", None) else float(row[name]) for row in rows]) for name in names
    }


def by_form(runs: Iterable[FormRun]) -> dict[str, dict[int, FormRun]]:
    """Form -> seed -> training."""
    ordered = sorted(runs, key=lambda run: (run.name, run.seed))
    return {name: {run.seed: run for run in own} for name, own in itertools.groupby(ordered, key=lambda run: run.name)}


def mean_row(own: Mapping[int, FormRun]) -> list[str]:
    """Cells of one form: its number of seeds, and the mean of each column over the seeds where it is defined.

    The last cell counts the seeds on which the groups came to state one confidence.
    """
    rows = [run.row for run in own.values()]
    cells = [str(len(rows))]
    for column in rows[0]:
        values = [row[column] for row in rows if not math.isnan(row[column])]
        if column == _EQUAL_COLUMN:
            cells.append(f"{len(values)} of {len(rows)}")
        else:
            cells.append(_cell(column, float(np.mean(values)) if values else math.nan))
    return cells


def choose(forms: Mapping[str, Mapping[int, FormRun]]) -> tuple[str, list[list[str]]]:
    """The form that the rule chooses, and a row of the rule's figures for each of CoCA's forms.

    Forms take part that were trained on all seeds of the launch scripts' form (with two decimals).  The best one has
    the lowest mean Brier score of those whose accuracy is at most .02 below that of the scripts' form.  Of the forms
    whose paired difference to it has a 95% interval that includes 0, the one that changes the fewest keys of the
    paper's form is chosen.
    """
    seeds = set(forms[_DEFAULT])
    coca = {
        name: own
        for name, own in forms.items()
        if next(iter(own.values())).method.name == "coca" and seeds.issubset(own)
    }
    values = {name: {s: own[s].row for s in sorted(seeds)} for name, own in coca.items()}

    def mean(name: str, column: str) -> float:
        return float(np.mean([row[column] for row in values[name].values()]))

    right = {n for n in coca if mean(n, "accuracy") >= mean(_DEFAULT, "accuracy") - _ACCURACY_MARGIN}
    best = min(right, key=lambda name: mean(name, "Brier"))
    rows, equal = [], []
    for name, own in coca.items():
        keys = next(iter(own.values())).changed_keys
        interval = mean_interval([values[name][s]["Brier"] - values[best][s]["Brier"] for s in sorted(seeds)])
        no_worse = name == best or (name in right and interval.low <= 0 <= interval.high)
        if no_worse:
            equal.append((len(keys), mean(name, "Brier"), name))
        difference = "" if name == best else f"{interval.estimate:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"
        rows.append(
            [
                name,
                ", ".join(keys),
                f"{mean(name, 'accuracy'):.3f}",
                f"{mean(name, 'Brier'):.3f}",
                difference,
                "yes" if no_worse else "no",
            ]
        )
    return min(equal)[2], rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archives", nargs="+", type=Path, metavar="ARCHIVE", help="of this study, and of earlier ones")
    parser.add_argument(
        "--runs", type=Path, metavar="DIR", help="output of the plan `forms`, added to the first archive"
    )
    arguments = parser.parse_args()
    if arguments.runs is not None:
        disable_progress_bar()
        torch.set_num_threads(1)
        add_runs(arguments.archives[0], arguments.runs)
    forms = by_form(run for archive in arguments.archives for run in read_archive(archive))
    rows = [
        [name, str(seed), *(_cell(column, value) for column, value in run.row.items())]
        for name, own in forms.items()
        for seed, run in own.items()
    ]
    columns = list(next(iter(next(iter(forms.values())).values())).row)
    means = [[name, *mean_row(own)] for name, own in forms.items()]
    print_text(f"Means over seeds\n\n{markdown_table(('form', 'seeds', *columns[:-1], 'equal at last'), means)}\n")
    print_text(markdown_table(("form", "seed", *columns), rows))
    if _DEFAULT in forms:
        chosen, ruled = choose(forms)
        header = ("form", "keys changed", "accuracy", "Brier", "Brier: difference to the best (95%)", "no worse")
        print_text(f"\n{markdown_table(header, ruled)}\n\nchosen: {chosen}")


def _cell(column: str, value: float) -> str:
    if math.isnan(value):
        return "--"
    return f"{value:.0f}" if column == _EQUAL_COLUMN else f"{value:.3f}"


if __name__ == "__main__":
    main()
