"""What a run for a cluster means before it runs: layout, batches, iterations, memory, and why it could not run."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from coca_mindspeed.config.schema import ConfidenceStartConfig, LoraConfig, RunConfig, WarmUpConfig
from coca_mindspeed.config.steps import steps_of_epochs, training_rows
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.plan.conditions import needs_reference
from coca_mindspeed.mindspeed.plan.memory import MemoryPlan, memory_plan
from coca_mindspeed.mindspeed.plan.resolved_config import KEYS, RunFacts, read_facts
from coca_mindspeed.mindspeed.plan.rules import violations

_SHOWN = 3  # nearest values that a message names
_FIXED = {  # values that MindSpeed-RL or the method allows alone
    "bf16": True,
    "rollout_dtype": "bfloat16",
    "reset_attention_mask": True,
    "no_pad_to_seq_lengths": True,
    "remove_padding": True,
    "sampling_seed": None,
    "top_k": -1,
    "top_p": 1.0,
    "min_p": 0.0,
    "rollout_pp": 1,
    "temperature": 1.0,
}

_EMBEDDED = "the embedded data is not trained on here"
_WARM_UP = "warm the model up with the local engine first, and name its warm_start as model.path"
_START = "start the confidences with the local engine first, and name its confidence_start/model as model.path"
_LOCAL_ENGINE = {  # keys of ours that no key of MindSpeed-RL's is taken from -> what there is instead
    "model.attention": "here it is mindspeed_rl.megatron_training.use_flash_attn",
    "model.gradient_checkpointing": f"here it is {KEYS['recompute']}",
    **{f"model.lora.{name}": "there are no adapters here" for name in LoraConfig.model_fields},
    **{f"warm_up.{name}": _WARM_UP for name in WarmUpConfig.model_fields},
    **{f"confidence_start.{name}": _START for name in ConfidenceStartConfig.model_fields},
    **dict.fromkeys(("data.train_size", "data.evaluate_size", "data.seed"), _EMBEDDED),
    "rollout.batch_responses": "here it is mindspeed_rl.generate_config.max_num_seqs",
    "trainer.microbatch_prompts": f"here it is {KEYS['update_tokens']}",
    "trainer.microbatch_tokens": f"here it is {KEYS['update_tokens']}",
    "trainer.share_prompts": "MindSpeed-RL runs a prompt once for each of its responses",
    "trainer.device": "here it is hardware.platform",
    "trainer.threads": "here it is OMP_NUM_THREADS",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a run is refused: the key, its value, the reason, and the nearest values with which this rule holds."""

    key: str
    value: Any
    reason: str
    works: tuple[Any, ...] = ()

    def __str__(self) -> str:
        message = f"{self.key}={_shown(self.value)}: {self.reason}"
        return f"{message}; nearest that works: {', '.join(map(_shown, self.works))}" if self.works else message


@dataclass(frozen=True, slots=True)
class Plan:
    """A run's plan; ``memory`` is None on the host platform, whose memory is another, and where there are problems.

    Attributes:
        iterations: of each stage, or None where the number of questions is not known.
        rows_from: where the number of training questions is from.
    """

    facts: RunFacts
    memory: MemoryPlan | None
    rows: int | None
    rows_from: str
    iterations: int | None
    problems: tuple[Problem, ...]


def make_plan(run: RunConfig) -> Plan:
    """Plan a run for Ascend.

    Raises:
        ConfigError: the run is not one for a cluster, or a key has a value of the wrong type.
        DataError: the training file is there and cannot be read.
    """
    facts = read_facts(run)
    problems = list(_unsupported(run, facts))
    for violation in violations(facts):
        value = getattr(facts, violation.field)
        problems.append(Problem(violation.key, value, violation.reason, nearest_working(facts, violation.field)))
    memory = None
    if run.hardware.platform == "npu" and not violations(facts):
        memory = memory_plan(facts)
        problems += _memory_problems(facts, memory)
    rows, rows_from = training_rows(run.data)
    iterations: int | None = run.trainer.steps
    if run.data.epochs is not None:
        try:
            iterations = None if rows is None else steps_of_epochs(run.data.epochs, rows, run.rollout.prompts)
        except ConfigError as error:
            problems.append(Problem("data.epochs", run.data.epochs, str(error).split(": ", 1)[1]))
            iterations = None
    return Plan(facts, memory, rows, rows_from, iterations, tuple(problems))


def _unsupported(run: RunConfig, facts: RunFacts) -> Iterator[Problem]:
    """What our sections can say and MindSpeed-RL cannot do: refused, for it would be ignored in silence."""
    if run.model.path is None:
        yield Problem("model.path", None, "the built-in tiny model is for the local engine; name a directory")
    if run.data.name != "records":
        yield Problem("data.name", run.data.name, "MindSpeed-RL trains on files of records", ("records",))
    if run.optimizer.name != "adamw":
        yield Problem("optimizer.name", run.optimizer.name, "Megatron's AdamW keeps float32 moments", ("adamw",))
    if run.optimizer.eps != 1e-8:
        yield Problem("optimizer.eps", run.optimizer.eps, "MindSpeed-RL leaves Megatron's value", (1e-8,))
    if run.optimizer.warmup_steps and run.trainer.minibatches * run.trainer.epochs > 1:
        yield Problem(
            "optimizer.warmup_steps", run.optimizer.warmup_steps, "cannot be had with several updates a step", (0,)
        )
    if run.optimizer.schedule != "constant" and run.trainer.epochs > 1:
        reason = f"Megatron would finish it after 1/{run.trainer.epochs} of the run: it knows of no trainer.epochs"
        yield Problem("optimizer.schedule", run.optimizer.schedule, reason, ("constant",))
    if run.evaluation.questions is not None:
        reason = "validation uses all of data.evaluate; shorten that file instead"
        yield Problem("evaluation.questions", run.evaluation.questions, reason, (None,))
    if run.evaluation.final_questions is not None:
        reason = "the trained weights are converted and evaluated on their own (docs/evaluation.md)"
        yield Problem("evaluation.final_questions", run.evaluation.final_questions, reason, (None,))
    if run.checkpoint.interval < 1:
        yield Problem("checkpoint.interval", run.checkpoint.interval, "MindSpeed-RL divides by it", (1,))
    if run.logging.swanlab is not None:
        yield Problem("logging.swanlab", run.logging.swanlab, "MindSpeed-RL 2.3.0 logs to TensorBoard and W&B", (None,))
    for key, instead in _LOCAL_ENGINE.items():
        value, default = _value(run, key), _default(key)
        if value != default:
            yield Problem(key, value, f"is the local engine's; {instead}", (default,))
    if run.model.compute_dtype != "bfloat16":
        reason = "MindSpeed-RL computes in bfloat16 (on the host platform, mindspeed_rl.coca.host.dtype says)"
        yield Problem("model.compute_dtype", run.model.compute_dtype, reason, ("bfloat16",))
    expected = run.hardware.nodes * run.hardware.npus_per_node
    others = _npus_of_other_workers(run.mindspeed_rl)
    if facts.npus + sum(others.values()) != expected:
        reason = f"hardware has {run.hardware.nodes} x {run.hardware.npus_per_node} NPUs"
        for key, npus in others.items():
            reason += f", {npus} of them for rl_config.{key}, which wait for NPUs of their own"
        works = expected - sum(others.values())
        yield Problem(KEYS["npus"], facts.npus, reason, (works,) if works > 0 else ())
    for name, ours, theirs in (
        ("rollout.prompts", run.rollout.prompts, facts.prompts),
        ("rollout.group_size", run.rollout.group_size, facts.group),
        ("rollout.max_new_tokens", run.rollout.max_new_tokens, facts.max_new),
        ("rollout.max_prompt_tokens", run.rollout.max_prompt_tokens, facts.max_prompt),
    ):
        if ours != theirs:
            yield Problem(name, ours, f"mindspeed_rl says {theirs}; set this key and leave MindSpeed-RL's to it")


def _npus_of_other_workers(values: dict[str, Any]) -> dict[str, int]:
    """Key -> NPUs that MindSpeed-RL reserves besides the actor's, where its workers are separate."""
    rl = values.get("rl_config", {})
    if rl.get("use_integrated_worker", True):
        return {}
    groups = ["reference_resource"] * needs_reference(values) + ["reward_resource"]
    npus = {key: (rl.get(key) or {}).get("num_npus") for key in groups}
    return {key: int(count) for key, count in npus.items() if count}


def _value(run: RunConfig, key: str) -> Any:
    return attrgetter(key)(run)


def _default(key: str) -> Any:
    section, _, name = key.partition(".")
    return attrgetter(name)(RunConfig.model_fields[section].default)


def _memory_problems(facts: RunFacts, memory: MemoryPlan) -> Iterator[Problem]:
    limit = memory.limit_gib
    if memory.training_gib > limit:
        reason = f"training needs about {memory.training_gib:.1f} GiB of an NPU's {limit:.1f}"
        field = next((field for field in ("update_tokens", "tp", "pp") if nearest_working(facts, field)), "tp")
        yield Problem(KEYS[field], getattr(facts, field), reason, nearest_working(facts, field))
    if memory.rollout_gib > limit:
        reason = f"rollout needs about {memory.rollout_gib:.1f} GiB of an NPU's {limit:.1f}, offloading as configured"
        works = nearest_working(facts, "memory_utilization")
        yield Problem(KEYS["memory_utilization"], facts.memory_utilization, reason, works)
    if memory.longest_responses < 1:
        reason = (
            f"the KV cache holds {memory.longest_responses:.2f} sequences of {facts.max_model_len} tokens; "
            "raise gpu_memory_utilization or"
        )
        yield Problem(KEYS["rollout_tp"], facts.rollout_tp, reason + " this", nearest_working(facts, "rollout_tp"))


def _candidates(facts: RunFacts, field: str) -> Iterator[Any]:
    """Values that a field could have; whole numbers up to where more would make no sense."""
    if field in _FIXED:
        yield _FIXED[field]
    elif field in ("tp", "pp", "cp", "rollout_tp"):
        yield from range(1, facts.npus + 1)
    elif field == "memory_utilization":
        yield from (percent / 100 for percent in range(5, 100, 5))
    elif field == "recompute":
        yield from (None, "selective", "full")
    elif field == "recompute_method":
        yield from (None,) if facts.recompute == "selective" else ("uniform", "block")
    elif field == "recompute_layers":
        yield from (None,) if facts.recompute == "selective" else range(1, facts.layers // facts.pp + 1)
    elif field == "attention_mask":
        yield from ("general", "causal")
    elif field == "verifier_weights":
        yield facts.verifiers
    elif field in ("seq_length", "max_new", "max_prompt"):
        yield from (facts.context, facts.context - facts.max_prompt)
    elif field in ("max_model_len", "max_batched_tokens", "update_tokens", "logprob_tokens"):
        yield from (facts.seq_length, facts.max_model_len, facts.max_prompt + facts.max_new)
    elif field in ("advantage_dispatch", "reward_dispatch"):
        yield from range(facts.group, facts.responses + 1, facts.group)
    else:
        value = getattr(facts, field) or 1
        yield from range(1, max(2 * value, 2 * facts.npus, facts.group) + 1)


def nearest_working(facts: RunFacts, field: str) -> tuple[Any, ...]:
    """The nearest values of ``field`` with which every rule on it holds, and the estimate fits, others unchanged."""
    value = getattr(facts, field)
    others = {v.field for v in violations(facts)} - {field}
    working = []
    for candidate in dict.fromkeys(_candidates(facts, field)):
        varied = facts.varied(field, candidate)
        broken = violations(varied)
        if candidate == value or {v.field for v in broken} - others:
            continue
        if not broken and not _fits(varied):
            continue
        working.append(candidate)
    if all(isinstance(v, int | float) for v in [value, *working]) and not isinstance(value, bool):
        nearest = sorted(working, key=lambda candidate: abs(candidate - value))[:_SHOWN]
        return tuple(sorted(nearest))
    return tuple(working[:_SHOWN])


def _fits(facts: RunFacts) -> bool:
    memory = memory_plan(facts)
    return max(memory.training_gib, memory.rollout_gib) <= memory.limit_gib and memory.longest_responses >= 1


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
