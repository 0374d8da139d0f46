"""What verl's own keys must say so that verl trains by the method, and nothing else.

verl has many switches that change its objective, its sampling or who belongs to a group.  Each is named here with
verl's default, which holds where a configuration leaves it out, and with the reason in words.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.utils.files import write_json
from coca_mindspeed.verl.settings import NAME, VerlSettings

#: verl clamps the log-ratio to 20 before it looks at ``clip_ratio_c``, so from here on nothing is cut.
NEVER_CUTS = 1e9
LOSS_AGG_MODES = {"sum": "seq-mean-token-sum", "token_mean": "token-mean", "segment_mean": "seq-mean-token-sum"}

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_DYNAMIC = f"{_ACTOR}.use_dynamic_bsz"
_MEGATRON = f"{_ACTOR}.megatron"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One key of verl's.

    Attributes:
        key: its dotted name.
        default: verl 0.9.1's, where the configuration leaves it out.
        holds: whether a value will do.
        expected: what will, for people.
        because: why.
    """

    key: str
    default: Any
    holds: Callable[[Any], bool]
    expected: str
    because: str

    def problem(self, config: Mapping[str, Any]) -> str | None:
        """What is wrong with a configuration, in one line."""
        found = value_of(config, self.key, self.default)
        if self.holds(found):
            return None
        return f"{self.key}: expected {self.expected}, found {found!r}: {self.because}"


def value_of(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of a dotted key, or ``default`` where it or a section on the way to it is left out."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def _is(key: str, default: Any, wanted: Any, because: str) -> Requirement:
    return Requirement(key, default, lambda found: _same(found, wanted), repr(wanted), because)


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, bool) or wanted is None or isinstance(wanted, str):
        return found is wanted or (isinstance(wanted, str) and found == wanted)
    return _is_number(found) and math.isclose(found, wanted, rel_tol=1e-12)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def requirements(settings: VerlSettings) -> Iterator[Requirement]:
    """Every key that the method needs to have one value."""
    yield from _PLUGIN
    yield from _GROUPS
    yield from _SAMPLING
    yield from _objective(settings)


_PLUGIN = (
    _is("trainer.use_v1", True, True, "the plugin is one of verl's V1 trainer"),
    _is("trainer.v1.trainer_mode", "sync", NAME, "verl's own trainers know nothing of a confidence"),
    _is("algorithm.adv_estimator", "gae", NAME, "another estimator gives every token the same advantage"),
    _is("reward.reward_manager.name", "naive", NAME, "another one parses no confidence on the sampled tokens"),
    _is("reward.reward_manager.source", "register", "register", "ours is a registered one"),
    _is("reward.custom_reward_function.path", None, None, "it would see decoded text without its special tokens"),
    _is("reward.reward_model.enable", False, False, "an answer is right or wrong by its grader alone"),
    _is("distillation.enabled", False, False, "the objective has no teacher"),
)
_SPLITS = "a success rate needs all responses to a question in one step"
_GROUPS = (
    _is("algorithm.filter_groups.enable", False, False, "groups that all succeed or all fail still teach a confidence"),
    _is("trainer.v1.sampler.custom_sampler.path", None, None, _SPLITS),
    _is("trainer.v1.sampler.sync_refill_failed_groups", False, False, "coca.broken_groups says what such groups do"),
    _is("trainer.v1.sync.parameter_sync_step", 1, 1, _SPLITS),
    _is("data.gen_batch_size", None, None, _SPLITS),
    _is("skip.rollout_tq.enable", False, False, "stored rollouts come from another policy"),
    _is("data.filter_overlong_prompts", False, False, "it drops questions in silence; too long ones are refused"),
    _is("data.truncation", "error", "error", "a prompt is never cut"),
    _is("data.custom_cls.path", None, None, "every row is looked at before training"),
    _is("data.prompt_key", "prompt", "prompt", "coca-mindspeed data export verl writes the prompt there"),
    _is(f"{_ROLLOUT}.over_sample_rate", 0, 0, _SPLITS),
)
_SEES_THE_POLICY = "s must speak of the policy's own distribution"
_AS_EVALUATED = "an evaluation takes one sample at temperature 1; verl's default is greedy"
_SAMPLING = (
    _is(f"{_ROLLOUT}.do_sample", True, True, _SEES_THE_POLICY),
    _is(f"{_ROLLOUT}.top_k", -1, -1, _SEES_THE_POLICY),
    _is(f"{_ROLLOUT}.top_p", 1, 1, _SEES_THE_POLICY),
    _is(f"{_ROLLOUT}.ignore_eos", False, False, "a response ends where it ends"),
    _is(f"{_ROLLOUT}.multi_turn.enable", False, False, "a response is one turn"),
    _is(f"{_ROLLOUT}.agent.default_agent_loop", "single_turn_agent", "single_turn_agent", "a response is one turn"),
    _is(f"{_ROLLOUT}.val_kwargs.do_sample", False, True, _AS_EVALUATED),
    _is(f"{_ROLLOUT}.val_kwargs.temperature", 0, 1, _AS_EVALUATED),
    _is(f"{_ROLLOUT}.val_kwargs.top_k", -1, -1, _AS_EVALUATED),
    _is(f"{_ROLLOUT}.val_kwargs.top_p", 1.0, 1, _AS_EVALUATED),
    _is(f"{_ROLLOUT}.val_kwargs.n", 1, 1, "an evaluation takes one sample"),
)
_NO_KL = "the objective has no KL term and so no reference model"


def _objective(settings: VerlSettings) -> Iterator[Requirement]:
    method = settings.method
    yield _is("algorithm.use_kl_in_reward", False, False, _NO_KL)
    yield _is(f"{_ACTOR}.use_kl_loss", False, False, _NO_KL)
    yield _is(f"{_ACTOR}.entropy_coeff", 0, 0, "the objective has no entropy term")
    yield _is(
        f"{_ACTOR}.loss_agg_mode",
        "token-mean",
        LOSS_AGG_MODES[method.loss_aggregation],
        f"that is coca.method.loss_aggregation={method.loss_aggregation}",
    )
    yield _is(f"{_ACTOR}.loss_scale_factor", None, None, "it multiplies the gradient")
    yield _is(f"{_ACTOR}.policy_loss.loss_mode", "vanilla", "vanilla", "the objective is the clipped ratio's")
    for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        yield _is(f"{_ACTOR}.{key}", 0.2, method.clip, f"coca.method.clip is {method.clip}")
    yield Requirement(
        f"{_ACTOR}.clip_ratio_c",
        3.0,
        lambda found: _is_number(found) and found >= NEVER_CUTS,
        f"{NEVER_CUTS:g} or more (1e30)",
        "verl's second clip, of ratios far above 1 with a negative advantage, is another objective",
    )
    yield Requirement(
        f"{_ACTOR}.strategy",
        "fsdp",
        lambda found: found in ("fsdp", "fsdp2", "megatron"),
        "'fsdp2', 'fsdp' or 'megatron'",
        "other training engines of verl's were never tried with the plugin",
    )
    for key, default in (("context_parallel_size", 1), ("dynamic_context_parallel", False)):
        yield _is(f"{_MEGATRON}.{key}", default, default, "the plugin was not tested with context parallelism")
    yield Requirement(
        "critic.enable",
        None,
        lambda found: found is None or found is False,
        "null or false",
        "advantages come from groups, not from a critic",
    )
    yield _is("trainer.critic_warmup", 0, 0, "there is no critic to warm up, and the actor would not be trained")
    correction = "algorithm.rollout_correction"
    yield _is(f"{correction}.rollout_is", None, None, "importance weights of the rollout are another objective")
    yield _is(f"{correction}.rollout_rs", None, None, "rejection takes tokens out of the objective")
    yield _is(f"{correction}.bypass_mode", False, False, "old log-probs are the training engine's own")


def refusals(config: Mapping[str, Any], settings: VerlSettings) -> list[str]:
    """Everything about a whole verl configuration that is not the method's, one line each.

    Args:
        config: resolved, as plain containers; what it leaves out has verl's default.
        settings: its section ``coca``.
    """
    problems = [problem for each in requirements(settings) if (problem := each.problem(config)) is not None]
    problems_of_counts = list(_problems_of_counts(config))
    return [*problems, *(problems_of_counts or [*_batches(config), *_stages(config, settings)])]


_TOKENS = f"{_ACTOR}.ppo_max_token_len_per_gpu"

#: Counts that the arithmetic below divides by, with verl's defaults; None: there need not be any.
_COUNTS = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    _TOKENS: 16384,
    f"{_ACTOR}.ulysses_sequence_parallel_size": 1,
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 1,
    f"{_MEGATRON}.tensor_model_parallel_size": 1,
    f"{_MEGATRON}.pipeline_model_parallel_size": 1,
    f"{_ROLLOUT}.n": 1,
    f"{_ROLLOUT}.tensor_model_parallel_size": 2,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.total_epochs": 30,
    "trainer.total_training_steps": None,
}


def _count(config: Mapping[str, Any], key: str) -> Any:
    return value_of(config, key, _COUNTS[key])


def _problems_of_counts(config: Mapping[str, Any]) -> Iterator[str]:
    for key, default in _COUNTS.items():
        found = _count(config, key)
        absent = found is None and default is None
        unused = key == _TOKENS and not value_of(config, _DYNAMIC, False)
        if not (absent or unused) and (not isinstance(found, int) or isinstance(found, bool) or found < 1):
            yield f"{key}: expected a whole number of 1 or more, found {found!r}"


def _batches(config: Mapping[str, Any]) -> Iterator[str]:
    prompts = _count(config, "data.train_batch_size")
    mini = _count(config, f"{_ACTOR}.ppo_mini_batch_size")
    group = _count(config, f"{_ROLLOUT}.n")
    if group < 2:
        yield f"{_ROLLOUT}.n: expected 2 or more, found {group!r}: a success rate needs a group"
        return
    if mini < 1 or prompts % mini:
        yield (
            f"{_ACTOR}.ppo_mini_batch_size: expected a divisor of data.train_batch_size {prompts}, found {mini}: verl "
            "would fill the last mini-batch up with rows of its own, and the mean would count them"
        )
        return
    devices = _count(config, "trainer.n_gpus_per_node") * _count(config, "trainer.nnodes")
    key, size = devices_of_a_rank(config)
    if devices % size:
        yield f"{key}: {size} does not divide the {devices} devices"
        return
    ranks = devices // size
    if mini * group % ranks:
        yield (
            f"{_ACTOR}.ppo_mini_batch_size: {mini} questions of {group} responses do not divide among {ranks} "
            "data-parallel ranks"
        )
        return
    yield from _microbatches(config, mini * group // ranks, 1 if uses_megatron(config) else size)
    if not value_of(config, f"{_ROLLOUT}.log_prob_use_dynamic_bsz", value_of(config, _DYNAMIC, False)):
        yield from _divides(config, f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", prompts * group // ranks, "step")
    tensor = _count(config, f"{_ROLLOUT}.tensor_model_parallel_size")
    if devices % tensor:
        yield f"{_ROLLOUT}.tensor_model_parallel_size: {tensor} does not divide the {devices} devices"


def uses_megatron(config: Mapping[str, Any]) -> bool:
    """Whether verl trains with Megatron-Core instead of FSDP."""
    return bool(value_of(config, f"{_ACTOR}.strategy", "fsdp") == "megatron")


def devices_of_a_rank(config: Mapping[str, Any]) -> tuple[str, int]:
    """The key and number of devices of one data-parallel rank: TP x PP, or FSDP's sequence parallel size."""
    if uses_megatron(config):
        tensor, pipeline = f"{_MEGATRON}.tensor_model_parallel_size", f"{_MEGATRON}.pipeline_model_parallel_size"
        return f"{tensor} x {pipeline}", _count(config, tensor) * _count(config, pipeline)
    keys = ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size")
    return f"{_ACTOR}.{keys[0]}", max(_count(config, f"{_ACTOR}.{key}") for key in keys)


def _microbatches(config: Mapping[str, Any], rows: int, sequence: int) -> Iterator[str]:
    if value_of(config, _DYNAMIC, False):
        longest = _count(config, "data.max_prompt_length") + _count(config, "data.max_response_length")
        tokens = _count(config, _TOKENS)
        if tokens * sequence < longest:
            yield (
                f"{_TOKENS}: {tokens} tokens on each of {sequence} devices do not hold the "
                f"longest sequence of data.max_prompt_length + data.max_response_length = {longest}"
            )
        return
    yield from _divides(config, f"{_ACTOR}.ppo_micro_batch_size_per_gpu", rows, "mini-batch")


def _divides(config: Mapping[str, Any], key: str, rows: int, what: str) -> Iterator[str]:
    micro = value_of(config, key, None)
    if not micro or rows % micro:
        yield f"{key}: expected a divisor of a rank's {rows} rows of a {what}, found {micro!r}; or set {_DYNAMIC}=true"


def _stages(config: Mapping[str, Any], settings: VerlSettings) -> Iterator[str]:
    stages = len(settings.method.training_method.stages)
    if stages == 1:
        return
    key = "trainer.total_training_steps"
    if _count(config, key) is None:
        key = "trainer.total_epochs"
    if (count := _count(config, key)) % stages:
        yield f"{key}: the {stages} stages of {settings.method.name} share a run equally, and {count} cannot be divided"


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
