"""Whether a recalibration map of one data set is worth anything on another."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from coca_mindspeed.calibration.families import Floats, fit_curve, kind_for
from coca_mindspeed.calibration.maps import labelled, question_folds
from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.predictions import Prediction

STATED = "(as stated)"

Labels = npt.NDArray[np.bool_]


def _smooth_ece(confidence: Floats, correct: Labels) -> float:
    return calibration_metrics(confidence, correct, coverages=()).smooth_ece


def _fitted(confidence: Floats, correct: Labels) -> Callable[[Floats], Floats]:
    """A map of the kind that so many labels can carry.

    Raises:
        ValueError: the labels are all equal.
    """
    curve = fit_curve(kind_for(len(correct)), confidence, correct)
    return lambda stated: np.clip(curve(stated), 0, 1)


def transfer_matrix(predictions: Sequence[Prediction], *, folds: int = 5, seed: int = 0) -> dict[str, dict[str, float]]:
    """Smooth ECE on each data set after the map of each; its own is cross-fitted by question.

    Args:
        predictions: of one model and method, on several data sets.
        folds: of a data set's own map, which must not have seen the questions that it is tested on.
        seed: draws the folds.

    Returns:
        fitted on -> tested on -> error, NaN where no map can be fitted; :data:`STATED` is fitted on nothing.
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
                else _error_within(stated[tested], correct[tested], question[tested].tolist(), folds, seed)
            )
    return matrix


def _error_within(stated: Floats, correct: Labels, questions: Sequence[str], folds: int, seed: int) -> float:
    after = np.empty_like(stated)
    try:
        fold = question_folds(questions, folds, seed)
        for index in range(folds):
            inside = fold == index
            after[inside] = _fitted(stated[~inside], correct[~inside])(stated[inside])
    except (DataError, ValueError):
        return float("nan")
    return _smooth_ece(after, correct)
