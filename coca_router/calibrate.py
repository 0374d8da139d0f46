"""``coca-router calibrate``: recalibrate confidences from labelled predictions, and certify an error."""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from coca_mindspeed.algorithm.parsing import SYSTEM_PROMPTS
from coca_mindspeed.cli.options import json_object, number, place, within
from coca_mindspeed.cli.prediction_source import PredictionSource, add_source_options
from coca_mindspeed.errors import ConfigError, DataError, UsageError
from coca_mindspeed.evaluation.intervals import Estimates, paired_intervals
from coca_mindspeed.evaluation.metrics import FEWEST_LABELS, METRIC_SPECS, Floats, show
from coca_mindspeed.evaluation.predictions import (
    GradedPredictions,
    Prediction,
    answers_first,
    gradable,
    outcomes,
)
from coca_mindspeed.evaluation.scoreboard import prediction_files
from coca_mindspeed.utils.console import markdown_table, print_markdown, print_note
from coca_mindspeed.utils.json_files import write_json
from coca_mindspeed.utils.packages import require
from coca_router.calibration import (
    Calibration,
    CalibrationMap,
    Certificate,
    Identity,
    MapKind,
    certify,
    logit,
    prompt_hash,
)
from coca_router.config import bands_from, form_keys, source_keys, tiers_yaml
from coca_router.replay import by_answer

_SAMPLING = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "max_tokens")
_SHOWN = ("ece", "brier", "log_score", "auroc")
_LABELS_OF_ISOTONIC = 1000  # fewer: the map of two parameters
_WEAK_PENALTY = 1e6  # C of the logistic regression: almost no penalty; separable labels still have a fit
Labels = npt.NDArray[np.bool_]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    paths = "labelled predictions of one model, or responses to grade, as evaluate takes them"
    option("predictions", nargs="+", type=Path, metavar="PREDICTIONS", help=paths)
    option("--output", type=place, required=True, help="the calibration (JSON)")
    option("--model", help="name of the model at the backend (default: by the predictions)")
    source = "confidence: stated (default), or answer_logprob, the predictions' answer_probability"
    option("--source", choices=("stated", "answer_logprob"), default="stated", help=source)
    prompt = (
        "file of the system prompt of predictions that name no form (default: the paper's; none without confidences)"
    )
    option("--system-prompt", type=Path, metavar="FILE", help=prompt)
    option("--temperature", type=within(0, 2), default=1.0, help="sampling temperature (default: 1.0)")
    sampling = 'further sampling parameters of the predictions, {"top_p": 0.9, "max_tokens": 4096} for example'
    option("--sampling", type=json_object({"top_p": 0.9}), default={}, metavar="JSON", help=sampling)
    fixed = "backends.NAME.request of the server that gave the predictions, which a certificate pins"
    option("--request", type=json_object({"chat_template_kwargs": {}}), default={}, metavar="JSON", help=fixed)
    option("--risk", type=_share(0.999), help="certify the largest set of answers whose error is at most this")
    option("--confidence", type=_share(0.999999), default=0.95, help="confidence of the guarantee (default: 0.95)")
    add_source_options(parser)


def _share(highest: float) -> Callable[[str], float]:
    return number(f"a number above 0, at most {highest:g}", lambda value: 0 < value <= highest)


def run(arguments: argparse.Namespace) -> int:
    predictions = _read(arguments)
    by_log_prob = arguments.source == "answer_logprob"
    plain = by_log_prob and all(p.confidence is None for p in predictions)
    identity = _identity(arguments, predictions, "" if plain else SYSTEM_PROMPTS["first"])
    # A proxy cannot route by a confidence that is stated after the answer.
    routable, keys = not answers_first(predictions), {}
    if by_log_prob:
        predictions, routable, keys = list(map(by_answer, predictions)), True, source_keys(plain)
    keys |= form_keys(arguments.predictions[0], predictions)
    valid = [p for p in gradable(predictions) if p.confidence is not None]
    if not valid:
        missing = "'answer_probability'" if by_log_prob else "valid confidence"
        raise DataError(f"{arguments.predictions[0]}: holds no {missing}")
    data, questions = outcomes(valid), [f"{p.dataset}\0{p.id}" for p in valid]
    stated, correct = data.confidence, data.correct
    path = str(arguments.output.resolve())  # `serve` may run elsewhere

    def tier(**more: object) -> str:
        """A tier of a serving configuration; empty where a proxy cannot route."""
        return f"\n```yaml\n{tiers_yaml({identity.model: {**keys, **more}})}```\n\n" if routable else ""

    certificate = None if arguments.risk is None else _certify(arguments, predictions)
    unknown = "; form unknown" if identity.forms == "unknown" else ""
    end = "" if certificate is None else f"{certificate.sentence()}{unknown}\n"
    if is_certified := certificate is not None and certificate.threshold is not None:
        end += tier(certificate=path, invalid="refuse")
    kind: MapKind = "platt" if len(valid) < _LABELS_OF_ISOTONIC else "isotonic"
    text = ""
    curve: CalibrationMap | None = None
    try:
        curve = fit_map(kind, stated, correct)
        text = f"{kind} map from {len(correct):,} labels\n\n"
        after = cross_fitted(kind, stated, correct, questions)
        text += _before_and_after(stated, after, correct, questions) + "\n"
        if not is_certified:
            # By the map, an accepted answer is more likely right than wrong.
            accepted = after >= 0.5
            wrong = f", {1 - correct[accepted].mean():.1%} of them wrong" if accepted.any() else ""
            share = f"{accepted.mean():.1%} of the valid labels"
            end += f"suggested: answer from recalibrated confidence 0.5 on, as {share} do{wrong}\n"
            end += tier(calibration=path, **bands_from(0.5))
    except ValueError as error:
        if curve is not None:
            text += "no cross-fitted figures: without one of the folds, all other answers are right or all are wrong\n"
        elif is_certified:  # which needs no map
            text = f"no map can be fitted: {error}\n"
        else:
            raise DataError(f"no map can be fitted: {error}") from error
    if curve is not None and len(correct) < FEWEST_LABELS:
        few = f"warning: {len(correct)} labels are fewer than {FEWEST_LABELS}: the map is not shown to be usable"
        print_note(f"{few}; label more answers")
    fitted = Calibration(identity=identity, labels=len(correct), curve=curve, certificate=certificate)
    write_json(arguments.output, fitted.model_dump(mode="json"))
    print_markdown(f"{text}{end}{arguments.output}")
    return 0


#: A run directory with several files holds answers of several models.
_SOURCES = ("opencompass", "responses", "predictions")


def _read(arguments: argparse.Namespace) -> list[Prediction]:
    """The predictions of all files, of OpenCompass runs, and of directories that hold one file of predictions."""
    source = PredictionSource(arguments, arguments.predictions)
    alone = len(arguments.predictions) == 1
    predictions: list[Prediction] = []
    for path in arguments.predictions:
        files = prediction_files(path) if path.is_dir() else []
        predictions += source.read(files[0] if len(files) == 1 else path, numbered=alone, kinds=_SOURCES)
    source.refuse_unused_options()
    return predictions


def _certify(arguments: argparse.Namespace, predictions: list[Prediction]) -> Certificate:
    """Raise DataError if a question has several predictions, which are not independent."""
    (dataset, name), count = Counter((p.dataset, p.id) for p in predictions).most_common(1)[0]
    if count > 1:
        raise DataError(
            f"--risk: question {name!r} of {dataset!r} has {count} predictions; a certificate needs one per question, "
            "since several are not independent"
        )
    data = outcomes(predictions)
    return certify(data.confidence, data.correct, risk=arguments.risk, confidence=arguments.confidence)


def _identity(arguments: argparse.Namespace, predictions: list[Prediction], prompt: str) -> Identity:
    """``prompt`` is the default of ``--system-prompt``."""
    models = {p.model for p in predictions}
    if len(models - {None}) > 1:
        named = ", ".join(sorted(str(each) for each in models - {None}))
        raise UsageError(f"PREDICTIONS: of several models ({named}), but a map is for one; keep the lines of one")
    model = arguments.model or (next(iter(models)) if len(models) == 1 else None)
    if model is None:
        raise UsageError("--model NAME: is needed, because predictions lack the field model; a map is for one model")
    for name, value in arguments.sampling.items():
        if name not in _SAMPLING or isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"--sampling: expected numbers for {', '.join(_SAMPLING)}, found {name}: {value!r}")
    path, forms = arguments.system_prompt, _forms(predictions)
    if forms != "unknown":
        if path is not None:
            raise UsageError("--system-prompt: the predictions name the form of their prompts; leave it out")
        return Identity(
            model=model, source=arguments.source, forms=forms,
            temperature=arguments.temperature, sampling=arguments.sampling, request=arguments.request,
        )  # fmt: skip
    try:
        prompt = prompt if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--system-prompt {path}: cannot be read: {error}") from error
    return Identity(
        model=model, source=arguments.source, prompt_sha256=prompt_hash(prompt),
        temperature=arguments.temperature, sampling=arguments.sampling, request=arguments.request,
    )  # fmt: skip


def _forms(predictions: Sequence[Prediction]) -> list[str] | Literal["unknown"]:
    """The forms that the predictions name; unknown, with a warning, if some name none."""
    forms = {p.form for p in predictions if p.form is not None}
    without = sum(p.form is None for p in predictions)
    if not without:
        return sorted(forms)
    print_note(
        f"warning: {without} of {len(predictions)} predictions name no form of their prompt (the field form), so that "
        "a prompt with another instruction is not noticed"
    )
    return "unknown"


def _before_and_after(stated: Floats, after: Floats, correct: Labels, questions: list[str]) -> str:
    unknown, of_row = np.full(len(stated), np.nan), np.array(questions)
    both = {
        name: Estimates(GradedPredictions(confidence, correct, unknown), questions=of_row, replicates=500)
        for name, confidence in (("before", stated), ("recalibrated", after))
    }
    rows = [[name, *(show(metric, each.values[metric]) for metric in _SHOWN)] for name, each in both.items()]
    change = paired_intervals(both["before"], both["recalibrated"])
    cells = [
        f"{show(m, change[m].estimate, signed=True)} "
        f"({show(m, change[m].low, signed=True)} to {show(m, change[m].high, signed=True)})"
        for m in _SHOWN
    ]
    rows.append(["change, 95% interval", *cells])
    return markdown_table(["cross-fitted", *(METRIC_SPECS[m].label for m in _SHOWN)], rows)


def fit_map(kind: MapKind, confidence: Floats, correct: Labels) -> CalibrationMap:
    """Fit a map to valid confidences ``[n]`` and labels ``[n]``.

    Raises ValueError if all labels are equal, or there are none.
    """
    if len(np.unique(correct)) < 2:
        raise ValueError(f"a map needs correct and wrong answers, found {len(correct)} labels that are all equal")
    require("sklearn", purpose="a recalibration map")
    if kind == "isotonic":
        from sklearn.isotonic import IsotonicRegression  # two seconds, which only a fit needs

        fitted = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(confidence, correct)
        pairs = zip(fitted.X_thresholds_.tolist(), fitted.y_thresholds_.tolist(), strict=True)
        return CalibrationMap(kind=kind, knots=list(pairs))
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=_WEAK_PENALTY, max_iter=1000, tol=1e-8).fit(logit(confidence)[:, None], correct)
    weight, intercept = float(model.coef_[0, 0]), float(model.intercept_[0])
    if weight < 0:  # a map does not fall
        weight, intercept = 0.0, float(logit(np.mean(correct)))
    return CalibrationMap(kind=kind, coefficients=[weight, intercept])


def cross_fitted(kind: MapKind, stated: Floats, correct: Labels, questions: Sequence[str], folds: int = 5) -> Floats:
    """Recalibrate each confidence ``[n]`` with a map fitted without its question, all samples of which share a fold.

    Raises ValueError if there are fewer questions than folds, or the labels outside a fold are all equal.
    """
    unique, question = np.unique(np.array(questions, dtype=object).astype(str), return_inverse=True)
    if len(unique) < folds:
        raise ValueError(f"{folds} folds need as many questions, found {len(unique)}")
    fold = (np.random.default_rng(0).permutation(len(unique)) % folds)[question]
    after = np.empty_like(stated)
    for index in range(folds):
        inside = fold == index
        after[inside] = fit_map(kind, stated[~inside], correct[~inside])(stated[inside])
    return after
