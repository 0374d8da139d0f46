"""The key table of a cluster run: which keys of ours set which keys of MindSpeed-RL.

Names of both sides meet here.  The run file, the plan, "set twice", a resumed run's identity and the reading of
MindSpeed-RL's own YAML follow from the table.  Its other keys are free: ``configs/hardware/ascend.yaml`` and a run's
section ``mindspeed_rl`` set them.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.config.values import fact_of, facts_of, keys_of_identity
from coca_mindspeed.errors import Problem, raise_problems, show_value
from coca_mindspeed.mindspeed.stages.dataset import RECORD
from coca_mindspeed.mindspeed.start.process import CocaSettings
from coca_mindspeed.mindspeed.upstream_keys import CLASSES, shipped_keys
from coca_mindspeed.utils.text_formats import value_of

#: Key of MindSpeed-RL -> key of ours with the same value.  ``model.actor`` stands for the shapes that the actor names.
RENAMES = {
    "model.actor.num_layers": "model.architecture.layers",
    "model.actor.hidden_size": "model.architecture.hidden",
    "model.actor.ffn_hidden_size": "model.architecture.ffn",
    "model.actor.num_attention_heads": "model.architecture.heads",
    "model.actor.num_query_groups": "model.architecture.kv_groups",
    "model.actor.rotary_base": "model.architecture.rope_theta",
    "model.actor.rope_scaling_type": "model.architecture.rope_scaling.rope_type",
    "model.actor.rope_scaling_factor": "model.architecture.rope_scaling.factor",
    "model.actor.low_freq_factor": "model.architecture.rope_scaling.low_freq_factor",
    "model.actor.high_freq_factor": "model.architecture.rope_scaling.high_freq_factor",
    "model.actor.original_max_position_embeddings": "model.architecture.rope_scaling.original_max_position_embeddings",
    "model.actor.max_position_embeddings": "model.architecture.context",
    "model.actor.padded_vocab_size": "model.architecture.vocab",
    "model.actor.untie_embeddings_and_output_weights": "model.architecture.untied_embeddings",
    "model.actor.add_qkv_bias": "model.architecture.qkv_bias",
    "model.actor.qk_layernorm": "model.architecture.qk_layernorm",
    "model.actor.norm_epsilon": "model.architecture.norm_eps",
    "megatron_training.tokenizer_name_or_path": "model.path",
    "megatron_training.data_path": "data.train",
    "megatron_training.global_batch_size": "rollout.prompts",
    "megatron_training.save_interval": "checkpoint.interval",
    "actor_config.lr": "optimizer.lr",
    "actor_config.lr_decay_style": "optimizer.schedule",
    "actor_config.weight_decay": "optimizer.weight_decay",
    "actor_config.clip_grad": "optimizer.grad_clip",
    "actor_config.adam_beta1": "optimizer.betas.0",
    "actor_config.adam_beta2": "optimizer.betas.1",
    "actor_config.load": "model.megatron_path",
    "rl_config.clip_ratio": "method.clip",
    "rl_config.epochs": "trainer.ppo_epochs",
    "rl_config.n_samples_per_prompt": "rollout.group_size",
    "rl_config.max_prompt_length": "rollout.max_prompt_tokens",
    "rl_config.use_tensorboard": "logging.tensorboard",
    "generate_config.trust_remote_code": "model.trust_remote_code",
    "generate_config.sampling_config.temperature": "rollout.temperature",
    "generate_config.sampling_config.max_tokens": "rollout.max_new_tokens",
    "coca.platform": "hardware.platform",
    "coca.method": "method",
    "coca.grader": "data.grader",
    "coca.grading": "data.grader_options",
    "coca.require_evaluated": "data.require_evaluated",
    "coca.chat_template_kwargs": "model.chat_template_kwargs",
    "coca.prompt_date": "model.prompt_date",
    "coca.eval_data": "data.evaluate",
    "coca.eval_interval": "evaluation.interval",
    "coca.keep_checkpoints": "checkpoint.keep",
    "coca.checkpoint_minutes": "checkpoint.minutes",
    "coca.npu_memory_gib": "hardware.memory_gib",
    "coca.samples_interval": "logging.samples_interval",
    "coca.samples_prompts": "logging.samples_prompts",
}


#: Key of ours -> the key of MindSpeed-RL's that says it.
THEIRS = {ours: theirs.replace("model.actor", "megatron_training") for theirs, ours in RENAMES.items()} | {
    "hardware.nodes": "coca.nodes",
    "hardware.npus_per_node": "rl_config.actor_resource.num_npus",
    "model.compute_dtype": "megatron_training.bf16",
    "optimizer.warmup_steps": "megatron_training.lr_warmup_fraction",
    "trainer.minibatches": "rl_config.mini_batch_size",
    "trainer.steps": "megatron_training.train_iters",
}
_SECTIONS = {"method": "coca.method", "data.grader_options": "coca.grading", "mindspeed_rl": ""}


def native_key(key: str) -> str:
    """The name of a key of ours in a file of MindSpeed-RL's layout; other keys are theirs."""
    for section, other in _SECTIONS.items():
        if key.startswith(f"{section}.") and key not in THEIRS:
            return f"{other}{key.removeprefix(section)}".lstrip(".")
    return THEIRS.get(key, key)


class NativeRun(RunConfig):
    """A run whose file is in MindSpeed-RL's layout: ``mindspeed_rl`` holds all of it, the section ``coca`` too."""


class Entry(NamedTuple):
    """How a key of MindSpeed-RL follows from keys of ours; ``typed`` of them set it."""

    ours: tuple[str, ...]
    value: Callable[..., Any]  # of the values of ours
    typed: tuple[str, ...]


_LENGTHS = ("rollout.max_prompt_tokens", "rollout.max_new_tokens")
#: Key of MindSpeed-RL -> its entry, of the renames and of the keys that are computed; the last two unless
#: ``data.epochs`` decides the length.
TABLE = {key: Entry((ours,), lambda value: value, (ours,)) for key, ours in RENAMES.items()} | {
    # Megatron refuses the seed 0.
    "megatron_training.seed": Entry(("seed",), lambda seed: seed + 1, ("seed",)),
    "megatron_training.seq_length": Entry(_LENGTHS, operator.add, _LENGTHS),
    "rl_config.mini_batch_size": Entry(
        ("rollout.prompts", "trainer.minibatches"), operator.floordiv, ("trainer.minibatches",)
    ),
    "rl_config.use_wandb": Entry(("logging.wandb",), lambda project: project is not None, ("logging.wandb",)),
    "megatron_training.train_iters": Entry(("trainer.steps",), lambda steps: steps, ("trainer.steps",)),
    "actor_config.lr_warmup_fraction": Entry(
        ("trainer.steps", "optimizer.warmup_steps"),
        lambda steps, warmup: warmup / steps,
        ("optimizer.warmup_steps",),
    ),
}
_LENGTH = ("megatron_training.train_iters", "actor_config.lr_warmup_fraction")
#: Key of MindSpeed-RL that gets its value when the run file is written -> what sets it, and its value from the run, the
#: iterations of a stage and its ``StageFiles``; None is not written.
WRITTEN: dict[str, tuple[str, Callable[[RunConfig, int, Any], Any]]] = {
    "megatron_training.train_iters": ("trainer.steps or data.epochs", lambda run, steps, _: steps),
    "actor_config.lr_warmup_fraction": ("optimizer.warmup_steps", lambda run, n, _: run.optimizer.warmup_steps / n),
    "actor_config.save": ("--output", lambda run, _, files: str(files.checkpoints.absolute())),
    "rl_config.wandb_project": ("logging.wandb", lambda run, *_: run.logging.wandb),
    "rl_config.wandb_exp_name": ("--output", lambda run, _, files: run.logging.wandb and files.output.name),
    "rl_config.wandb_save_dir": ("--output", lambda run, _, files: run.logging.wandb and str(files.results.absolute())),
    "coca.stage": ("method", lambda run, _, files: files.stage),
    "coca.output_dir": ("--output", lambda run, _, files: str(files.results.absolute())),
    "coca.data_sha256": ("the content of the record files", lambda *_: None),  # of the files that are here
}
#: Keys of a file in MindSpeed-RL's layout that the run sets, besides those of :data:`WRITTEN`.
SET_FOR_NATIVE_RUNS = ("megatron_training.seq_length", "megatron_training.dataset_additional_keys")
_ACTOR = ("megatron_training", "actor_config")
# Of what a Megatron checkpoint depends on: its folders, its optimizer's state, and its schedule, which is compared.
_OF_A_CHECKPOINT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "use_distributed_optimizer",
    "train_iters",
    "lr_warmup_fraction",
)
# MindSpeed-RL's free keys, or whole sections, that must not change on a resume; memory and logging may.
_FREE_IDENTITY = {
    "model",
    *(f"{section}.{name}" for section in _ACTOR for name in _OF_A_CHECKPOINT),
    "megatron_training.split",
    "megatron_training.no_shuffle",
    "actor_config.min_lr",
    "rl_config.init_kl_coef",
    "rl_config.shuffle_mini_batch",
    "rl_config.verifier_function",
    "rl_config.verifier_weight",
    "generate_config.sampling_config",
}
_ABSENT = object()
#: Sections of a YAML file in MindSpeed-RL's layout besides ``model``.
UPSTREAM_SECTIONS = ("coca", *dict.fromkeys(section.partition(".")[0] for section in CLASSES))
# Keys of the parallel layout by the names that people type.
_LAYOUT = {
    "tp": "mindspeed_rl.actor_config.tensor_model_parallel_size",
    "pp": "mindspeed_rl.actor_config.pipeline_model_parallel_size",
    "cp": "mindspeed_rl.actor_config.context_parallel_size",
    "rollout_tp": "mindspeed_rl.generate_config.infer_tensor_parallel_size",
}


def table_of(platform: str, epochs: float | None = None) -> dict[str, Entry]:
    """The entries that hold on a platform, and if ``data.epochs`` or ``trainer.steps`` decides the length of a run."""
    without = {"actor_config.load"} if platform == "host" else set()  # the CPU shim starts from model.path
    without |= set(_LENGTH) if epochs is not None else set()
    return {key: entry for key, entry in TABLE.items() if key not in without}


def own_values(run: RunConfig) -> dict[str, Any]:
    """Key of MindSpeed-RL -> the value that our keys give it; keys of a section that is null give none."""
    ours = run.model_dump(mode="json", exclude={"mindspeed_rl"})
    values = {
        key: [value_of(ours, name, _ABSENT) for name in entry.ours]
        for key, entry in table_of(run.hardware.platform, run.data.epochs).items()
    }
    return {key: TABLE[key].value(*found) for key, found in values.items() if _ABSENT not in found}


def translate(run: RunConfig) -> dict[str, Any]:
    """MindSpeed-RL's sections: the run's ``mindspeed_rl``, and the values that our keys give.

    Of a run in MindSpeed-RL's layout, only the length of a sequence and the column of records are ours.  Raises
    ConfigError if a section is not a mapping.
    """
    values = deepcopy(run.mindspeed_rl)
    if isinstance(run, NativeRun):
        for key in SET_FOR_NATIVE_RUNS:
            value = run.rollout.max_prompt_tokens + run.rollout.max_new_tokens if key.endswith("length") else [RECORD]
            there = [place for place in places(key, values) if value_of(values, place, _ABSENT) is not _ABSENT]
            for place in there or [key]:
                put(values, place, value)
        return values
    shapes, *_ = actor_sections(values)
    for key, value in own_values(run).items():
        put(values, key.replace("model.actor", shapes), value)
    return values


def set_twice(run: RunConfig) -> Iterator[Problem]:
    """A problem for each key in ``mindspeed_rl`` whose value differs from that of our keys that set it."""
    theirs, values = underscored(run.mindspeed_rl), own_values(run)
    for key, wanted in values.items():
        for place in places(key, theirs):
            found = value_of(theirs, place, wanted)
            for below, value in leaves(found, ".") if isinstance(found, Mapping) else [("", found)]:
                should = value_of(wanted, below[1:]) if below else wanted
                if value != should:
                    yield _twice(f"{place}{below}", value, show_value(should), ", ".join(TABLE[key].ours) + below)
    for key, (source, _) in WRITTEN.items():
        same = run.logging.wandb if source == "logging.wandb" else None
        for place in places(key, theirs) if key not in values else ():
            if (found := value_of(theirs, place)) not in (None, same):
                yield _twice(place, found, "absent", source)


def _twice(key: str, value: Any, wanted: str, source: str) -> Problem:
    expected = f"must be {wanted}, set by {source}"
    return Problem("set-twice", f"mindspeed_rl.{key}", value, expected, f"set {source} instead")


def identity_keys() -> set[str]:
    """Keys and sections of MindSpeed-RL that a resumed run must not change: by the facts at the keys of ours."""
    known = facts_of(RunConfig)
    same = {key for key, entry in TABLE.items() if all(fact_of(known, name).resume == "same" for name in entry.ours)}
    return same | {f"coca.{key}" for key in keys_of_identity(CocaSettings)} | _FREE_IDENTITY


def places(key: str, values: Mapping[str, Any]) -> list[str]:
    """The keys that mean the same: the actor's may stand in three sections, of which the last one wins."""
    section, _, name = key.rpartition(".")
    return [f"{each}.{name}" for each in actor_sections(values)] if section in ("model.actor", *_ACTOR) else [key]


def actor_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The actor's settings, as MindSpeed-RL merges them (``BaseConfig.update``)."""
    contents = (value_of(values, section) or {} for section in actor_sections(values))
    return {name: value for content in contents for name, value in content.items()}


def of_the_actor(key: str) -> str:
    """``megatron_training`` for the actor's three sections, as :class:`MindSpeedView` has it."""
    section, _, name = key.rpartition(".")
    return f"megatron_training.{name}" if section in ("model.actor", *_ACTOR) else key


def actor_sections(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The sections of the actor's settings; the last one wins."""
    shapes = value_of(values, "actor_config.model", value_of(values, "megatron_training.model", "actor"))
    return f"model.{shapes}", *_ACTOR


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested mappings.  Raises ConfigError if a section above it is not a mapping."""
    *sections, name = key.split(".")
    content: Any = values
    for section in sections:
        if content.get(section) is None:
            content[section] = {}
        content = content[section]
        if not isinstance(content, dict):
            raise_problems([Problem("wrong-type", f"mindspeed_rl.{'.'.join(sections)}", content, "must be a mapping")])
    content[name] = value


def leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def written_as(key: str, value: object, sections: Mapping[str, Any]) -> list[str]:
    """Keys of a run that set a key or a section of MindSpeed-RL, which is named with or without its section.

    ``sections`` is the run's ``mindspeed_rl``.  A section with several keys is written as ours if they set all of it,
    otherwise below ``mindspeed_rl``.  Empty for any other name.
    """
    name = key.replace("-", "_")
    if name in UPSTREAM_SECTIONS:
        inside = [name for name, _ in leaves(underscored(value), f"{key}.")] if isinstance(value, Mapping) else []
        ours = [ours for each in inside for ours in _set_by(each)]
        if inside and all(map(_set_by, inside)):
            return [*dict.fromkeys(ours)]
        return [f"mindspeed_rl.{inside[0] if len(inside) == 1 else key}"]
    name = name.rpartition(".")[2]
    if layout := [full for short, full in _LAYOUT.items() if name.lower() in (short, _last(full))]:
        return layout
    if ours := [*dict.fromkeys(ours for each in (*TABLE, *WRITTEN) if _last(each) == name for ours in _set_by(each))]:
        return ours
    known = shipped_keys().sections
    places = [f"{section}.{name}" for section in known if sections and name in known[section]]
    # The later of the actor's sections wins: a key that the run sets is changed where it is.
    set_there = [place for place in places if value_of(sections, place) is not None]
    return [f"mindspeed_rl.{place}" for place in (set_there[-1:] or places[:1])]


def _set_by(key: str) -> tuple[str, ...]:
    """Keys of ours, or options, that set a key of MindSpeed-RL's; those that it is computed from by others are not."""
    same = places(key, {})
    if (entry := next((TABLE[place] for place in same if place in TABLE), None)) is not None:
        return entry.typed
    return next(((WRITTEN[place][0],) for place in same if place in WRITTEN), ())


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def underscored(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings with underscores for dashes in the names of their values, as MindSpeed-RL reads them."""
    sections = {str(name): underscored(value) for name, value in values.items() if isinstance(value, Mapping)}
    others = {str(name).replace("-", "_"): value for name, value in values.items() if not isinstance(value, Mapping)}
    return sections | others
