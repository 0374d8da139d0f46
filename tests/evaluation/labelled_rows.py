"""Labelled predictions whose truth is known."""

import numpy as np

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
