"""The table of the study, and the rule that decides about the option.

The rule was fixed before the runs: reserving a quarter is worth keeping if, against training on the rest alone with a
map fitted on the reserved questions, the paired difference of the Brier score over the seeds excludes 0 in its favour,
and accuracy falls by at most .03 against no reserved questions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from scipy.stats import t

from coca_mindspeed.evaluation.binning import Floats
from coca_mindspeed.evaluation.metrics import calibration_metrics
from coca_mindspeed.evaluation.predictions import Prediction, read_predictions
from coca_mindspeed.utils.console import markdown_table
from coca_mindspeed.utils.text_formats import parse_json
from coca_router.calibrate import cross_fitted, fit_map
from coca_router.calibration import MapKind
from experiments.confidence_share.arms import ARMS

Row = Mapping[str, float]
_COLUMNS = ("accuracy", "stated", "ECE", "Brier", "AUROC", "AUROC within", "accuracy, trained", "stated, trained")


def measured(predictions: Sequence[Prediction], confidence: Floats | None = None) -> dict[str, float]:
    """Metrics of the valid answers, with ``confidence`` in place of the stated ones; AUROC also within kinds."""
    stated, correct = _arrays(predictions)
    stated = stated if confidence is None else confidence
    values = calibration_metrics(stated, correct.astype(bool)).values
    kinds = np.array([_kind(p) for p in predictions if p.confidence is not None])
    own = {kind: kinds == kind for kind in sorted(set(kinds))}
    by_kind = {
        kind: calibration_metrics(stated[rows], correct[rows].astype(bool)).values["auroc"]
        for kind, rows in own.items()
    }
    sizes = {kind: int(own[kind].sum()) for kind, value in by_kind.items() if not math.isnan(value)}
    within = sum(by_kind[kind] * size for kind, size in sizes.items()) / max(1, sum(sizes.values()))
    accuracy = float(np.mean([bool(p.correct) for p in predictions]))
    return {
        "accuracy": accuracy,
        "stated": float(stated.mean()),
        "ECE": values["ece"],
        "Brier": values["brier"],
        "AUROC": values["auroc"],
        "AUROC within": within if sizes else math.nan,
    }


def _kind(prediction: Prediction) -> str:
    """Data set; of progressions, the operator and the digits of the step."""
    question = prediction.question or ""
    operator = next((sign for sign in "+*" if sign in question), "")
    return f"{prediction.dataset}{operator}" if prediction.dataset == "progressions" else prediction.dataset


def _arrays(predictions: Sequence[Prediction]) -> tuple[Floats, Floats]:
    valid = [p for p in predictions if p.confidence is not None]
    return np.array([p.confidence for p in valid]), np.array([float(bool(p.correct)) for p in valid])


def _rows(directory: Path) -> dict[str, Row]:
    """Rows of one seed: its arms, and maps on two of them."""
    found: dict[str, Row] = {}
    for name in ARMS:
        arm = directory / name.replace(" ", "_")
        if not (arm / "done.json").exists():
            continue
        held_out, trained = (read_predictions(arm / f"{part}.jsonl") for part in ("held_out", "trained"))
        own = measured(trained)
        more = {"accuracy, trained": own["accuracy"], "stated, trained": own["stated"]}
        found[name] = measured(held_out) | more
        stated, correct = _arrays(held_out)
        for kind in get_args(MapKind):
            if name == "rest alone":
                mapped = _map(kind, *_arrays(read_predictions(arm / "reserved.jsonl")))(stated)
                found[f"{name}, {kind} map of the reserved"] = measured(held_out, mapped)
            if name == "share 0" and len(set(correct)) == 2:
                questions = [p.id for p in held_out if p.confidence is not None]
                mapped = cross_fitted(kind, stated, correct.astype(bool), questions)
                found[f"{name}, {kind} map of extra labels"] = measured(held_out, mapped)
    return found


def _map(kind: MapKind, stated: Floats, correct: Floats) -> Callable[[Floats], Floats]:
    """The map that was fitted; a constant where all labels are equal."""
    if len(set(correct)) < 2:
        return lambda values: np.full(len(values), correct.mean())
    return fit_map(kind, stated, correct.astype(bool))


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean of paired differences and its 95% interval (Student's t)."""
    values = np.asarray(differences)
    if len(values) < 2:
        return float(values.mean()), math.nan, math.nan
    width = float(t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))
    return float(values.mean()), float(values.mean()) - width, float(values.mean()) + width


def report(directory: Path) -> str:
    """Markdown: means over the seeds, paired differences, and the rule."""
    seeds = {path.name: _rows(path) for path in sorted(directory.glob("seed_*"))}
    names = list(dict.fromkeys(name for rows in seeds.values() for name in rows))
    table = []
    for name in names:
        rows = [found[name] for found in seeds.values() if name in found]
        cells = [_mean([row[c] for row in rows if c in row]) for c in _COLUMNS]
        table.append([name, str(len(rows)), *cells])
    lines = [
        markdown_table(["arm", "seeds", *_COLUMNS], table),
        "",
        "Paired differences, mean over seeds (95%, t):",
        "",
    ]
    chosen = "share 0.25"
    against = [name for name in names if name != chosen]
    for name in against:
        for column in ("Brier", "accuracy"):
            both = [
                found[chosen][column] - found[name][column] for found in seeds.values() if {chosen, name} <= set(found)
            ]
            if both:
                mean, low, high = interval(both)
                signs = "".join("+" if d > 0 else "-" for d in both)
                lines.append(f"- {column}, {chosen} - {name}: {mean:+.3f} ({low:+.3f} to {high:+.3f}); signs {signs}")
    machines = {parse_json(f.read_text())["machine"] for f in directory.glob("seed_*/*/done.json")}
    lines += ["", "Machines: " + "; ".join(sorted(machines)) + "."]
    return "\n".join(lines) + "\n"


def _mean(values: Sequence[float]) -> str:
    return f"{np.nanmean(values):.3f}" if values and not all(map(math.isnan, values)) else "--"
