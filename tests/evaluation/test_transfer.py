"""A map of one data set on another: worth something where both err alike, and harmful where they do not."""

import math

import numpy as np

from coca_mindspeed.evaluation.calibration.maps import STATED, transfer_matrix
from coca_mindspeed.evaluation.predictions import Prediction


def rows(dataset, count, truth, *, seed=0, id_=None, stated=None):
    """``count`` predictions that are right by chance ``truth(confidence)``; samples of ``id_`` if it is given."""
    rng = np.random.default_rng(seed)
    confidences = rng.random(count).round(3) if stated is None else np.full(count, stated)
    return [
        Prediction(
            id=str(index) if id_ is None else id_,
            dataset=dataset,
            question="q",
            response="r",
            confidence=float(s),
            correct=bool(rng.random() < truth(s)),
            tokens_to_confidence=5,
            sample=0 if id_ is None else index,
        )
        for index, s in enumerate(confidences)
    ]


def test_a_map_is_worth_something_where_both_err_alike():
    data = {"over": lambda s: s / 2, "also_over": lambda s: s / 2, "honest": lambda s: s}
    matrix = transfer_matrix([p for i, name in enumerate(data) for p in rows(name, 1500, data[name], seed=i)])
    assert list(matrix) == [STATED, *sorted(data)]
    assert matrix[STATED]["over"] > 0.15
    assert matrix[STATED]["honest"] < 0.05
    for source in ("over", "also_over"):
        for target in ("over", "also_over"):
            assert matrix[source][target] < 0.05
        assert matrix[source]["honest"] > 0.15
    assert matrix["honest"]["over"] > 0.15


def test_no_question_is_recalibrated_by_its_own_label():
    # A coin for each question, thrown once and written down for all ten samples: only a map that has seen a
    # question's other samples can know it.  The stated confidence names the question.
    rng = np.random.default_rng(0)
    coins = rng.random(150) < 0.5
    predictions = [
        p for question in range(150) for p in rows("d", 10, lambda _, q=question: float(coins[q]), id_=str(question),
                                                   stated=(question + 1) / 151)]  # fmt: skip
    [within] = transfer_matrix(predictions)["d"].values()
    assert within > 0.05, "as if the labels were known"


def test_where_no_map_can_be_fitted_there_is_no_figure():
    predictions = [*rows("all_right", 50, lambda s: 1.0), *rows("few", 3, lambda s: s, seed=3), *rows("d", 200, abs)]
    matrix = transfer_matrix(predictions)
    assert all(math.isnan(value) for value in matrix["all_right"].values())
    assert math.isnan(matrix["few"]["few"])
    assert not any(math.isnan(value) for value in [*matrix[STATED].values(), *matrix["d"].values()])
    assert transfer_matrix([]) == {STATED: {}}
