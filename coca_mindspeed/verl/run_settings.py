"""Which run the checkpoints of a directory belong to, so that another method does not go on from them."""

import json
import math
from pathlib import Path
from typing import Any

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.files import write_json
from coca_mindspeed.verl.settings import VerlSettings

FILE = "coca.json"
#: verl's own file, which names the newest of a directory's checkpoints.
VERLS_NEWEST = "latest_checkpointed_iteration.txt"


def check_length(total_steps: int, steps_per_epoch: int, epochs: int) -> None:
    """Refuse more steps than epochs: the loop of verl ends with the last epoch.

    It would then make no last checkpoint and no last validation, and leave a method's last stage out.

    Args:
        total_steps: that the run is to have.
        steps_per_epoch: whole batches of the training questions.
        epochs: ``trainer.total_epochs``.

    Raises:
        ConfigError: there are fewer.
    """
    if total_steps > (reached := steps_per_epoch * epochs):
        needed = math.ceil(total_steps / steps_per_epoch)
        raise ConfigError(
            f"trainer.total_training_steps: {total_steps}, and trainer.total_epochs={epochs} of {steps_per_epoch} "
            f"steps each end after {reached}; set trainer.total_epochs to {needed} or more"
        )


def check_same_run(directory: Path, settings: VerlSettings, total_steps: int, resumed_step: int) -> None:
    """Compare with what is written beside the checkpoints, and write it for the next time.

    Args:
        directory: ``trainer.default_local_dir``.
        settings: of this run.
        total_steps: of this run; where a method has stages, they share it.
        resumed_step: 0 where the run starts afresh; then what is written there is replaced, unless checkpoints lie
            there still, which the next start would take for this run's.

    Raises:
        ConfigError: the checkpoints are those of another method, or of other choices.
    """
    ours: dict[str, Any] = settings.method.model_dump(mode="json")
    if len(settings.method.training_method.stages) > 1:
        ours["total_training_steps"] = total_steps
    path = directory / FILE
    if path.is_file() and (resumed_step or (directory / VERLS_NEWEST).is_file()):
        theirs = json.loads(path.read_text(encoding="utf-8"))
        if changed := sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)):
            was = ", ".join(f"{key} {theirs.get(key)!r} -> {ours.get(key)!r}" for key in changed)
            raise ConfigError(
                f"{directory}: its checkpoints were trained otherwise ({was}); change trainer.default_local_dir, or "
                "remove the directory"
            )
    directory.mkdir(parents=True, exist_ok=True)
    write_json(path, ours)
