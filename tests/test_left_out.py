"""Nightly and published tests run where ``-m`` names one of them; a plain run counts them, and seconds by folder."""

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


SKIPPED = "import pytest\n\n@pytest.mark.parametrize('n', [1, 2])\ndef test_skipped(n): pytest.skip('no device')\n"
COUNTED = ["1 nightly tests left out: make test-nightly", "2 published tests left out: make test-published"]
FOLDERS = [" *.?  a", " *.?  b"]


@pytest.mark.parametrize(
    ("arguments", "passed", "shown"),
    [
        ((), 2, [*FOLDERS, *COUNTED]),
        (("-n", "1"), 2, [*FOLDERS, *COUNTED]),
        (("-m", "nightly"), 1, []),
        (("-m", "nightly or not nightly"), 5, FOLDERS),
    ],
)
def test_which_tests_run(pytester, arguments, passed, shown):
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    for folder, tests in (("a", TESTS), ("b", "def test_other(): pass")):
        (pytester.mkdir(folder) / f"test_{folder}.py").write_text(tests)
    pytester.makeini("[pytest]\nmarkers =\n  nightly\n  published\n  slow")
    ran = pytester.runpytest("-p", "no:cacheprovider", *arguments)
    ran.assert_outcomes(passed=passed)
    ran.stdout.fnmatch_lines_random(shown)
    for line in {*FOLDERS, *COUNTED} - {*shown}:
        ran.stdout.no_fnmatch_line(line)


@pytest.mark.parametrize("arguments", [(), ("-n", "1")])
def test_skipped_tests_are_counted_by_reason(pytester, arguments):
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(test_a=SKIPPED, test_b=f"{SKIPPED}\npytest.skip('no model', allow_module_level=True)\n")
    pytester.makeini("[pytest]\nmarkers =\n  nightly\n  published\n  slow")
    shown = pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments).stdout
    shown.fnmatch_lines(["2 skipped: no device"])
    shown.fnmatch_lines(["1 skipped: no model"])
