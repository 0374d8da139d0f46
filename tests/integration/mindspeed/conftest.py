"""What several modules of tests start from."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.integration.mindspeed import tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Two threads on a tiny model wait for each other, and for whatever else runs beside them."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """A folder with a warmed-up model and questions; to be copied for every run."""
    return _warmed_up(tmp_path_factory.mktemp("warm"))


@pytest.fixture(scope="session")
def warm_thinking(tmp_path_factory):
    """The same, of a model that thinks before it answers."""
    return _warmed_up(tmp_path_factory.mktemp("warm_thinking"), thinking=True)


def _warmed_up(directory, **how):
    (directory / "model").mkdir()
    tiny.write_model(directory / "model", warm_up_steps=300, **how)
    tiny.write_questions(directory)
    return directory


@pytest.fixture
def ray_directory():
    """Ray's sockets need a short path of their own."""
    directory = Path(f"/tmp/coca-ray-{os.getpid()}")
    yield str(directory)
    shutil.rmtree(directory, ignore_errors=True)
