"""One small demo from start to end for all tests; a test that changes it takes a copy."""

from pathlib import Path

import pytest

from coca_mindspeed.cli import main
from tests.local.runs_for_tests import SMALL


def run_demo(output: Path) -> Path:
    """A demo of seed 1, without the report's pictures."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("coca_mindspeed.local.report.draw_plots", lambda *_: ("", {}))
        assert main(["demo", "--seed", "1", "--output", str(output), "--quiet", *SMALL]) == 0
    return output


@pytest.fixture(scope="session")
def finished_demo(tmp_path_factory):
    return run_demo(tmp_path_factory.mktemp("finished") / "demo")
