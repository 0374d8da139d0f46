"""Models that vLLM's build for CPUs can serve, and the fixtures of the other tests of the port."""

import functools

import pytest

from tests.integration.mindspeed import tiny
from tests.integration.mindspeed.conftest import _one_thread, ray_directory
from tests.integration.mindspeed_vllm import models

__all__ = ["_one_thread", "folder_of", "ray_directory"]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """A folder with a model and questions for each of :data:`models.MODELS`, made when first asked for."""
    root = tmp_path_factory.mktemp("warm")

    @functools.cache
    def folder(name, *, warm):
        directory = root / f"{name.replace(' ', '-')}-{'warm' if warm else 'untrained'}"
        (directory / "model").mkdir(parents=True)
        config, symbols = models.MODELS[name](), tiny.VOCABULARY_OF_64
        tiny.write_model(directory / "model", warm_up_steps=300 if warm else 0, config=config, symbols=symbols)
        tiny.write_questions(directory)
        return directory

    return folder
