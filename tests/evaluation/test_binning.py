"""Bins: edges on exact decimals, ties kept together, and the table behind a reliability diagram."""

import math
from decimal import Decimal

import numpy as np
import pytest

from coca_mindspeed.evaluation.binning import bin_edges, bin_index, bin_table


def exact_bin(text, bins, closed):
    """The bin by decimal arithmetic; the first (closed on the right) or last (on the left) holds both of its edges."""
    place = Decimal(text) * bins
    return max(0, math.ceil(place) - 1) if closed == "right" else min(bins - 1, math.floor(place))


@pytest.mark.parametrize("closed", ["right", "left"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("bins", "decimals"), [(10, 1), (10, 2), (10, 4), (20, 2), (100, 2), (15, 3), (7, 3)])
def test_every_decimal_lies_in_its_exact_bin(bins, decimals, dtype, closed):
    texts = [f"{k / 10**decimals:.{decimals}f}" for k in range(10**decimals + 1)]
    confidence = np.array([dtype(text) for text in texts])
    index = bin_index(confidence, bin_edges(confidence.dtype, bins), closed)
    assert index.tolist() == [exact_bin(text, bins, closed) for text in texts]


def test_table_by_hand():
    confidence = np.array([0.0, 0.1, 0.95, 1.0, 1.0, np.nan])
    correct = np.array([False, True, True, True, False, True])
    table = bin_table(confidence, correct)
    assert table.count.tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 0, 3]
    assert table.confidence[[0, 9]] == pytest.approx([0.05, 2.95 / 3])
    assert table.accuracy[[0, 9]] == pytest.approx([0.5, 2 / 3])
    assert np.isnan(table.accuracy[1:9]).all()
    assert np.isnan(table.low[1:9]).all()
