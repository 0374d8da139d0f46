"""These tests run in verl's own environment (`make test-verl`)."""

import importlib.util

import pytest

# Without verl nothing here can even be imported.
collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Two threads on a tiny model wait for each other, and for whatever else runs beside them."""
    if importlib.util.find_spec("verl"):
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """A folder with a warmed-up model and questions, to be read from."""
    return _warmed_up(tmp_path_factory.mktemp("warm"), thinking=False)


@pytest.fixture(scope="session")
def warm_thinking(tmp_path_factory):
    """The same, of a model that thinks before it answers."""
    return _warmed_up(tmp_path_factory.mktemp("warm_thinking"), thinking=True)


def _warmed_up(directory, *, thinking):
    from tests.integration.verl import tiny

    tiny.write_model(directory / "model", warm_up_steps=300 if thinking else 200, thinking=thinking)
    tiny.write_questions(directory, "coca", train=400, evaluate=24, thinking=thinking)
    return directory
