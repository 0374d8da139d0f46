"""Starts of the command line that must fail, or work, on a model of one's own."""

import json
from pathlib import Path

from coca_mindspeed.cli import main
from coca_mindspeed.local import run as session_module

QUESTIONS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(6)]
HELD_OUT = [{"question": f"What is {i} + {i} in all?", "answer": str(2 * i)} for i in range(6)]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def arguments(directory: Path, model: Path, *more: str) -> list[str]:
    for name, rows in (("train", QUESTIONS), ("heldout", HELD_OUT)):
        if not (directory / f"{name}.jsonl").exists():
            write_rows(directory / f"{name}.jsonl", rows)
    return [
        *("train", "local", f"model.path={model}", f"data.train={directory}/train.jsonl", "data.grader=exact"),
        *(f"data.evaluate={directory}/heldout.jsonl", "rollout.prompts=2", "rollout.group_size=2"),
        *("rollout.max_new_tokens=8", "trainer.steps=1", "trainer.device=cpu", "model.compute_dtype=float32"),
        *("trainer.minibatches=1", "logging.tensorboard=false", "evaluation.interval=0", "trainer.threads=1"),
        *("evaluation.preflight=0", "evaluation.final_questions=0"),  # the report's pictures take seconds
        *("--output", str(directory / "run"), "--quiet", *more),
    ]


def refused(directory: Path, model: Path, capsys, monkeypatch, *more: str) -> str:
    """The message of a start that must fail before any weight is read, and write nothing."""

    def load(*_, **__):
        raise AssertionError("the model was loaded")

    with monkeypatch.context() as patched:
        patched.setattr(session_module, "load_policy", load)
        assert main(arguments(directory, model, *more)) == 1
    assert not (directory / "run").exists()
    return capsys.readouterr().err


def set_config(model: Path, directory: Path, **values) -> Path:
    """A copy of ``model`` with other settings in its config.json."""
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **values}))
    return directory
