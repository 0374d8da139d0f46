"""Maps from stated confidence to the fraction of correct answers."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from coca_mindspeed.config.schema import Section
from coca_mindspeed.evaluation.binning import Floats
from coca_mindspeed.evaluation.predictions import Prediction, gradable
from coca_mindspeed.utils.packages import require

Labels = npt.NDArray[np.bool_]
MapKind = Literal["platt", "beta", "isotonic"]

_EDGE = 1e-4  # stated 0 and 1 are clipped, for their logarithms
_WEAK_PENALTY = 1e6  # C of the logistic regressions: almost no penalty; separable labels still have a fit


class CalibrationMap(Section):
    """A fitted non-decreasing map.

    ``platt``: logistic in logit(s); ``beta``: logistic in ln(s) and -ln(1 - s) (Kull, Silva Filho and Flach, 2017);
    ``isotonic``: piecewise linear between knots.
    """

    kind: MapKind
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


def fit_map(kind: MapKind, confidence: Floats, correct: Labels) -> CalibrationMap:
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
        return CalibrationMap(kind=kind, knots=list(pairs))
    from sklearn.linear_model import LogisticRegression

    features = _features(kind, confidence)
    used = list(range(features.shape[1]))
    while used:
        model = LogisticRegression(C=_WEAK_PENALTY, max_iter=1000, tol=1e-8).fit(features[:, used], correct)
        # A negative weight would make the map decrease somewhere: drop its term.
        if (model.coef_[0] >= 0).all():
            weights = np.zeros(features.shape[1])
            weights[used] = model.coef_[0]
            return CalibrationMap(kind=kind, coefficients=[*weights.tolist(), float(model.intercept_[0])])
        used.pop(int(np.argmin(model.coef_[0])))
    share = float(np.mean(correct))
    return CalibrationMap(kind=kind, coefficients=[*[0.0] * features.shape[1], float(np.log(share / (1 - share)))])


def _features(kind: MapKind, confidence: Floats) -> Floats:
    s = np.clip(confidence, _EDGE, 1 - _EDGE)
    log_s, log_rest = np.log(s), np.log1p(-s)
    return np.stack([log_s - log_rest] if kind == "platt" else [log_s, -log_rest], axis=1)


def kind_for(labels: int) -> MapKind:
    """Choose the map by number of labels: two parameters below 200, three below 1,000, isotonic from there on."""
    return "platt" if labels < 200 else "beta" if labels < 1000 else "isotonic"


def labelled(predictions: Sequence[Prediction]) -> tuple[Floats, Labels, list[str], list[str]]:
    """Return valid confidences (n,), labels (n,), domains and questions of gradable predictions."""
    valid = [p for p in gradable(predictions) if p.confidence is not None]
    return (
        np.array([p.confidence for p in valid], dtype=np.float64),
        np.array([p.correct for p in valid], dtype=np.bool_),
        [p.dataset for p in valid],
        [f"{p.dataset}\0{p.id}" for p in valid],
    )


def _question_folds(questions: Sequence[str], folds: int) -> npt.NDArray[np.intp]:
    """Return the fold (n,) of each row; samples of one question share a fold."""
    unique, question = np.unique(np.array(questions, dtype=object).astype(str), return_inverse=True)
    if len(unique) < folds:
        raise ValueError(f"{folds} folds need as many questions, found {len(unique)}")
    return np.asarray((np.random.default_rng(0).permutation(len(unique)) % folds)[question])


def cross_fitted(kind: MapKind, stated: Floats, correct: Labels, questions: Sequence[str], folds: int = 5) -> Floats:
    """Recalibrate each confidence (n,) with a map fitted without its question.

    Raises ValueError if there are fewer questions than folds, or the labels outside a fold are all equal.
    """
    fold = _question_folds(questions, folds)
    after = np.empty_like(stated)
    for index in range(folds):
        inside = fold == index
        after[inside] = fit_map(kind, stated[~inside], correct[~inside])(stated[inside])
    return after
