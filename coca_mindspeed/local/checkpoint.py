"""Checkpoints that are whole or absent.

A checkpoint is a directory ``step_000100`` with ``model/`` (a plain Hugging Face directory, safetensors),
``optimizer.pt`` (read back with ``weights_only``) and ``state.json``.  It is written under a temporary name, flushed
to disk and renamed, so a kill at any moment leaves the previous ones untouched and never half of a new one.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.files import fsync_directory, write_json
from coca_mindspeed.local.policy import Policy

_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk; ``step`` updates of the policy have gone into it."""

    path: Path
    step: int

    @property
    def model(self) -> Path:
        """A plain Hugging Face directory."""
        return self.path / "model"

    def optimizer_state(self, device: torch.device) -> dict[str, Any]:
        """The optimizer's state, read without running any code of the file.

        Raises:
            TrainingError: the file is damaged.
        """
        file = self.path / "optimizer.pt"
        try:
            state: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
        except Exception as error:
            # torch raises many kinds, and its own message would advise to load the file unsafely.
            raise TrainingError(
                f"{file}: is damaged or not an optimizer's state; remove {self.path} to resume from an older one"
            ) from error
        return state

    def state(self) -> dict[str, Any]:
        """What else the trainer needs to go on."""
        content: dict[str, Any] = json.loads((self.path / "state.json").read_text(encoding="utf-8"))
        return content


def list_checkpoints(directory: Path) -> list[Checkpoint]:
    """Whole checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    found = [Checkpoint(path, int(match[1])) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def save_model(policy: Policy, directory: Path) -> None:
    """Write the model and its tokenizer as a plain Hugging Face directory (safetensors)."""
    policy.model.save_pretrained(directory, safe_serialization=True)
    policy.tokenizer.save_pretrained(directory)


def export_model(policy: Policy, directory: Path) -> None:
    """Replace ``directory`` by the policy, as a plain Hugging Face directory; never half of it."""
    temporary = directory.with_name(f".{directory.name}.writing")
    _write_whole(temporary, directory, lambda: save_model(policy, temporary))


def save_checkpoint(
    directory: Path,
    step: int,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    keep: int,
) -> Checkpoint:
    """Write a checkpoint, then remove all but the newest ``keep``.

    Raises:
        TrainingError: it could not be written (a full disk, say); the ones before it are untouched, and named.
    """
    path = directory / f"step_{step:06d}"
    temporary = directory / f".writing_{step:06d}"

    def write() -> None:
        save_model(policy, temporary / "model")
        torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
        write_json(temporary / "state.json", {"step": step, **state})

    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write_whole(temporary, path, write)
    # safetensors and torch raise errors of their own, with the system's message inside.
    except Exception as error:
        before = list_checkpoints(directory)
        last = f"the last good one is {before[-1].path}" if before else "there is none before it"
        raise TrainingError(f"step {step}: the checkpoint {path} could not be written: {error}; {last}") from error
    for old in list_checkpoints(directory)[:-keep]:
        # Renamed first: a kill in the middle of the removal must not leave half a checkpoint under a good name.
        doomed = old.path.with_name(f".removing_{old.step:06d}")
        shutil.rmtree(doomed, ignore_errors=True)
        old.path.rename(doomed)
        shutil.rmtree(doomed)
    return Checkpoint(path, step)


def remove_leftovers(directory: Path) -> None:
    """Remove what a killed run left half-written or half-removed."""
    if directory.is_dir():
        for path in directory.iterdir():
            if path.name.startswith((".writing_", ".removing_")):
                shutil.rmtree(path)


def checkpoint_bytes(policy: Policy) -> int:
    """Size of one checkpoint: float32 weights and AdamW's two moments."""
    return sum(3 * p.numel() * p.element_size() for p in policy.model.parameters())


def _write_whole(temporary: Path, final: Path, write: Any) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write()
        for root, _, files in os.walk(temporary):
            for name in files:
                with (Path(root) / name).open("rb") as file:
                    os.fsync(file.fileno())
            fsync_directory(Path(root))
        replaced = final.with_name(f".replaced_{final.name}")
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        temporary.rename(final)
        fsync_directory(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
