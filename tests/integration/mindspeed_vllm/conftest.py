"""Models that vLLM's build for CPUs can serve, and the fixtures of the other tests of the port."""

from pathlib import Path

import pytest

from tests.integration.mindspeed import tiny
from tests.integration.mindspeed.conftest import _one_thread, ray_directory
from tests.integration.mindspeed_vllm import models

__all__ = ["_one_thread", "folder_of", "ray_directory"]


class Folders:
    """A folder with a model and questions for each of :data:`models.MODELS`, made when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, name: str, *, warm: bool) -> Path:
        directory = self._root / f"{name.replace(' ', '-')}-{'warm' if warm else 'untrained'}"
        if not directory.exists():
            (directory / "model").mkdir(parents=True)
            config, symbols = models.MODELS[name](), tiny.VOCABULARY_OF_64
            tiny.write_model(directory / "model", warm_up_steps=300 if warm else 0, config=config, symbols=symbols)
            tiny.write_questions(directory)
        return directory


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("warm"))
