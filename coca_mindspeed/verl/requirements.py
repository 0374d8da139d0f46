"""Requirements on a run's verl configuration: values of verl's own keys that the method needs, and sizes that divide.

verl has many switches that change its objective, its sampling or the members of a group.  ``required_values.yaml``
lists those with constants, and the tables here those whose accepted values follow from other keys.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from coca_mindspeed.config.layout import Layout
from coca_mindspeed.config.requirements import Requirement, View, constant_rows, effects, is_number
from coca_mindspeed.utils.text_formats import read_yaml
from coca_mindspeed.verl.settings import TRAINERS, VerlSettings

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron"
CORRECTION = "algorithm.rollout_correction"
TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu"
MINI_BATCH = f"{ACTOR}.ppo_mini_batch_size"
SYNC_STEP = "trainer.v1.separate_async.parameter_sync_step"
TRAIN_FILES, VAL_FILES = "data.train_files", "data.val_files"
_STEPS = "trainer.total_training_steps"
_TP, _PP = f"{MEGATRON}.tensor_model_parallel_size", f"{MEGATRON}.pipeline_model_parallel_size"
_ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"
_FSDP_ULYSSES = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
_WARM_UP = f"{ACTOR}.optim.lr_warmup_steps"
_DYNAMIC = f"or set {ACTOR}.use_dynamic_bsz=true"


@dataclass(frozen=True)
class VerlRun(View):
    """A resolved verl configuration in plain containers, whose section ``coca`` is ``settings``."""

    settings: VerlSettings

    @property
    def trainer(self) -> str:
        """Verl's name of the trainer; an unknown one counts as ``sync``."""
        return TRAINERS.get(str(self.value("trainer.v1.trainer_mode")), "sync")

    @property
    def separate(self) -> bool:
        """Whether devices of their own sample."""
        return self.trainer == "separate_async"

    def files(self, key: str) -> list[str]:
        """The files of :data:`TRAIN_FILES` or :data:`VAL_FILES`, one path or a list of them."""
        value = self.value(key)
        return [value] if isinstance(value, str) else list(value or ())

    @property
    def evaluates(self) -> bool:
        """Whether verl answers the questions of :data:`VAL_FILES`."""
        tests = self.value("trainer.test_freq") or 0
        return bool(tests > 0 or self.value("trainer.val_before_train") or self.value("trainer.val_only"))

    @property
    def dynamic(self) -> bool:
        return bool(self.value(f"{ACTOR}.use_dynamic_bsz"))

    @property
    def megatron(self) -> bool:
        """Whether verl trains with Megatron-Core instead of FSDP."""
        return bool(self.value(f"{ACTOR}.strategy") == "megatron")

    @cached_property
    def layout(self) -> Layout:
        """The sizes; ``separate_async`` makes several updates of ``data.train_batch_size``, and has samplers."""
        value = self.value
        per_node = value("trainer.n_gpus_per_node")
        devices = int(per_node * value("trainer.nnodes"))
        samplers = int(value(f"{ROLLOUT}.nnodes") * (value(f"{ROLLOUT}.n_gpus_per_node") or per_node))
        sequence = max(value(_ULYSSES), value(_FSDP_ULYSSES)) if not self.megatron else 0
        return Layout(
            devices=devices,
            rank_devices=int(value(_TP) * value(_PP) if self.megatron else sequence),
            sampling_devices=samplers if self.separate else devices,
            engine_devices=int(value(f"{ROLLOUT}.tensor_model_parallel_size")),
            prompts=int(value("data.train_batch_size")),
            group=int(value(f"{ROLLOUT}.n")),
            mini_batch=int(value(MINI_BATCH)),
            passes=int(value(f"{ACTOR}.ppo_epochs")),
            max_prompt=int(value("data.max_prompt_length")),
            max_new=int(value("data.max_response_length")),
        )

    @property
    def shares_rows(self) -> bool:
        """Whether ranks get equal shares of a mini-batch of whole groups."""
        layout = self.layout
        return layout.whole_ranks and layout.group >= 2 and layout.mini_batch * layout.group % layout.ranks == 0

    def validations(self, steps: int) -> int:
        """Validations of a run: every ``trainer.test_freq`` of its ``steps``, at the end, and before the first."""
        tests = int(self.value("trainer.test_freq"))
        return (-(-steps // tests) if tests > 0 else 0) + bool(self.value("trainer.val_before_train"))

    @property
    def update_responses(self) -> int:
        """A rank's responses whose log-probs verl computes at once."""
        return self.layout.rank_minibatch if self.separate else self.layout.rank_responses

    @property
    def sequence_devices(self) -> int:
        """Devices that share the tokens of a sequence."""
        return 1 if self.megatron else self.layout.rank_devices

    @property
    def warm_up_in_steps(self) -> bool:
        """Whether the warm-up has a number of steps, which wins over its share of the run."""
        return is_number(steps := self.value(_WARM_UP)) and steps > 0

    @property
    def decay_steps(self) -> int | None:
        """Steps of Megatron's learning-rate schedule; None if verl counts them from the data."""
        steps: int | None = self.value(f"{ACTOR}.optim.lr_decay_steps") or self.value(_STEPS)
        return steps

    @property
    def stages(self) -> int:
        return len(self.settings.method.training_method.stages)


_SERVERS = ("vllm", "sglang", "trtllm")


#: Keys of verl's that need one value, or one of some: those of ``required_values.yaml``.
REQUIREMENTS: tuple[Requirement[VerlRun], ...] = (
    *constant_rows(read_yaml(Path(__file__).with_name("required_values.yaml"))),
    Requirement(
        "objective",
        f"{CORRECTION}.rollout_is_threshold",
        lambda value, _: is_number(value) and value > 0,
        "must be a number above 0: a lower bound too would remove tokens from the objective",
    ),
    # verl imports modules that may register others, in all of its processes.
    Requirement(
        "rollout",
        f"{ROLLOUT}.name",
        lambda name, _: name in _SERVERS or "VERL_USE_EXTERNAL_MODULES" in os.environ,
        f"must be {' or '.join(_SERVERS)}: verl's V1 trainer has no other rollout engine",
    ),
)


_FSDP = "must be fsdp2 or fsdp with model_engine: dp"
_MODEL_ENGINE = (
    "take coca_qwen25_7b_megatron, or write {override /model_engine: megatron} into the defaults of your file"
)
#: The sections of the engine must be those of the strategy: verl's ``model_engine`` chooses them.
ENGINE: tuple[Requirement[VerlRun], ...] = (
    Requirement(
        "engine",
        f"{ACTOR}.strategy",
        lambda _, run: run.value(MEGATRON) is not None,
        _FSDP,
        _MODEL_ENGINE,
        when=lambda run: run.megatron,
    ),
    Requirement(
        "engine",
        f"{ACTOR}.strategy",
        lambda _, run: run.value(f"{ACTOR}.fsdp_config") is not None,
        "must be megatron with model_engine: megatron",
        "take a run without megatron in its name, or model_engine: dp",
        when=lambda run: not run.megatron,
    ),
)


def _count(key: str, when: Callable[[VerlRun], object] = lambda run: True) -> Requirement[VerlRun]:
    positive = "must be a whole number of 1 or more"
    return Requirement("count", key, lambda value, _: type(value) is int and value >= 1, positive, when=when)


def _interval(key: str) -> Requirement[VerlRun]:
    return Requirement("count", key, lambda value, _: type(value) is int, "must be a whole number of steps; -1: never")


#: The numbers that the tables below divide by or compare.
COUNTS = (
    _interval("trainer.save_freq"),
    _interval("trainer.test_freq"),
    _count("data.train_batch_size"),
    _count("data.max_prompt_length"),
    _count("data.max_response_length"),
    _count(MINI_BATCH),
    _count(f"{ROLLOUT}.n"),
    _count(f"{ROLLOUT}.tensor_model_parallel_size"),
    _count("trainer.n_gpus_per_node"),
    _count("trainer.nnodes"),
    _count("trainer.total_epochs"),
    _count(_TP, lambda run: run.megatron),
    _count(_PP, lambda run: run.megatron),
    _count(_ULYSSES, lambda run: not run.megatron),
    _count(_FSDP_ULYSSES, lambda run: not run.megatron),
    _count(TOKENS, lambda run: run.dynamic),
    _count(SYNC_STEP, lambda run: run.separate),
    _count(_STEPS, lambda run: run.value(_STEPS) is not None),
)


def _length(key: str, sets: str) -> Requirement[VerlRun]:
    """The rollout reads a length of its own, which stands for verl's of the data unless it is typed."""
    return Requirement(
        "length",
        f"{ROLLOUT}.{key}",
        lambda tokens, run: tokens == run.value(sets),
        lambda run: f"must be {sets} {run.value(sets)}: verl would cut prompts or responses without a word",
        f"set {sets} instead",
        optional=True,
    )


def _numbers(*numbers: int) -> str:
    return " and the ".join(map(str, sorted(set(numbers))))


#: Weights, lengths, devices and batch sizes; a row that divides applies only where the rows before it hold.
BATCHES: tuple[Requirement[VerlRun], ...] = (
    Requirement(
        "objective",
        f"{CORRECTION}.rollout_is",
        lambda weights, run: weights is not None or run.trainer == "sync",
        lambda run: f"must be token with {run.trainer}: earlier weights sampled the responses",
    ),
    # Without them verl leaves the weights out and says nothing.
    Requirement(
        "objective",
        f"{ROLLOUT}.calculate_log_probs",
        lambda returned, _: returned,
        lambda run: f"must be true for {CORRECTION}.rollout_is={run.value(f'{CORRECTION}.rollout_is')}",
        when=lambda run: run.value(f"{CORRECTION}.rollout_is") is not None,
    ),
    _length("prompt_length", "data.max_prompt_length"),
    _length("response_length", "data.max_response_length"),
    Requirement(
        "length",
        f"{ROLLOUT}.max_model_len",
        lambda tokens, run: tokens >= run.layout.longest,
        lambda run: f"must be {run.layout.longest} or more, the longest prompt and response: verl would cut responses",
        optional=True,
    ),
    Requirement(
        "group-size", f"{ROLLOUT}.n", lambda group, _: group >= 2, "must be 2 or more: a success rate needs a group"
    ),
    # verl would fill the last mini-batch up with rows of its own, and the mean would count them.
    Requirement(
        "mini-batch",
        MINI_BATCH,
        lambda size, run: run.layout.prompts % size == 0,
        lambda run: f"must divide data.train_batch_size {run.layout.prompts}",
    ),
    Requirement(
        "devices",
        _TP,
        lambda _, run: run.layout.whole_ranks,
        lambda run: f"TP x PP = {run.layout.rank_devices} must divide the {run.layout.devices} devices",
        when=lambda run: run.megatron,
    ),
    Requirement(
        "devices",
        _ULYSSES,
        lambda _, run: run.layout.whole_ranks,
        lambda run: f"must divide the {run.layout.devices} devices",
        when=lambda run: not run.megatron,
    ),
    Requirement(
        "devices",
        f"{ROLLOUT}.tensor_model_parallel_size",
        lambda size, run: run.layout.devices % size == run.layout.sampling_devices % size == 0,
        lambda run: f"must divide the {_numbers(run.layout.devices, run.layout.sampling_devices)} devices",
    ),
    Requirement(
        "devices",
        f"{ROLLOUT}.nnodes",
        lambda _, run: run.layout.sampling_devices > 0,
        "must be 1 or more: devices of their own sample",
        when=lambda run: run.separate,
    ),
    Requirement(
        "devices",
        f"{ROLLOUT}.checkpoint_engine.backend",
        lambda backend, _: backend != "naive",
        "must carry weights to other devices: nccl, hccl, nixl",
        when=lambda run: run.separate,
    ),
    Requirement(
        "mini-batch",
        "data.train_batch_size",
        lambda prompts, run: prompts == run.value(SYNC_STEP) * run.layout.mini_batch,
        lambda run: f"must be {SYNC_STEP} = {run.value(SYNC_STEP)} times {MINI_BATCH} = {run.layout.mini_batch}",
        when=lambda run: run.separate,
    ),
    Requirement(
        "mini-batch",
        MINI_BATCH,
        lambda size, run: size * run.layout.group % run.layout.ranks == 0,
        lambda run: f"of {run.layout.group} responses must divide among {run.layout.ranks} data-parallel ranks",
        when=lambda run: run.layout.whole_ranks,
    ),
    Requirement(
        "packing",
        TOKENS,
        lambda tokens, run: tokens * run.sequence_devices >= run.layout.longest,
        lambda run: f"times {run.sequence_devices} devices must hold the longest sequence, {run.layout.longest} tokens",
        when=lambda run: run.shares_rows and run.dynamic,
    ),
    Requirement(
        "micro-batch",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        lambda size, run: size and run.layout.rank_minibatch % size == 0,
        lambda run: f"must divide a rank's {run.layout.rank_minibatch} rows",
        _DYNAMIC,
        when=lambda run: run.shares_rows and not run.dynamic,
    ),
    Requirement(
        "micro-batch",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        lambda size, run: size and run.update_responses % size == 0,
        lambda run: f"must divide a rank's {run.update_responses} rows",
        _DYNAMIC,
        when=lambda run: run.shares_rows and not run.value(f"{ROLLOUT}.log_prob_use_dynamic_bsz"),
    ),
)
_BEST = "coca_mindspeed.verl.checkpoints.BestCheckpoint"
#: The length of the run, its warm-up and its checkpoints.
SCHEDULE: tuple[Requirement[VerlRun], ...] = (
    # Megatron's ``OptimizerParamScheduler`` asserts, in the workers and without a message, that a warm-up ends.
    Requirement(
        "warm-up",
        _WARM_UP,
        lambda steps, run: run.decay_steps is None or steps < run.decay_steps,
        lambda run: f"must be below the {run.decay_steps} steps of the schedule; 0 for a --trial",
        when=lambda run: run.megatron and run.warm_up_in_steps,
    ),
    Requirement(
        "warm-up",
        f"{_WARM_UP}_ratio",
        lambda share, _: share < 1,
        "must be below 1: the warm-up must end before the run does",
        when=lambda run: run.megatron and not run.warm_up_in_steps and is_number(run.value(f"{_WARM_UP}_ratio")),
    ),
    Requirement(
        "best-checkpoint",
        "trainer.test_freq",
        lambda test, run: (
            run.value("trainer.save_freq") > 0 and test > 0 and run.value("trainer.save_freq") % test == 0
        ),
        lambda run: (
            f"must divide trainer.save_freq={run.value('trainer.save_freq')}: {_BEST} compares validated checkpoints"
        ),
        when=lambda run: run.value("trainer.checkpoint_callback_class") == _BEST,
    ),
    Requirement(
        "best-checkpoint",
        f"{ACTOR}.checkpoint.async_save",
        lambda kept, _: not kept,
        f"must be false: {_BEST} keeps finished checkpoints",
        when=lambda run: run.value("trainer.checkpoint_callback_class") == _BEST,
    ),
    Requirement(
        "stages",
        "trainer.total_epochs",
        lambda epochs, run: epochs % run.stages == 0,
        lambda run: f"must be a multiple of the {run.stages} stages of {run.settings.method.name}",
        when=lambda run: run.value(_STEPS) is None,
    ),
    Requirement(
        "stages",
        _STEPS,
        lambda steps, run: steps % run.stages == 0,
        lambda run: f"must be a multiple of the {run.stages} stages of {run.settings.method.name}",
        when=lambda run: run.value(_STEPS) is not None,
    ),
)

#: Keys of the tables, and whether verl reads them in a run by the plugin.
CHECKED = effects(REQUIREMENTS, ENGINE, COUNTS, BATCHES, SCHEDULE)
#: Keys that a plan shows, or that we read elsewhere, and that may have any value.
SHOWN = frozenset(
    (
        *(f"{ACTOR}.optim.{name}" for name in ("lr", "betas", "weight_decay", "clip_grad")),
        f"{ROLLOUT}.temperature",
        f"{ACTOR}.ppo_epochs",
        f"{ACTOR}.use_dynamic_bsz",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz",
        f"{ROLLOUT}.n_gpus_per_node",
        "actor_rollout_ref.model.path",
        "model_engine",
        TRAIN_FILES,
        VAL_FILES,
        "data.train_max_samples",
        "data.val_max_samples",
        "data.seed",
        "data.shuffle",
        "data.apply_chat_template_kwargs",
        "reward.num_workers",
        "trainer.val_before_train",
        "trainer.val_only",
        "trainer.max_actor_ckpt_to_keep",
        "trainer.checkpoint_callback_class",
        "trainer.project_name",
        "trainer.experiment_name",
        "trainer.logger",
    )
)
