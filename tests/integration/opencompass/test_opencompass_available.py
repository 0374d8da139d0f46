"""Says in every test report whether the OpenCompass tests ran."""

import importlib.util

import pytest


def test_opencompass_is_installed():
    if importlib.util.find_spec("opencompass") is None:
        pytest.skip("OpenCompass has an environment of its own: run `make test-opencompass`")
