"""The plan of a run on verl."""

from collections.abc import Sequence
from pathlib import Path

from coca_mindspeed.config.plan import Plan, Row, file_rows
from coca_mindspeed.verl.checks import ACTOR, MEGATRON, MINI_BATCH, ROLLOUT, TOKENS, VerlRun, verl_problems
from coca_mindspeed.verl.configuration import unknown_keys, verl_configuration
from coca_mindspeed.verl.settings import verl_settings

_FILES = ("data.train_files", "data.val_files", "actor_rollout_ref.model.path")


def make_plan(file: Path, overrides: Sequence[str]) -> Plan:
    """Plan the run of a YAML file on verl, with Hydra's overrides; a run with problems has no rows.

    Raises as :func:`.configuration.verl_configuration`, and ConfigError for a section ``coca`` that cannot be used.
    """
    config = verl_configuration(file, overrides)
    run = VerlRun(config, verl_settings(config))
    problems = (*unknown_keys(config, overrides), *verl_problems(config, run.settings))
    return Plan(f"{file.stem} on verl", () if problems else tuple(_rows(run)), problems=problems)


def _rows(run: VerlRun) -> list[Row]:
    value, devices, nodes = run.value, run.devices, run.value("trainer.nnodes")
    tensor = value(f"{ROLLOUT}.tensor_model_parallel_size")
    method = run.settings.method
    prompts, group, mini = value("data.train_batch_size"), value(f"{ROLLOUT}.n"), value(MINI_BATCH)
    responses, stages = prompts * group, method.training_method.stages
    engine = f"FSDP over {run.ranks} ranks"
    if run.megatron:
        tp, pp = (value(f"{MEGATRON}.{kind}_model_parallel_size") for kind in ("tensor", "pipeline"))
        engine = f"Megatron, TP {tp}, PP {pp}, DP {run.ranks}"
    microbatch = value(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    new_tokens = responses * value("data.max_response_length")
    steps = value("trainer.total_training_steps")
    length = f"{steps} steps" if steps else f"epochs: {value('trainer.total_epochs')}"
    return [
        ("method", f"{method.name}, loss aggregation {method.loss_aggregation}"),
        ("learning rate", f"{value(f'{ACTOR}.optim.lr'):g}"),
        *file_rows({key: path for key in _FILES if isinstance(path := value(key), str)}),
        ("devices", f"{devices} on {nodes} node{'s' * (nodes > 1)}"),
        ("training", f"{engine}, {responses // run.ranks} responses of a step on each rank"),
        ("trainer", run.trainer),
        ("rollout", f"{run.rollout_devices // tensor} engines of tensor parallel size {tensor}"),
        ("a step", f"{prompts} questions x {group} responses = {responses}"),
        ("updates a step", f"{prompts // mini * value(f'{ACTOR}.ppo_epochs')} of {mini} questions"),
        ("microbatches", f"up to {value(TOKENS)} tokens" if run.dynamic else f"of {microbatch}"),
        ("tokens", f"{run.longest} a sequence at most; {new_tokens:,} new ones a step"),
        ("length", length + (f", shared by {' and '.join(stages)}" if len(stages) > 1 else "")),
    ]
