"""Nightly and published tests run where ``-m`` names one of them."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.nightly
def test_long(): pass

@pytest.mark.published
@pytest.mark.parametrize("file", "ab")
def test_file(file): pass
"""


@pytest.mark.parametrize(
    ("arguments", "passed", "deselected"),
    [((), 1, 3), (("-m", "not slow"), 1, 3), (("-m", "nightly"), 1, 3), (("-m", "nightly or not nightly"), 4, 0)],
)
def test_which_tests_run(pytester, arguments, passed, deselected):
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nmarkers =\n  nightly\n  published\n  slow")
    pytester.runpytest("-p", "no:cacheprovider", *arguments).assert_outcomes(passed=passed, deselected=deselected)
