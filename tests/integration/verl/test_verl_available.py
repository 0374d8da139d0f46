"""Says in the test report that the other tests of this folder were skipped, and why."""

import importlib.util

import pytest


def test_verl_is_here():
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not in this environment; its tests run with `make test-verl`")
