"""From a composed run to the YAML file that the driver reads: MindSpeed-RL's sections, resolved, for one stage.

The file is kept beside the checkpoints, so that what ran can be read afterwards.
"""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from coca_mindspeed.algorithm.rewards import training_method
from coca_mindspeed.config.plan import Plan
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.files import write_atomically

TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's: the iteration of the newest whole checkpoint


@dataclass(frozen=True, slots=True)
class StageFiles:
    """Where one stage of a run writes; a method with one stage has stage 0 only."""

    output: Path
    stage: int = 0

    @property
    def checkpoints(self) -> Path:
        return self.output / f"stage{self.stage}" / "checkpoints"

    @property
    def results(self) -> Path:
        """Samples, validations and ``metrics.jsonl``."""
        return self.output / f"stage{self.stage}"

    def finished_iterations(self) -> int:
        """Iterations that the newest checkpoint has behind it; 0 without one.

        Raises:
            ConfigError: Megatron's tracker holds something else.
        """
        return checkpoint_iteration(self.checkpoints) or 0


def checkpoint_iteration(directory: Path) -> int | None:
    """The iteration that Megatron's tracker file names, or None where there is none or a converted model's.

    Raises:
        ConfigError: the file holds something else.
    """
    tracker = directory / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8").strip()
    if text == "release":  # what a converter writes
        return None
    if not text.isdecimal():
        raise ConfigError(f"{tracker}: expected an iteration's number, found {text!r}")
    return int(text)


def mindspeed_values(run: RunConfig, plan: Plan, files: StageFiles, *, resume: bool = False) -> dict[str, Any]:
    """MindSpeed-RL's sections for one stage, with what is derived from the data and from where the run stands.

    Args:
        run: the run.
        plan: its plan, without problems.
        files: where the stage writes.
        resume: load the newest checkpoint of this stage with its optimizer, instead of the initial weights.

    Raises:
        ConfigError: there is no such stage, no checkpoint to resume from or to start the second stage with, or the
            number of iterations is not known.
    """
    stages = training_method(run.method.name).stages
    if files.stage >= len(stages):
        raise ConfigError(f"--stage {files.stage}: method {run.method.name} has stages 0 to {len(stages) - 1}")
    if plan.iterations is None:
        raise ConfigError(
            f"data.epochs={run.data.epochs}: the number of questions is not known; prepare {run.data.train}, or set "
            "data.rows, or data.epochs=null and trainer.steps"
        )
    values = deepcopy(run.mindspeed_rl)
    training, actor = values.setdefault("megatron_training", {}), values["actor_config"]
    training["train_iters"] = plan.iterations
    actor["lr_warmup_fraction"] = run.optimizer.warmup_steps / plan.iterations
    actor["save"] = str(files.checkpoints)
    if run.logging.wandb is not None:
        names = {"wandb_project": run.logging.wandb, "wandb_exp_name": files.output.name}
        values["rl_config"] |= {**names, "wandb_save_dir": str(files.results)}
    coca = values.setdefault("coca", {})
    coca |= {"stage": files.stage, "output_dir": str(files.results)}
    if resume:
        if checkpoint_iteration(files.checkpoints) is None:
            raise ConfigError(f"--resume: {files.checkpoints} holds no checkpoint")
        actor |= {"load": str(files.checkpoints), "finetune": False, "no_load_optim": False, "no_load_rng": False}
    elif files.stage > 0:
        before = StageFiles(files.output, files.stage - 1).checkpoints
        actor["load"] = str(before)
    return values


def write_run_file(path: Path, values: dict[str, Any], name: str) -> None:
    """Write ``values`` as YAML; whole or not at all."""
    heading = f"# MindSpeed-RL's configuration of the run {name}, written by coca-mindspeed check.\n"
    write_atomically(path, heading + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=110))
