"""A model of a run, or an exported one: its directory, and the form of the prompts that it was trained with."""

from pathlib import Path

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.prompt_form import PROMPT_FILE, TrainedPrompt, prompt_file, read_prompt_file
from coca_mindspeed.errors import CocaError, ConfigError
from coca_mindspeed.local.run_directory import list_checkpoints
from coca_mindspeed.utils.console import print_note
from coca_mindspeed.utils.custom_code import is_custom
from coca_mindspeed.utils.directories import is_ours, run_of_model

FORM_HELP = f"run, exported model or its {PROMPT_FILE}, whose form of a prompt is sent"


def model_directory(path: Path) -> Path:
    """The model of a run, or of its newest checkpoint, with a note, if the run was stopped; any other path itself.

    Raises ConfigError for a checkpoint that holds adapters only.
    """
    if not is_ours(path, "run"):
        return path
    model = path / "model"
    if not model.exists() and (checkpoints := list_checkpoints(path / "checkpoints")):
        newest = checkpoints[-1]
        model = newest.model
        if not model.is_dir():
            reason = "holds adapters, and no whole model; finish the run with --resume, which writes one"
            raise ConfigError(f"{newest.path}: {reason}")
        print_note(f"note: {path}: the run is not finished; its model is that of step {newest.step}")
    return model


def trained_prompt_of(path: Path, *, custom_code: bool = False) -> TrainedPrompt | None:
    """Read the file of ``path`` (see :func:`.prompt_file`); None for a model without one that is not of a run.

    Runs of earlier versions have no file: their questions are read again, and without them no instruction is known; one
    by a method of its author's own is read with ``custom_code`` only.

    Raises ConfigError if the file or the run's configuration cannot be used.
    """
    if (file := prompt_file(path)) is not None:
        return read_prompt_file(file)
    run = path if is_ours(path, "run") else run_of_model(path)
    if run is None or not (run / "config.yaml").is_file():
        return None
    from coca_mindspeed.local.inputs import load_data, trained_prompt

    config = compose_run(str(run / "config.yaml")).run
    if is_custom(config.method.name) and not custom_code:
        return None
    try:
        return trained_prompt(config, load_data(config.data)[0])
    except CocaError as error:  # the file is gone, or a package that reads it is not installed
        print_note(f"warning: {run}: the questions that it was trained on cannot be read: {error}")
        return trained_prompt(config, [])


def require_trained_prompt(path: Path, option: str) -> TrainedPrompt:
    """:func:`trained_prompt_of` the ``path`` of an ``option``; ConfigError if there is none."""
    if (trained := trained_prompt_of(path)) is None:
        expected = f"a finished run, an exported model or its {PROMPT_FILE}"
        raise ConfigError(f"{option} {path}: expected {expected}, found {'neither' if path.exists() else 'nothing'}")
    return trained
