"""Checkouts that the environment names."""

import pytest

from coca_mindspeed.mindspeed.start.driver import CHECKOUTS


@pytest.fixture
def homes(tmp_path, monkeypatch):
    """Variable -> folder of a checkout, empty but for its package."""
    for variable, package in CHECKOUTS.items():
        (tmp_path / variable / package).mkdir(parents=True)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    return {variable: tmp_path / variable for variable in CHECKOUTS}
