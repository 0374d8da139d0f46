"""``coca-mindspeed check`` of a run for this machine: what it needs of the device's memory, before it is loaded."""

import sys
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from coca_mindspeed.config.model_size import GIB
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.memory import NotEstimatedError
from coca_mindspeed.local.memory_check import MemoryCheck, check_memory, memory_problems
from coca_mindspeed.local.model_files import read_model_config
from coca_mindspeed.local.optimizer import require_optimizer
from coca_mindspeed.local.policy import choose_device
from coca_mindspeed.local.sft import sft_microbatch_tokens
from coca_mindspeed.local.tiny_model import tiny_config
from coca_mindspeed.utils.console import PlainConsole, print_text

_MOMENTS = {"adamw": "float32", "adamw_8bit": "a byte each, with scales; the embedding's float32"}


def check_local(config: RunConfig, name: str, *, quiet: bool) -> None:
    """Print the plan of a run of the local engine.

    Raises:
        ConfigError: the model's shape cannot be read, or the run does not fit; it says what would.
    """
    device = choose_device(config.trainer.device)
    require_optimizer(config.optimizer, device)
    if config.model.path is None:
        architecture = tiny_config()
    else:
        architecture = read_model_config(Path(config.model.path), config.model)
    try:
        check = check_memory(config, architecture, device)
    except NotEstimatedError as error:
        check = None
        print_text(f"warning: {error}", sys.stderr)
    if not quiet:
        if check is not None:
            _print(check, config, name, str(device))
        for stage in _supervised(config):
            print_text(f"before the training, in passes of at most {sft_microbatch_tokens(config):,} tokens: {stage}")
    problems = [] if check is None else memory_problems(check, config, architecture)
    if problems:
        reasons = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(f"{name} does not fit:\n{reasons}")


def _print(check: MemoryCheck, config: RunConfig, name: str, device: str) -> None:
    run = check.run
    prompt, response = config.rollout.max_prompt_tokens, config.rollout.max_new_tokens
    table = Table("", "GiB", "", title=f"memory of {name} on {device}", title_justify="left")
    trained = "all of them trained" if run.trained == run.parameters else f"{run.trained:,} of them trained"
    rows = [
        ("weights", run.weights, f"{run.parameters:,} parameters, {trained}"),
        ("gradients", run.gradients, "during the update"),
        ("moments", run.moments, f"AdamW's two, {_MOMENTS[config.optimizer.name]}"),
        ("activations and logits", run.update, "of the largest microbatch, at its most"),
        *([("optimizer's step", run.step, "at its most, when activations are gone")] if run.step else []),
        ("update, together", run.update_peak, ""),
        ("keys and values", run.cache, "when the longest responses end, with the room for more"),
        ("sampling in all", run.rollout, "keys and values, logits, one of their moves"),
        ("rollout, together", run.rollout_peak, "with weights and moments"),
        *([("export, together", run.export_peak, "the merged model, float32")] if run.merged else []),
        ("process", check.process, "Python and the libraries"),
        ("device", check.device, "whole, whatever others hold of it now"),
    ]
    for label, size, note in rows:
        table.add_row(label, f"{size / GIB:.2f}", note, style="bold" if label.endswith("together") else None)
    PlainConsole().print_table(table)
    print_text(f"for prompts of {prompt} and responses of {response} tokens, the longest that the configuration allows")


def _supervised(config: RunConfig) -> Iterator[str]:
    lessons, start = config.warm_up, config.confidence_start
    if lessons.records is not None:
        yield f"warm_up, {lessons.steps} updates of {lessons.batch} responses to {lessons.records}"
    if start.questions:
        yield (
            f"confidence_start, {start.questions} questions asked {config.rollout.group_size} times each, then "
            f"{start.steps} updates of {start.batch} responses"
        )
