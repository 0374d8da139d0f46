"""Recalibration maps from stated confidence to the fraction of correct answers: Platt, beta, isotonic."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError

from coca_mindspeed.config.schema import Section
from coca_mindspeed.errors import ConfigError, DataError, validation_problems
from coca_mindspeed.evaluation.binning import Floats
from coca_mindspeed.evaluation.calibration.guarantee import Certificate
from coca_mindspeed.evaluation.metrics import calibration_metrics
from coca_mindspeed.evaluation.predictions import Prediction, gradable
from coca_mindspeed.utils.files import write_json
from coca_mindspeed.utils.packages import require

Labels = npt.NDArray[np.bool_]
_Form = TypeVar("_Form", bound=BaseModel)
CurveKind = Literal["platt", "beta", "isotonic"]

_EDGE = 1e-4  # stated 0 and 1 are clipped, for their logarithms
_WEAK_PENALTY = 1e6  # C of the logistic regressions: almost no penalty; separable labels still have a fit


class Curve(Section):
    """A fitted non-decreasing map.

    ``platt``: logistic in logit(s); ``beta``: logistic in ln(s) and -ln(1 - s) (Kull, Silva Filho and Flach, 2017);
    ``isotonic``: piecewise linear between knots.
    """

    kind: CurveKind
    coefficients: list[float] = Field(default_factory=list, description="of the logistic maps, the intercept last")
    knots: list[tuple[float, float]] = Field(default_factory=list, description="of the isotonic map")

    def __call__(self, confidence: Floats) -> Floats:
        """Recalibrate confidences of any shape; NaN stays NaN."""
        if self.kind == "isotonic":
            x, y = np.array(self.knots).T
            return np.asarray(np.where(np.isnan(confidence), np.nan, np.interp(confidence, x, y)))
        *weights, intercept = self.coefficients
        score = _features(self.kind, confidence) @ np.array(weights) + intercept
        return np.asarray(1 / (1 + np.exp(-score)))


def fit_curve(kind: CurveKind, confidence: Floats, correct: Labels) -> Curve:
    """Fit a map to valid confidences (n,) and labels (n,).

    Raises ValueError if all labels are equal, or there are none.
    """
    if len(np.unique(correct)) < 2:
        raise ValueError(f"a map needs correct and wrong answers, found {len(correct)} labels that are all equal")
    require("sklearn", purpose="a recalibration map")
    if kind == "isotonic":
        from sklearn.isotonic import IsotonicRegression  # two seconds, which only a fit needs

        fitted = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(confidence, correct)
        pairs = zip(fitted.X_thresholds_.tolist(), fitted.y_thresholds_.tolist(), strict=True)
        return Curve(kind=kind, knots=list(pairs))
    from sklearn.linear_model import LogisticRegression

    features = _features(kind, confidence)
    used = list(range(features.shape[1]))
    while used:
        model = LogisticRegression(C=_WEAK_PENALTY, max_iter=1000, tol=1e-8).fit(features[:, used], correct)
        # A negative weight would make the map decrease somewhere: drop its term.
        if (model.coef_[0] >= 0).all():
            weights = np.zeros(features.shape[1])
            weights[used] = model.coef_[0]
            return Curve(kind=kind, coefficients=[*weights.tolist(), float(model.intercept_[0])])
        used.pop(int(np.argmin(model.coef_[0])))
    share = float(np.mean(correct))
    return Curve(kind=kind, coefficients=[*[0.0] * features.shape[1], float(np.log(share / (1 - share)))])


def _features(kind: CurveKind, confidence: Floats) -> Floats:
    s = np.clip(confidence, _EDGE, 1 - _EDGE)
    log_s, log_rest = np.log(s), np.log1p(-s)
    return np.stack([log_s - log_rest] if kind == "platt" else [log_s, -log_rest], axis=1)


def kind_for(labels: int) -> CurveKind:
    """Choose the map by number of labels: two parameters below 200, three below 1,000, isotonic from there on."""
    return "platt" if labels < 200 else "beta" if labels < 1000 else "isotonic"


STATED = "(as stated)"  # row of the transfer matrix without a map
SHRINKAGE = 200.0
_MIN_DOMAIN_LABELS = 20


class Identity(Section):
    """Model, prompt, sampling and data that a map was fitted for."""

    model: str = Field(description="its name at the backend")
    prompt_sha256: str = Field(description="of the system prompt")
    temperature: float = Field(ge=0, description="of sampling")
    data_sha256: str = Field(description="of the labelled predictions that it was fitted on")
    questions: tuple[str, ...] = Field((), description="the first 16 digits of the SHA-256 of each of their questions")
    sampling: dict[str, int | float] = Field(
        default_factory=dict, description="sampling parameters besides temperature that are not neutral (top_p, ...)"
    )

    def require(self, model: str, prompt: str, temperature: float | None, *, where: str) -> None:
        """Refuse to use a map for another model, system prompt or temperature (None: not checked).

        Raises ConfigError if one of them differs; ``where`` begins the message.
        """
        asked = {"model": model, "prompt_sha256": prompt_hash(prompt), "temperature": temperature}
        for name, value in asked.items():
            found = getattr(self, name)
            if value is not None and found != value:
                if name == "prompt_sha256":
                    reason = "fitted with another system prompt; fit one by calibrate --system-prompt"
                else:
                    reason = f"fitted for {name} {found!r}, found {value!r}; fit one for it"
                raise ConfigError(f"{where}: the calibration map was {reason}")


class DomainCurve(Section):
    """A domain's own map."""

    curve: Curve
    labels: int = Field(ge=1, description="that it was fitted on")


class RecalibrationMap(Section):
    """The global map, and each domain's, which has weight ``labels / (labels + shrinkage)`` in the mixture."""

    version: int = Field(1, ge=1, le=1, description="of this file's form")
    identity: Identity
    labels: int = Field(ge=1, description="valid labelled confidences")
    curve: Curve
    domains: dict[str, DomainCurve] = Field(default_factory=dict, description="by data set")
    shrinkage: float = Field(SHRINKAGE, ge=0, description="labels at which a domain counts for half")
    certificate: Certificate | None = Field(None, description="the certified set of accepted answers, if one was asked")

    def apply(self, confidence: Floats, domains: Sequence[str | None]) -> Floats:
        """Recalibrate confidences (n,), NaN where invalid; an unknown domain uses the global map."""
        result = self.curve(confidence)
        of_row = np.array(domains, dtype=object)
        for name, domain in self.domains.items():
            rows = of_row == name
            if rows.any():
                share = domain.labels / (domain.labels + self.shrinkage)
                result[rows] = share * domain.curve(confidence[rows]) + (1 - share) * result[rows]
        return result

    def apply_one(self, confidence: float, domain: str | None) -> float:
        """Recalibrate one confidence."""
        return float(np.clip(self.apply(np.array([confidence]), [domain])[0], 0, 1))


def prompt_hash(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()


def data_hash(predictions: Sequence[Prediction]) -> str:
    """SHA-256 of labelled predictions, independent of their order."""
    rows = sorted(json.dumps([*p.key, p.confidence, p.correct]) for p in predictions)
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def question_hashes(predictions: Sequence[Prediction]) -> tuple[str, ...]:
    """Hashes of the distinct questions, sorted."""
    keys = {f"{p.dataset}\0{p.id}" for p in predictions}
    return tuple(sorted(hashlib.sha256(key.encode()).hexdigest()[:16] for key in keys))


def labelled(predictions: Sequence[Prediction]) -> tuple[Floats, Labels, list[str], list[str]]:
    """Return valid confidences (n,), labels (n,), domains and questions of gradable predictions."""
    valid = [p for p in gradable(predictions) if p.confidence is not None]
    return (
        np.array([p.confidence for p in valid], dtype=np.float64),
        np.array([p.correct for p in valid], dtype=np.bool_),
        [p.dataset for p in valid],
        [f"{p.dataset}\0{p.id}" for p in valid],
    )


def fit_map(
    confidence: Floats,
    correct: Labels,
    domains: Sequence[str],
    identity: Identity,
    *,
    kind: CurveKind | None = None,
    domain_kinds: Mapping[str, CurveKind] | None = None,
    shrinkage: float = SHRINKAGE,
) -> RecalibrationMap:
    """Fit the global map, and one for each domain that has labels of both classes; inputs are (n,) and valid.

    ``kind`` None chooses each map by its number of labels; ``domain_kinds`` overrides it for domains' own maps.

    Raises:
        DataError: all labels are equal, or there are none.
    """
    try:
        curve = fit_curve(kind or kind_for(len(correct)), confidence, correct)
    except ValueError as error:
        raise DataError(f"no map can be fitted: {error}") from error
    of_row = np.array(domains, dtype=object)
    names = sorted(set(domains))
    own: dict[str, DomainCurve] = {}
    for name in names if len(names) > 1 else ():
        rows = of_row == name
        count = int(rows.sum())
        if count >= _MIN_DOMAIN_LABELS and 0 < correct[rows].sum() < count:
            own_kind = (domain_kinds or {}).get(name) or kind or kind_for(count)
            fitted = fit_curve(own_kind, confidence[rows], correct[rows])
            own[name] = DomainCurve(curve=fitted, labels=count)
    return RecalibrationMap(identity=identity, labels=len(correct), curve=curve, domains=own, shrinkage=shrinkage)


def question_folds(questions: Sequence[str], folds: int, seed: int) -> npt.NDArray[np.intp]:
    """Return the fold (n,) of each row; samples of one question share a fold.

    Raises DataError if there are fewer questions than folds.
    """
    unique, question = np.unique(np.array(questions, dtype=object).astype(str), return_inverse=True)
    if len(unique) < folds:
        raise DataError(f"{folds} folds need as many questions, found {len(unique)}")
    return np.asarray((np.random.default_rng(seed).permutation(len(unique)) % folds)[question])


def cross_fitted(
    confidence: Floats,
    correct: Labels,
    domains: Sequence[str],
    questions: Sequence[str],
    identity: Identity,
    *,
    kind: CurveKind | None = None,
    shrinkage: float = SHRINKAGE,
    folds: int = 5,
    seed: int = 0,
) -> Floats:
    """Recalibrate each confidence (n,) with a map fitted without its question.

    Raises DataError if there are fewer questions than folds, or the labels outside a fold are all equal.
    """
    fold = question_folds(questions, folds, seed)
    # The kinds of the map that is fitted on all labels.
    domain_kinds = {name: kind or kind_for(count) for name, count in Counter(domains).items()}
    kind = kind or kind_for(len(correct))
    result = np.empty(len(confidence))
    names = np.array(domains, dtype=object)
    for index in range(folds):
        inside = fold == index
        outside = (confidence[~inside], correct[~inside], names[~inside].tolist())
        fitted = fit_map(*outside, identity, kind=kind, domain_kinds=domain_kinds, shrinkage=shrinkage)
        result[inside] = fitted.apply(confidence[inside], names[inside].tolist())
    return np.clip(result, 0, 1)


def write_map(path: Path, fitted: RecalibrationMap) -> None:
    write_json(path, fitted.model_dump(mode="json"))


def read_map(path: Path) -> RecalibrationMap:
    """Read a saved map; raises ConfigError if it is missing or invalid."""
    return _read(path, RecalibrationMap, "a calibration map")


class _CertificateFile(BaseModel):
    """A map with a certificate, or a file with a certificate only."""

    identity: Identity
    certificate: Certificate


def read_certificate(path: Path) -> tuple[Identity, Certificate]:
    """Read the certificate in a file of ``calibrate --risk``, and its identity; raises ConfigError if there is none."""
    found = _read(path, _CertificateFile, "a file with a certificate, written by `calibrate --risk`")
    return found.identity, found.certificate


def _read(path: Path, form: type[_Form], expected: str) -> _Form:
    try:
        return form.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        problems = validation_problems(error)
        raise ConfigError(f"{path}: expected {expected}; {problems[0]}", problems) from error


def _fitted(confidence: Floats, correct: Labels) -> Callable[[Floats], Floats]:
    curve = fit_curve(kind_for(len(correct)), confidence, correct)
    return lambda stated: np.clip(curve(stated), 0, 1)


def transfer_matrix(predictions: Sequence[Prediction]) -> dict[str, dict[str, float]]:
    """Smooth ECE on each data set after the map of each; a data set's own map is cross-fitted by question.

    Returns fitted on -> tested on -> error, NaN where no map can be fitted; the row :data:`STATED` is without a map.
    """
    stated, correct, datasets, questions = labelled(predictions)
    of_row, question = np.array(datasets, dtype=object), np.array(questions, dtype=object)
    rows = {name: of_row == name for name in sorted(set(datasets))}
    matrix = {STATED: {name: _smooth_ece(stated[inside], correct[inside]) for name, inside in rows.items()}}
    for source, fitting in rows.items():
        matrix[source] = dict.fromkeys(rows, float("nan"))
        try:
            recalibrate = _fitted(stated[fitting], correct[fitting])
        except ValueError:
            continue
        for target, tested in rows.items():
            matrix[source][target] = (
                _smooth_ece(recalibrate(stated[tested]), correct[tested])
                if target != source
                else _error_within(stated[tested], correct[tested], question[tested].tolist())
            )
    return matrix


def _smooth_ece(confidence: Floats, correct: Labels) -> float:
    return calibration_metrics(confidence, correct).values["smooth_ece"]


def _error_within(stated: Floats, correct: Labels, questions: Sequence[str], folds: int = 5) -> float:
    after = np.empty_like(stated)
    try:
        fold = question_folds(questions, folds, seed=0)
        for index in range(folds):
            inside = fold == index
            after[inside] = _fitted(stated[~inside], correct[~inside])(stated[inside])
    except (DataError, ValueError):
        return float("nan")
    return _smooth_ece(after, correct)
