"""One small run from start to end for all tests; a test that goes on with it takes a copy."""

import pytest

from tests.local.runs_for_tests import FINISHED, train


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    output = tmp_path_factory.mktemp("finished")
    train(output, *FINISHED)
    return output
