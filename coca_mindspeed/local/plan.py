"""The plan of a run of the local engine: its steps, and its memory by formula."""

from collections.abc import Iterator
from pathlib import Path

from coca_mindspeed.config.plan import Part, Phase, Plan, Row, batch_rows, evaluations
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.local.memory import MemoryEstimate, estimate_memory, free_bytes, memory_problems
from coca_mindspeed.local.model_files import TINY_MODEL, Shapes, read_model_config, trained_bytes, weight_shapes
from coca_mindspeed.local.policy import choose_device
from coca_mindspeed.local.sft import sft_microbatch_tokens
from coca_mindspeed.local.tiny_model import tiny_config
from coca_mindspeed.utils.process import GIB

_FORMULA = (
    "formula for prompts of {} and responses of {} tokens, the longest; Python and its libraries come on top "
    "(docs/training.md, Memory)"
)


def make_plan(config: RunConfig, name: str = "a run") -> Plan:
    """Plan a run whose configuration :func:`.validation.read_inputs` has completed: its model is here, its steps known.

    The problems are those of its memory.  Raises ConfigError for a device or a model that cannot be used.
    """
    device, path, rollout = choose_device(config.trainer.device), config.model.path, config.rollout
    architecture = tiny_config() if path is None else read_model_config(Path(path), config.model)
    shapes = TINY_MODEL if path is None else weight_shapes(Path(path))
    need, room = estimate_memory(config, architecture, shapes, device), free_bytes(device)
    return Plan(
        f"{name} on {device}",
        tuple(_rows(config, shapes)),
        _memory(need, room),
        (_FORMULA.format(rollout.max_prompt_tokens, rollout.max_new_tokens),),
        () if path is None else tuple(memory_problems(config, need, room)),
    )


def _rows(config: RunConfig, shapes: Shapes) -> Iterator[Row]:
    data, rollout, trainer, warm_up = config.data, config.rollout, config.trainer, config.warm_up
    yield "method", config.method.name
    yield "learning rate", f"{config.optimizer.lr:g}"
    files = {"data.train": data.train, "data.evaluate": data.evaluate, "model.path": config.model.path}
    yield from ((key, path) for key, path in files.items() if path is not None)
    if warm_up.records is not None:
        stage = f"warm_up, {warm_up.steps} updates of {warm_up.batch} responses to {warm_up.records}"
        yield "before training", f"{stage}, at most {sft_microbatch_tokens(config):,} tokens a pass"
    mini_batch = rollout.prompts // trainer.minibatches
    yield from batch_rows("step", rollout.prompts, rollout.group_size, mini_batch, trainer.ppo_epochs)
    of_prompts = f"{trainer.microbatch_prompts or mini_batch} prompts"
    tokens = trainer.microbatch_tokens
    yield "microbatches", of_prompts if tokens is None else f"up to {tokens} tokens"
    yield "tokens", f"{rollout.max_prompt_tokens} + {rollout.max_new_tokens} at most"
    yield "length", f"{trainer.steps} steps per stage"
    yield "evaluation while training", evaluations(config, "steps")
    interval, size = config.checkpoint.interval, sum(trained_bytes(shapes, config.model.lora, config.optimizer.name))
    when = f"every {interval} steps" if interval else "at the last step"
    yield "checkpoints", f"{size / 1e6:,.0f} MB {when}, the newest {config.checkpoint.keep} are kept"


def _memory(need: MemoryEstimate, room: int) -> tuple[Phase, ...]:
    """The two phases of a step, which take turns in ``room`` bytes."""
    kept = [Part(name, getattr(need, name)) for name in ("weights", "moments", "logits")]
    update = [*kept, Part("gradients", need.gradients), Part("activations", need.activations)]
    if need.decoder:
        update.append(Part("buffers of decoding", need.decoder, "kept for the next rollout"))
    sampling = [*kept, Part("KV cache", need.cache, "at the end of the longest responses")]
    limit = room / GIB
    return Phase("update", tuple(update), limit), Phase("rollout", tuple(sampling), limit)
