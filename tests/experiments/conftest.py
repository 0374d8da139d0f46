"""Experiments are finished: ``make test`` runs the smoke test of them, and the nightly tests the others."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before the nightly tests are taken out
def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents and item.path.stem != "test_smoke" and not item.get_closest_marker("published"):
            item.add_marker(pytest.mark.nightly)
