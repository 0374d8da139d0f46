"""Maps from a stated confidence to the share of right answers behind it: Platt's, the beta family's, isotonic."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from coca_mindspeed.config.schema import Section

Floats = npt.NDArray[np.float64]
CurveKind = Literal["platt", "beta", "isotonic"]

_EDGE = 1e-4  # stated 0 and 1 have no logarithms; about as close as a stated confidence comes to them
_WEAK_PENALTY = 1e6  # C of the logistic regressions: next to none, so that separable labels still have a fit


class Curve(Section):
    """A fitted map, never falling: a higher stated confidence is never worth less.

    ``platt``: logistic in logit(s); ``beta``: logistic in ln(s) and -ln(1 - s) (Kull, Silva Filho and Flach, 2017);
    ``isotonic``: straight lines between knots.
    """

    kind: CurveKind
    coefficients: list[float] = Field(default_factory=list, description="of the logistic maps, the intercept last")
    knots: list[tuple[float, float]] = Field(default_factory=list, description="of the isotonic map")

    def __call__(self, confidence: Floats) -> Floats:
        """The recalibrated confidences, shape as ``confidence``; NaN stays NaN."""
        if self.kind == "isotonic":
            x, y = np.array(self.knots).T
            return np.asarray(np.where(np.isnan(confidence), np.nan, np.interp(confidence, x, y)))
        *weights, intercept = self.coefficients
        score = _features(self.kind, confidence) @ np.array(weights) + intercept
        return np.asarray(1 / (1 + np.exp(-score)))


def fit_curve(kind: CurveKind, confidence: Floats, correct: npt.NDArray[np.bool_]) -> Curve:
    """Fit a map.

    Args:
        kind: which.
        confidence: (n,), valid.
        correct: (n,), right and wrong ones among them.

    Raises:
        ValueError: nothing can be fitted, because all labels are equal or there are none.
    """
    if len(np.unique(correct)) < 2:
        raise ValueError(f"a map needs right and wrong answers, found {len(correct)} labels that are all equal")
    if kind == "isotonic":
        fitted = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(confidence, correct)
        pairs = zip(fitted.X_thresholds_.tolist(), fitted.y_thresholds_.tolist(), strict=True)
        return Curve(kind=kind, knots=list(pairs))
    features = _features(kind, confidence)
    used = list(range(features.shape[1]))
    while used:
        model = LogisticRegression(C=_WEAK_PENALTY, max_iter=1000, tol=1e-8).fit(features[:, used], correct)
        # A negative weight would make the map fall somewhere; the family without that term is the next best.
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
    columns: Sequence[Floats] = [log_s - log_rest] if kind == "platt" else [log_s, -log_rest]
    return np.stack(columns, axis=1)


def kind_for(labels: int) -> CurveKind:
    """The map that so many labels can carry: two parameters below 200, three below 1,000, steps from there on."""
    return "platt" if labels < 200 else "beta" if labels < 1000 else "isotonic"
