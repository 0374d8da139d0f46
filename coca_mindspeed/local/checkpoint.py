"""Atomic checkpoints.

A checkpoint is a directory ``step_000100`` with ``model/`` (Hugging Face format, safetensors) or ``adapters/`` (peft's
format), and ``optimizer.pt`` (read with ``weights_only``).  It is written under a temporary name, flushed to disk and
renamed, so a kill at any moment never leaves a partial checkpoint.
"""

import copy
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from coca_mindspeed.errors import ConfigError, TrainingError
from coca_mindspeed.local.policy import Policy, merged_weights, save_adapters
from coca_mindspeed.local.run_directory import Checkpoint, list_checkpoints
from coca_mindspeed.scoring.best import BestValue
from coca_mindspeed.utils.files import naming, whole_directory


def load_optimizer_state(checkpoint: Checkpoint, device: torch.device) -> dict[str, Any]:
    """Read the optimizer's state without executing code from the file; raises TrainingError if it is damaged."""
    file = checkpoint.path / "optimizer.pt"
    try:
        state: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:
        # torch raises many kinds, and its own message would advise to load the file unsafely.
        raise TrainingError(
            f"{file}: is damaged or not an optimizer's state; remove {checkpoint.path} to resume from an older one"
        ) from error
    return state


def save_model(policy: Policy, directory: Path) -> None:
    """Write the model, adapters merged, and its tokenizer as a Hugging Face directory."""
    merged = {} if policy.adapters is None else {"state_dict": merged_weights(policy)}
    policy.model.save_pretrained(directory, safe_serialization=True, **merged)
    if merged:  # transformers names the dtype of the frozen base
        config = copy.copy(policy.model.config)
        config.dtype = torch.float32
        config.save_pretrained(directory)
    policy.tokenizer.save_pretrained(directory)


def check_saveable(policy: Policy, where: str) -> None:
    """Refuse files that transformers loads but cannot save: ConfigError names the file; ``where`` names the model."""
    with tempfile.TemporaryDirectory() as directory:
        file = "its model's config.json or generation_config.json"
        try:
            policy.model.save_pretrained(directory, safe_serialization=True, state_dict={})
            file = "its tokenizer"
            policy.tokenizer.save_pretrained(directory)
        except Exception as error:  # of every kind: configurations and tokenizers may be the model's own code
            raise ConfigError(
                f"{where}: {file} can be loaded but not saved, so no checkpoint could be written: {error}; correct it"
            ) from error


def export_model(policy: Policy, directory: Path) -> None:
    """Replace ``directory`` atomically by the policy in Hugging Face format."""
    with whole_directory(directory) as writing:
        save_model(policy, writing)


def export_best(best: BestValue, step: int, policy: Policy, metrics: Mapping[str, float]) -> None:
    """Replace the best model by that of ``step``; raises TrainingError if it cannot be written."""
    try:
        with best.replace(step, metrics) as writing:
            save_model(policy, writing)
    except Exception as error:  # safetensors raises errors of its own
        raise TrainingError(f"step {step}: {best.directory} could not be written: {error}") from error


def save_checkpoint(
    directory: Path, step: int, policy: Policy, optimizer: torch.optim.Optimizer, keep: int
) -> Checkpoint:
    """Write a checkpoint, then remove all but the newest ``keep``; TrainingError if it cannot be written."""
    path = directory / f"step_{step:06d}"
    try:
        with whole_directory(path) as writing:
            if policy.adapters is None:
                save_model(policy, writing / "model")
            else:
                save_adapters(policy, writing / "adapters")
            # With a name instead of a file, torch's error of a full disk speaks of positions.
            with naming(path / "optimizer.pt"), (writing / "optimizer.pt").open("wb") as file:
                torch.save(optimizer.state_dict(), file)
    # safetensors and torch raise errors of their own, with the system's message inside.
    except Exception as error:
        reason = f"step {step}: the checkpoint {path} could not be written: {error}"
        raise TrainingError(f"{reason}; {resume_hint(directory)}") from error
    _prune(directory, keep)
    return Checkpoint(path, step)


def resume_hint(directory: Path) -> str:
    """How to continue after a failure, by the checkpoints in ``directory``."""
    if saved := list_checkpoints(directory):
        return f"the last good checkpoint is {saved[-1].path}; continue with --resume"
    return "no checkpoint was written before it, so the run has to start again"


def _prune(directory: Path, keep: int) -> None:
    for old in list_checkpoints(directory)[:-keep]:
        # Renamed first: a kill in the middle of the removal must not leave half a checkpoint under a good name.
        doomed = old.path.with_name(f".removing_{old.step:06d}")
        try:
            shutil.rmtree(doomed, ignore_errors=True)
            old.path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise TrainingError(
                f"{old.path}: an old checkpoint cannot be removed: {error.strerror}; the new one is saved"
            ) from error
