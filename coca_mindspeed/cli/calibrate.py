"""``coca-mindspeed calibrate``: recalibrate confidences from labelled predictions, and certify an error."""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from coca_mindspeed.algorithm.parsing import CONFIDENCE_FIRST_PROMPT
from coca_mindspeed.cli.options import at_least, json_object, number, place, within
from coca_mindspeed.errors import ConfigError, DataError, UsageError
from coca_mindspeed.evaluation.calibration.guarantee import Certificate, certify
from coca_mindspeed.evaluation.calibration.maps import (
    SHRINKAGE,
    Floats,
    Identity,
    cross_fitted,
    data_hash,
    fit_map,
    labelled,
    prompt_hash,
    question_hashes,
    read_map,
    write_map,
)
from coca_mindspeed.evaluation.intervals.estimates import Estimates, paired_intervals
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.metrics.specs import CATALOGUE, show
from coca_mindspeed.evaluation.predictions import Outcomes, Prediction, outcomes, read_predictions, write_predictions
from coca_mindspeed.utils.files import write_json
from coca_mindspeed.utils.markdown import markdown_table

_SAMPLING = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "max_tokens")
_SHOWN = ("ece", "brier", "log_score", "auroc")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``calibrate``."""
    parser.add_argument("predictions", nargs="+", type=Path, metavar="PREDICTIONS", help="labelled, of one model")
    parser.add_argument("--output", type=place, required=True, help="the map (JSON); with --apply, predictions")
    parser.add_argument("--model", help="its name at the backend (default: as the predictions say)")
    parser.add_argument("--system-prompt", type=Path, metavar="FILE", help="(default: the paper's)")
    parser.add_argument("--temperature", type=within(0, 2), default=1.0, help="of sampling (default: 1.0)")
    parser.add_argument(
        "--sampling",
        type=json_object,
        default={},
        metavar="JSON",
        help='further sampling parameters of the predictions, {"top_p": 0.9, "max_tokens": 4096} for example',
    )
    parser.add_argument(
        "--method",
        choices=("auto", "platt", "beta", "isotonic"),
        default="auto",
        help="auto: platt below 200 labels, beta below 1,000, isotonic from there on",
    )
    parser.add_argument(
        "--shrinkage", type=within(0, 1e9), default=SHRINKAGE, help="labels at which a domain counts for half"
    )
    parser.add_argument("--folds", type=at_least(2), default=5, help="of the figures after (default: 5)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="draws the folds (default: 0)")
    parser.add_argument(
        "--risk", type=_share(0.999), help="certify the largest set of answers whose error is at most this"
    )
    parser.add_argument("--confidence", type=_share(0.999999), default=0.95, help="of the guarantee (default: 0.95)")
    parser.add_argument("--apply", type=Path, metavar="MAP", help="recalibrate by this map instead of fitting one")


def _share(highest: float) -> Callable[[str], float]:
    return number(f"a number above 0, at most {highest:g}", lambda value: 0 < value <= highest)


def run(arguments: argparse.Namespace) -> int:
    """Fit, or apply; certify; write and print."""
    predictions = [p for path in arguments.predictions for p in read_predictions(path)]
    identity = _identity(arguments, predictions)
    if arguments.apply is not None:
        return _apply(arguments, predictions, identity)
    stated, correct, domains, questions = labelled(predictions)
    if not len(stated):
        raise DataError(f"{arguments.predictions[0]}: holds no valid confidence")
    kind = None if arguments.method == "auto" else arguments.method
    options = {"kind": kind, "shrinkage": arguments.shrinkage}
    certificate = None
    if arguments.risk is not None:
        _refuse_several_of_a_question(predictions)
        everything = outcomes(predictions)
        certificate = certify(
            everything.confidence, everything.correct, risk=arguments.risk, confidence=arguments.confidence
        )
    try:
        fitted = fit_map(stated, correct, domains, identity, **options)
    except DataError as error:
        if certificate is None or certificate.threshold is None:
            raise
        # Labels that are all right certify, although no map can be fitted to them.
        write_json(arguments.output, {"identity": identity.model_dump(), "certificate": certificate.model_dump()})
        sys.stdout.write(f"{error}\n{_certified(certificate, arguments.output, identity.model)}{arguments.output}\n")
        return 0
    text = f"{fitted.curve.kind} map from {len(correct):,} labels, {len(fitted.domains)} domains with their own\n\n"
    try:
        after = cross_fitted(
            stated, correct, domains, questions, identity, folds=arguments.folds, seed=arguments.seed, **options
        )
        text += _before_and_after(stated, after, correct, questions) + "\n"
    except DataError as error:
        if len(set(questions)) < arguments.folds:
            raise
        text += f"no figures of what it is worth on other labels: of a fold's others, {error}\n"
    if certificate is not None:
        fitted = fitted.model_copy(update={"certificate": certificate})
        text += _certified(certificate, arguments.output, identity.model)
    write_map(arguments.output, fitted)
    sys.stdout.write(f"{text}{arguments.output}\n")
    return 0


def _certified(certificate: Certificate, path: Path, model: str) -> str:
    """The certificate in words, and the tier that it configures."""
    if certificate.threshold is None:
        return f"{certificate.sentence()}\n"
    tier = {"name": re.sub(r"[^A-Za-z0-9._-]", "-", model), "backend": "BACKEND", "certificate": str(path)}
    return f"{certificate.sentence()}\n\n{yaml.safe_dump({'tiers': [tier]}, sort_keys=False)}\n"


def _refuse_several_of_a_question(predictions: list[Prediction]) -> None:
    """The guarantee counts independent questions.

    Raises:
        DataError: a question has several.
    """
    (dataset, name), count = Counter((p.dataset, p.id) for p in predictions).most_common(1)[0]
    if count > 1:
        raise DataError(
            f"--risk: {count} predictions are of question {name!r} of {dataset!r}; a certificate needs one of each "
            "question, since several of one are not independent"
        )


def _identity(arguments: argparse.Namespace, predictions: list[Prediction]) -> Identity:
    models = {p.model for p in predictions}
    if len(models - {None}) > 1:
        named = ", ".join(sorted(str(each) for each in models - {None}))
        raise UsageError(
            f"PREDICTIONS: they are of several models ({named}), and a map belongs to one; keep the lines of one"
        )
    model = arguments.model or (next(iter(models)) if len(models) == 1 else None)
    if model is None:
        raise UsageError("--model: the predictions name no model, or several; a map belongs to one")
    prompt = CONFIDENCE_FIRST_PROMPT
    if arguments.system_prompt is not None:
        try:
            prompt = arguments.system_prompt.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--system-prompt {arguments.system_prompt}: cannot be read: {error}") from error
    return Identity(
        model=model,
        prompt_sha256=prompt_hash(prompt),
        temperature=arguments.temperature,
        data_sha256=data_hash(predictions),
        questions=question_hashes(predictions),
        sampling=_sampling(arguments.sampling),
    )


def _sampling(values: dict[str, Any]) -> dict[str, float]:
    """Sampling parameters by the names of OpenAI's and vLLM's APIs.

    Raises:
        UsageError: a name or value is none of them.
    """
    for name, value in values.items():
        if name not in _SAMPLING or isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"--sampling: expected numbers for {', '.join(_SAMPLING)}, found {name}: {value!r}")
    return values


def _before_and_after(stated: Floats, after: Floats, correct: npt.NDArray[np.bool_], questions: list[str]) -> str:
    unknown = np.full(len(stated), np.nan)
    rows = []
    for name, confidence in (("as stated", stated), ("recalibrated", after)):
        metrics = calibration_metrics(confidence, correct).as_dict()
        rows.append([name, *(show(metric, _value(metrics[metric])) for metric in _SHOWN)])
    of_row = np.array(questions)
    first, second = (
        Estimates(Outcomes(s, correct, unknown), questions=of_row, replicates=500) for s in (stated, after)
    )
    change = paired_intervals(first, second)
    cells = [
        f"{show(m, change[m].estimate, signed=True)} "
        f"({show(m, change[m].low, signed=True)} to {show(m, change[m].high, signed=True)})"
        for m in _SHOWN
    ]
    rows.append(["change, 95% interval", *cells])
    return markdown_table(["cross-fitted", *(CATALOGUE[m].label for m in _SHOWN)], rows)


def _value(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _apply(arguments: argparse.Namespace, predictions: list[Prediction], identity: Identity) -> int:
    fitted = read_map(arguments.apply)
    prompt = CONFIDENCE_FIRST_PROMPT
    if arguments.system_prompt is not None:
        prompt = arguments.system_prompt.read_text(encoding="utf-8")
    fitted.identity.require(identity.model, prompt, arguments.temperature, where=str(arguments.apply))
    known = {*fitted.identity.questions} & {*identity.questions}
    if known or fitted.identity.data_sha256 == identity.data_sha256:
        raise DataError(
            f"{arguments.apply}: was fitted on {len(known) or 'all'} of these {len(identity.questions)} questions, "
            "which would flatter it; its cross-fitted figures were printed when it was fitted"
        )
    recalibrated = [
        p if p.confidence is None else replace(p, confidence=fitted.apply_one(p.confidence, p.dataset))
        for p in predictions
    ]
    write_predictions(arguments.output, recalibrated)
    sys.stdout.write(f"{arguments.output}\n")
    return 0
