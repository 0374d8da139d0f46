"""``coca-router calibrate``: recalibrate confidences from labelled predictions, and certify an error."""

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coca_mindspeed.algorithm.parsing import CONFIDENCE_FIRST_PROMPT
from coca_mindspeed.cli.options import at_least, json_object, number, place, within
from coca_mindspeed.errors import ConfigError, DataError, UsageError
from coca_mindspeed.evaluation.calibration_maps import labelled
from coca_mindspeed.evaluation.intervals.estimates import Estimates, paired_intervals
from coca_mindspeed.evaluation.metrics.binning import Floats
from coca_mindspeed.evaluation.metrics.specs import METRIC_SPECS, show
from coca_mindspeed.evaluation.predictions import (
    Outcomes,
    Prediction,
    answers_first,
    outcomes,
    read_predictions,
    write_predictions,
)
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.files import write_json
from coca_mindspeed.utils.markdown import markdown_table, print_markdown
from coca_router import maps
from coca_router.config import as_tier_name, bands_from, tiers_yaml
from coca_router.guarantee import certify

_SAMPLING = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "max_tokens")
_SHOWN = ("ece", "brier", "log_score", "auroc")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("predictions", nargs="+", type=Path, metavar="PREDICTIONS", help="labelled, of one model")
    option("--output", type=place, required=True, help="the map (JSON); with --apply, predictions")
    option("--model", help="its name at the backend (default: as the predictions say)")
    option("--system-prompt", type=Path, metavar="FILE", help="(default: the paper's)")
    option("--temperature", type=within(0, 2), default=1.0, help="of sampling (default: 1.0)")
    option(
        "--sampling",
        type=json_object,
        default={},
        metavar="JSON",
        help='further sampling parameters of the predictions, {"top_p": 0.9, "max_tokens": 4096} for example',
    )
    option(
        "--method",
        choices=("auto", "platt", "beta", "isotonic"),
        default="auto",
        help="auto: platt below 200 labels, beta below 1,000, isotonic from there on",
    )
    option("--shrinkage", type=within(0, 1e9), default=maps.SHRINKAGE, help="labels at which a domain counts for half")
    option("--folds", type=at_least(2), default=5, help="of the figures after (default: 5)")
    option("--seed", type=at_least(0), default=0, help="draws the folds (default: 0)")
    option("--risk", type=_share(0.999), help="certify the largest set of answers whose error is at most this")
    option("--confidence", type=_share(0.999999), default=0.95, help="of the guarantee (default: 0.95)")
    option("--apply", type=Path, metavar="MAP", help="recalibrate by this map instead of fitting one")


def _share(highest: float) -> Callable[[str], float]:
    return number(f"a number above 0, at most {highest:g}", lambda value: 0 < value <= highest)


def run(arguments: argparse.Namespace) -> int:
    predictions = [p for path in arguments.predictions for p in read_predictions(path)]
    prompt = _system_prompt(arguments.system_prompt)
    identity = _identity(arguments, predictions, prompt)
    if arguments.apply is not None:
        return _apply(arguments, predictions, identity, prompt)
    stated, correct, domains, questions = labelled(predictions)
    if not len(stated):
        raise DataError(f"{arguments.predictions[0]}: holds no valid confidence")
    kind = None if arguments.method == "auto" else arguments.method
    options = {"kind": kind, "shrinkage": arguments.shrinkage}
    certificate, certified = None, ""
    path, behind = str(arguments.output.resolve()), answers_first(predictions)

    def tier(**keys: object) -> str:
        """A tier of a serving configuration; empty where a proxy cannot route."""
        return "" if behind else f"\n```yaml\n{tiers_yaml({as_tier_name(identity.model): keys})}```\n\n"

    if arguments.risk is not None:
        _check_one_per_question(predictions)
        data = outcomes(predictions)
        certificate = certify(data.confidence, data.correct, risk=arguments.risk, confidence=arguments.confidence)
        certified = f"{certificate.sentence()}\n"
        if certificate.threshold is not None:
            certified += tier(certificate=path, invalid="refuse")
    try:
        fitted = maps.fit_map(stated, correct, domains, identity, **options)
    except DataError as error:
        if certificate is None or certificate.threshold is None:
            raise
        # Labels that are all correct certify, although no map can be fitted to them.
        write_json(arguments.output, {"identity": identity.model_dump(), "certificate": certificate.model_dump()})
        print_markdown(f"{error}\n{certified}{arguments.output}")
        return 0
    text = f"{fitted.curve.kind} map from {len(correct):,} labels, {len(fitted.domains)} domains with their own\n\n"
    try:
        folds = {"folds": arguments.folds, "seed": arguments.seed}
        after = maps.cross_fitted(stated, correct, domains, questions, identity, **folds, **options)
        text += _before_and_after(stated, after, correct, questions) + "\n"
        if certificate is None or certificate.threshold is None:
            certified += _suggested(after, correct) + tier(calibration=path, **bands_from(0.5))
    except DataError:
        if len(set(questions)) < arguments.folds:
            raise
        text += "no cross-fitted figures: without one of the folds, all other answers are right or all are wrong\n"
    maps.write_map(arguments.output, fitted.model_copy(update={"certificate": certificate}))
    print_markdown(f"{text}{certified}{arguments.output}")
    return 0


def _suggested(after: Floats, correct: npt.NDArray[np.bool_]) -> str:
    """Answer where an answer is more likely right than wrong, by the map."""
    accepted = after >= 0.5
    error = f", {1 - correct[accepted].mean():.1%} of them wrong" if accepted.any() else ""
    share = f"{accepted.mean():.1%} of the valid labels"
    return f"suggested: answer from recalibrated confidence 0.5 on, as {share} do{error}\n"


def _check_one_per_question(predictions: list[Prediction]) -> None:
    """Raise DataError if a question has several predictions, which are not independent."""
    (dataset, name), count = Counter((p.dataset, p.id) for p in predictions).most_common(1)[0]
    if count > 1:
        raise DataError(
            f"--risk: question {name!r} of {dataset!r} has {count} predictions; a certificate needs one per question, "
            "since several are not independent"
        )


def _system_prompt(path: Path | None) -> str:
    if path is None:
        return CONFIDENCE_FIRST_PROMPT
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--system-prompt {path}: cannot be read: {error}") from error


def _identity(arguments: argparse.Namespace, predictions: list[Prediction], prompt: str) -> maps.Identity:
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
    return maps.Identity(
        model=model,
        prompt_sha256=maps.prompt_hash(prompt),
        temperature=arguments.temperature,
        data_sha256=maps.data_hash(predictions),
        questions=maps.question_hashes(predictions),
        sampling=arguments.sampling,
    )


def _before_and_after(stated: Floats, after: Floats, correct: npt.NDArray[np.bool_], questions: list[str]) -> str:
    unknown, of_row = np.full(len(stated), np.nan), np.array(questions)
    both = {
        name: Estimates(Outcomes(confidence, correct, unknown), questions=of_row, replicates=500)
        for name, confidence in (("as stated", stated), ("recalibrated", after))
    }
    rows = [[name, *(show(metric, each.values[metric]) for metric in _SHOWN)] for name, each in both.items()]
    change = paired_intervals(both["as stated"], both["recalibrated"])
    cells = [
        f"{show(m, change[m].estimate, signed=True)} "
        f"({show(m, change[m].low, signed=True)} to {show(m, change[m].high, signed=True)})"
        for m in _SHOWN
    ]
    rows.append(["change, 95% interval", *cells])
    return markdown_table(["cross-fitted", *(METRIC_SPECS[m].label for m in _SHOWN)], rows)


def _apply(arguments: argparse.Namespace, predictions: list[Prediction], identity: maps.Identity, prompt: str) -> int:
    fitted = maps.read_map(arguments.apply)
    fitted.identity.require(identity.model, prompt, arguments.temperature, where=str(arguments.apply))
    known = {*fitted.identity.questions} & {*identity.questions}
    if known or fitted.identity.data_sha256 == identity.data_sha256:
        raise DataError(
            f"{arguments.apply}: was fitted on {len(known) or 'all'} of these {len(identity.questions)} questions, "
            "which would bias the result; its cross-fitted figures were printed when it was fitted"
        )
    recalibrated = [
        p if p.confidence is None else replace(p, confidence=fitted.apply_one(p.confidence, p.dataset))
        for p in predictions
    ]
    write_predictions(arguments.output, recalibrated)
    print_text(arguments.output)
    return 0
