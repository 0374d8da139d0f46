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
MapKind = Literal["platt", "isotonic"]

_EDGE = 1e-4  # stated 0 and 1 are clipped, for their logarithms
_WEAK_PENALTY = 1e6  # C of the logistic regression: almost no penalty; separable labels still have a fit


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
        return np.asarray(1 / (1 + np.exp(-(weight * _logit(confidence) + intercept))))


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

    model = LogisticRegression(C=_WEAK_PENALTY, max_iter=1000, tol=1e-8).fit(_logit(confidence)[:, None], correct)
    weight, intercept = float(model.coef_[0, 0]), float(model.intercept_[0])
    if weight < 0:  # a map does not fall
        weight, intercept = 0.0, float(_logit(np.mean(correct)))
    return CalibrationMap(kind=kind, coefficients=[weight, intercept])


def _logit(confidence: npt.ArrayLike) -> Floats:
    s = np.clip(confidence, _EDGE, 1 - _EDGE)
    return np.asarray(np.log(s) - np.log1p(-s))


def kind_for(labels: int) -> MapKind:
    """Choose the map by number of labels: two parameters below 1,000, isotonic from there on."""
    return "platt" if labels < 1000 else "isotonic"


def labelled(predictions: Sequence[Prediction]) -> tuple[Floats, Labels, list[str]]:
    """Return valid confidences ``[n]``, labels ``[n]`` and questions of gradable predictions."""
    valid = [p for p in gradable(predictions) if p.confidence is not None]
    return (
        np.array([p.confidence for p in valid], dtype=np.float64),
        np.array([p.correct for p in valid], dtype=np.bool_),
        [f"{p.dataset}\0{p.id}" for p in valid],
    )


def _question_folds(questions: Sequence[str], folds: int) -> npt.NDArray[np.intp]:
    """Return the fold ``[n]`` of each row; samples of one question share a fold."""
    unique, question = np.unique(np.array(questions, dtype=object).astype(str), return_inverse=True)
    if len(unique) < folds:
        raise ValueError(f"{folds} folds need as many questions, found {len(unique)}")
    return np.asarray((np.random.default_rng(0).permutation(len(unique)) % folds)[question])


def cross_fitted(kind: MapKind, stated: Floats, correct: Labels, questions: Sequence[str], folds: int = 5) -> Floats:
    """Recalibrate each confidence ``[n]`` with a map fitted without its question.

    Raises ValueError if there are fewer questions than folds, or the labels outside a fold are all equal.
    """
    fold = _question_folds(questions, folds)
    after = np.empty_like(stated)
    for index in range(folds):
        inside = fold == index
        after[inside] = fit_map(kind, stated[~inside], correct[~inside])(stated[inside])
    return after
