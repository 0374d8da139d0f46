"""Maps from stated confidence to the fraction of correct answers, and the file of a calibration.

The file holds a map, a certificate or both, with the model, prompt and sampling that they hold for.  A certificate is
the largest set of accepted answers whose error can be certified from labels.

For a threshold t, answers with a stated confidence of at least t are accepted. The number of wrong ones among m
accepted, labelled answers is binomial, so ``P(Bin(m, risk) <= wrong)`` is an exact p-value of "the error above t
exceeds ``risk``". Thresholds are tested in descending order on a grid of hundredths (fixed-sequence testing): a test
that passes hands its level to the next, and the first failure ends a run. There are two starts, at the first
threshold that accepts 10 or 30% of the answers, each with half of the level (the fallback procedure of Wiens, 2003,
which bounds the probability of any false certificate), so that a few overconfident answers at the top do not prevent a
certificate further down. The starts depend on the confidences, not on the labels.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError
from scipy.special import betaincinv

from coca_mindspeed.config.schema import Section
from coca_mindspeed.errors import ConfigError, validation_problems
from coca_mindspeed.evaluation.metrics import Floats
from coca_router.prompts import ServedPrompt

MapKind = Literal["platt", "isotonic"]

_EDGE = 1e-4  # stated 0 and 1 are clipped, for their logarithms


class CalibrationMap(Section):
    """A fitted non-decreasing map.

    ``platt``: logistic in logit(s); ``isotonic``: piecewise linear between knots.
    """

    kind: MapKind
    coefficients: list[float] = Field(default_factory=list, description="of the logistic map: weight and intercept")
    knots: list[tuple[float, float]] = Field(default_factory=list, description="of the isotonic map")

    def __call__(self, confidence: Floats) -> Floats:
        """Recalibrate confidences of any shape; NaN stays NaN."""
        if self.kind == "isotonic":
            x, y = np.array(self.knots).T
            return np.asarray(np.where(np.isnan(confidence), np.nan, np.interp(confidence, x, y)))
        weight, intercept = self.coefficients
        return np.asarray(1 / (1 + np.exp(-(weight * logit(confidence) + intercept))))


def logit(confidence: npt.ArrayLike) -> Floats:
    """Log-odds of clipped confidences."""
    s = np.clip(confidence, _EDGE, 1 - _EDGE)
    return np.asarray(np.log(s) - np.log1p(-s))


GRID = 100
_STARTS = ((0.1, 0.5), (0.3, 0.5))  # fraction of the answers accepted, fraction of the level


class Certificate(Section):
    """Result of :func:`certify`, and fields of the JSON file; ``threshold`` is null where nothing is certified."""

    risk: float = Field(gt=0, lt=1, description="largest error that is allowed")
    confidence: float = Field(gt=0, lt=1, description="of the guarantee, over draws of the labels")
    threshold: float | None = Field(description="lowest accepted confidence; null: nothing is certified")
    labels: int = Field(ge=0, description="labelled answers, invalid confidences included")
    accepted: int = Field(ge=0, description="of them at or above the threshold, or one that is not certified")
    wrong: int = Field(ge=0, description="of the accepted")
    bound: float | None = Field(
        description="exact upper bound of the accepted answers' error, for this threshold alone"
    )

    def sentence(self) -> str:
        if self.threshold is not None:
            return (
                f"certified: answers of confidence {self.threshold:g} or more are wrong at most "
                f"{self.risk:.3g} of the time, with confidence {self.confidence:g} ({self.wrong} of {self.accepted} "
                f"accepted labels wrong; {self.accepted / self.labels:.1%} of all are accepted)"
            )
        least = least_labels(self.risk, self.confidence)
        nothing = f"nothing is certified at risk {self.risk:g} from {self.labels} labels"
        if self.bound is None or self.accepted < least:
            return (
                f"{nothing}; even without a wrong one, at least {least} labels with a valid confidence are needed, "
                f"found {self.accepted} ({self.wrong} of them wrong)"
            )
        return (
            f"{nothing}; a threshold has to accept {least} of them or more, and the lowest upper bound of the error of "
            f"such a threshold is {self.bound:.3g} ({self.wrong} of {self.accepted} accepted labels wrong): allow a "
            "higher risk, or label more answers"
        )


def p_value(wrong: npt.ArrayLike, accepted: npt.ArrayLike, risk: float) -> Floats:
    """Exact binomial tail, elementwise: probability of at most ``wrong`` wrong answers if the error were ``risk``."""
    from scipy.stats import binom  # takes a second to import, which a refusal must not

    return np.asarray(binom.cdf(wrong, accepted, risk))


def upper_bound(wrong: int, accepted: int, confidence: float) -> float:
    """Exact one-sided (Clopper-Pearson) upper bound of the error."""
    return 1.0 if wrong >= accepted else float(betaincinv(wrong + 1, accepted - wrong, confidence))


def least_labels(risk: float, confidence: float) -> int:
    """Smallest number of accepted labels, all correct, that certifies."""
    return math.ceil(round(math.log(1 - confidence) / math.log(1 - risk), 9))


def certify(stated: Floats, correct: npt.NDArray[np.bool_], *, risk: float, confidence: float) -> Certificate:
    """Find the lowest threshold whose error is certified to be at most ``risk``, with probability ``confidence``.

    ``stated`` are confidences ``[n]``, NaN (never accepted) where invalid. The labels ``correct``, ``[n]``, are
    independent draws from the distribution that is served.
    """
    thresholds = np.arange(GRID, -1, -1) / GRID
    valid = ~np.isnan(stated)
    accepted, wrong = (  # at or above each threshold
        rows.sum() - np.searchsorted(np.sort(stated[rows]), thresholds, side="left")
        for rows in (valid, valid & ~correct)
    )
    last, level = None, 0.0
    p_values = p_value(wrong, accepted, risk)
    for index, start in enumerate(_levels(accepted, risk, confidence)):
        level += start
        if level > 0 and p_values[index] <= level * (1 + 1e-12):
            last = index
        else:
            level = 0.0
    common: dict[str, Any] = {"risk": risk, "confidence": confidence, "labels": len(correct)}
    bounds = [upper_bound(int(k), int(m), confidence) for k, m in zip(wrong, accepted, strict=True)]
    # Without a certificate: the lowest bound of a threshold that accepts enough, or all labels.
    enough = [index for index, count in enumerate(accepted) if count >= least_labels(risk, confidence)]
    at = min(enough or [len(bounds) - 1], key=lambda index: bounds[index]) if last is None else last
    threshold = None if last is None else float(thresholds[at])
    counts = {"accepted": int(accepted[at]), "wrong": int(wrong[at])}
    return Certificate(**common, threshold=threshold, **counts, bound=bounds[at])


def _levels(accepted: npt.NDArray[np.intp], risk: float, confidence: float) -> Floats:
    """Return the level with which each threshold starts a run; zero where none starts."""
    levels = np.zeros(len(accepted))
    least = least_labels(risk, confidence)
    if accepted[-1] < 2 * least:  # one start with the whole level: half of it would certify nothing
        if accepted[-1] >= least:
            levels[np.argmax(accepted >= least)] = 1 - confidence
        return levels
    for share, weight in _STARTS:
        # With the smallest number that can pass, one wrong answer would end the run at its start.
        wanted = max(2 * least, share * accepted[-1])
        levels[np.argmax(accepted >= wanted)] += weight * (1 - confidence)
    return levels


class Identity(Section):
    """Model, form of the prompts and sampling that a calibration or certificate holds for."""

    model: str = Field(description="its name at the backend")
    source: Literal["stated", "answer_logprob"] = Field("stated", description="of the confidences")
    forms: list[str] | Literal["unknown"] = Field(
        "unknown", description="digests of its predictions' forms; unknown: some named none"
    )
    prompt_sha256: str | None = Field(None, description="of the system prompt, if the forms are unknown")
    temperature: float = Field(ge=0, description="of sampling")
    sampling: dict[str, int | float] = Field(
        default_factory=dict, description="sampling parameters besides temperature that are not neutral (top_p, ...)"
    )

    request: dict[str, Any] = Field(default_factory=dict, description="fixed fields of a backend's requests")

    def require(
        self, model: str, prompt: ServedPrompt, temperature: float | None, *, where: str, source: str = "stated",
        request: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Raise ConfigError for another model, source, form, temperature or ``request`` (None: not checked).

        ``where`` begins the message.
        """
        asked = {"model": model, "source": source, "temperature": temperature, "request": request}
        for name, value in asked.items():
            own = getattr(self, name)
            if value is not None and own != value:
                raise ConfigError(
                    f"{where}: the calibration was fitted for {name} {own!r}, found {value!r}; fit one for it"
                )
        if self.forms == "unknown":
            if self.prompt_sha256 != prompt_hash(prompt.form.system_prompt or ""):
                reason = "fitted with another system prompt; fit one by calibrate --system-prompt"
                raise ConfigError(f"{where}: the calibration was {reason}")
        elif set(self.forms) != (sent := prompt.digests()):
            fitted, named = ", ".join(sorted(self.forms)), ", ".join(sorted(sent))
            raise ConfigError(
                f"{where}: the calibration was fitted for prompts of the form {fitted}, found {named}; name the "
                "model's export by form (and its category), or calibrate by predictions of this form"
            )


class Calibration(Section):
    """The content of the file."""

    version: int = Field(2, ge=2, le=2, description="of this file's form")
    identity: Identity
    labels: int = Field(ge=1, description="valid labelled confidences")
    curve: CalibrationMap | None = Field(description="null: all labels are right, so that none can be fitted")
    certificate: Certificate | None = Field(None, description="the certified set of accepted answers, if one was asked")

    def recalibrate(self, confidence: float) -> float:
        """Apply the curve, which is not null."""
        assert self.curve is not None
        return float(self.curve(np.array([confidence]))[0])


def prompt_hash(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()


def read_calibration(path: Path) -> Calibration:
    """Read the file of ``coca-router calibrate``; raises ConfigError if there is none."""
    try:
        return Calibration.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        problems = validation_problems(error)
        expected = "a file of this version of `coca-router calibrate`"
        raise ConfigError(f"{path}: expected {expected}; {problems[0]}", problems) from error
