"""Checks of a run on verl: values of verl's own keys that the method needs, batch sizes that divide, rows and prompts.

verl has many switches that change its objective, its sampling or the members of a group. Each is listed with the value
that the method needs, and the reason.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from coca_mindspeed.config.checks import same_file
from coca_mindspeed.data.export import record_of
from coca_mindspeed.data.prompts import TemplateKeys, bounded_prompt_tokens, check_template, prompt_messages
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import Condition, DataError, Problem, as_check, find_problems, show_value
from coca_mindspeed.utils.text_formats import value_of
from coca_mindspeed.verl.settings import NAME, TRAINERS, VerlSettings

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron"
CORRECTION = "algorithm.rollout_correction"
TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu"
MINI_BATCH = f"{ACTOR}.ppo_mini_batch_size"
SYNC_STEP = "trainer.v1.separate_async.parameter_sync_step"
TRAIN_FILES, VAL_FILES = "data.train_files", "data.val_files"
_STEPS = "trainer.total_training_steps"


class Requirement(NamedTuple):
    """A key of verl's and the value, or one of a tuple of values, that it must have.

    ``holds`` is the condition, if it is not equality.
    """

    code: str
    key: str
    wanted: Any
    because: str
    holds: Callable[[Any], bool] | None = None

    @property
    def _values(self) -> tuple[Any, ...]:
        return self.wanted if isinstance(self.wanted, tuple) else (self.wanted,)

    def accepts(self, found: Any) -> bool:
        return any(_same(found, each) for each in self._values) if self.holds is None else self.holds(found)

    @property
    def may_be_absent(self) -> bool:
        return self.key in MAY_BE_ABSENT or self.code == "no-effect"

    @property
    def expected(self) -> str:
        return f"must be {' or '.join(map(show_value, self._values))}: {self.because}"


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, bool) or wanted is None or isinstance(wanted, str):
        return found is wanted or (isinstance(wanted, str) and found == wanted)
    return _is_number(found) and math.isclose(found, wanted, rel_tol=1e-12)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_WHOLE = "a success rate needs all responses to a question in one step"
_POLICY = "the confidence states the success rate of the policy's own distribution"
_EVALUATED = "an evaluation takes one sample at temperature 1"
_ONE_TURN = "a response is one turn"
_NO_KL = "the objective has no KL term and so no reference model"
_TRAINED = "rows are checked before training"
_NO_CP = "the plugin is untested with context parallelism"
_MIXES = "scales the confidence's tokens by the answer's"
_OUR_LOSS = "it has no effect, as our loss takes the place of verl's"
_OUR_ADVANTAGES = "it has no effect, as our advantages take the place of verl's"
_OUR_REWARD = "it has no effect, as our reward manager does not read it"
_REQUIRED = (
    ("plugin", "trainer.use_v1", True, "the plugin is one of verl's V1 trainer"),
    ("plugin", "trainer.v1.trainer_mode", tuple(TRAINERS), "verl's own trainers have no confidence"),
    ("plugin", "algorithm.adv_estimator", NAME, "another estimator gives every token the same advantage"),
    ("plugin", "reward.reward_manager.name", NAME, "another one does not parse the confidence"),
    ("plugin", "reward.reward_manager.source", "register", "ours is registered"),
    ("plugin", "reward.custom_reward_function.path", None, "it would get text without special tokens"),
    ("plugin", "reward.reward_model.enable", False, "only the grader decides whether an answer is right"),
    ("objective", "distillation.enabled", False, "the objective has no teacher"),
    ("groups", "algorithm.filter_groups.enable", False, "groups without variance still train the confidence"),
    ("groups", "trainer.v1.sampler.custom_sampler.path", None, _WHOLE),
    ("groups", "trainer.v1.sampler.sync_refill_failed_groups", False, "coca.broken_groups handles them"),
    ("groups", "trainer.v1.sync.parameter_sync_step", 1, _WHOLE),
    ("groups", "trainer.v1.colocate_async.parameter_sync_step", 1, "the rollout sleeps until the update is done"),
    ("groups", "data.gen_batch_size", None, _WHOLE),
    ("groups", "skip.rollout_tq.enable", False, "stored rollouts come from another policy"),
    ("data", "data.filter_overlong_prompts", False, "it drops questions silently"),
    ("data", "data.truncation", "error", "a prompt is never truncated"),
    ("data", "data.custom_cls.path", None, _TRAINED),
    ("data", "data.prompt_key", "prompt", "coca-mindspeed data export verl writes the prompt there"),
    ("groups", f"{ROLLOUT}.over_sample_rate", 0, _WHOLE),
    ("sampling", f"{ROLLOUT}.do_sample", True, _POLICY),
    ("sampling", f"{ROLLOUT}.top_k", -1, _POLICY),
    ("sampling", f"{ROLLOUT}.top_p", 1, _POLICY),
    ("sampling", f"{ROLLOUT}.ignore_eos", False, "a response ends at its end of sequence"),
    ("sampling", f"{ROLLOUT}.multi_turn.enable", False, _ONE_TURN),
    ("sampling", f"{ROLLOUT}.agent.default_agent_loop", "single_turn_agent", _ONE_TURN),
    ("evaluation", f"{ROLLOUT}.val_kwargs.do_sample", True, _EVALUATED),
    ("evaluation", f"{ROLLOUT}.val_kwargs.temperature", 1, _EVALUATED),
    ("evaluation", f"{ROLLOUT}.val_kwargs.top_k", -1, _EVALUATED),
    ("evaluation", f"{ROLLOUT}.val_kwargs.top_p", 1, _EVALUATED),
    ("evaluation", f"{ROLLOUT}.val_kwargs.n", 1, _EVALUATED),
    ("objective", "algorithm.use_kl_in_reward", False, _NO_KL),
    ("objective", f"{ACTOR}.use_kl_loss", False, _NO_KL),
    ("objective", f"{ACTOR}.entropy_coeff", 0, "the objective has no entropy term"),
    ("objective", f"{ACTOR}.strategy", ("fsdp2", "fsdp", "megatron"), "the plugin is untested with others"),
    ("objective", f"{MEGATRON}.context_parallel_size", 1, _NO_CP),
    ("objective", f"{MEGATRON}.dynamic_context_parallel", False, _NO_CP),
    ("objective", "critic.enable", (None, False), "advantages come from groups, not from a critic"),
    ("objective", "trainer.critic_warmup", 0, "there is no critic, and the actor would not be trained"),
    ("objective", f"{CORRECTION}.rollout_is", (None, "token"), f"a weight of the whole response {_MIXES}"),
    ("objective", f"{CORRECTION}.rollout_is_batch_normalize", False, f"the mean weight of a batch {_MIXES}"),
    (
        *("objective", f"{CORRECTION}.rollout_is_threshold", "a number above 0"),
        *("a lower bound too would remove tokens from the objective", lambda value: _is_number(value) and value > 0),
    ),
    ("objective", f"{CORRECTION}.rollout_rs", None, "rejection removes tokens from the objective"),
    ("objective", f"{CORRECTION}.bypass_mode", False, "old log-probs are the trainer's own"),
    # Verl's defaults of keys without effect.
    ("no-effect", f"{ACTOR}.clip_ratio", 0.2, f"{_OUR_LOSS}; set coca.method.clip"),
    ("no-effect", f"{ACTOR}.clip_ratio_low", 0.2, f"{_OUR_LOSS}; set coca.method.clip"),
    ("no-effect", f"{ACTOR}.clip_ratio_high", 0.2, f"{_OUR_LOSS}; set coca.method.clip"),
    ("no-effect", f"{ACTOR}.clip_ratio_c", 3, f"{_OUR_LOSS}; it has no second clip"),
    ("no-effect", f"{ACTOR}.policy_loss.loss_mode", "vanilla", f"{_OUR_LOSS}; coca.method has its settings"),
    ("no-effect", f"{ACTOR}.loss_agg_mode", "token-mean", f"{_OUR_LOSS}; set coca.method.loss_aggregation"),
    ("no-effect", f"{ACTOR}.loss_scale_factor", None, f"{_OUR_LOSS}; set coca.method.loss_aggregation"),
    ("no-effect", "algorithm.gamma", 1, _OUR_ADVANTAGES),
    ("no-effect", "algorithm.lam", 1, _OUR_ADVANTAGES),
    (
        *("no-effect", "algorithm.norm_adv_by_std_in_grpo", True),
        f"{_OUR_ADVANTAGES}; set coca.method.advantage_scale",
    ),
    ("no-effect", "algorithm.use_pf_ppo", False, _OUR_ADVANTAGES),
    ("no-effect", "reward.sandbox_fusion.url", None, f"{_OUR_REWARD}; the grader code has a sandbox of its own"),
    ("no-effect", "sandbox_fusion.url", None, f"{_OUR_REWARD}; the grader code has a sandbox of its own"),
    ("no-effect", "custom_reward_function.path", None, f"{_OUR_REWARD}; set coca.grader"),
    (
        "no-effect",
        "reward_model.reward_manager",
        None,
        "it has no effect, as verl's trainer reads reward.reward_manager.name",
    ),
    (
        "no-effect",
        "reward_model.enable",
        (None, False),
        "it has no effect, as verl's trainer reads reward.reward_model",
    ),
)


#: Every key of verl's that the method needs to have one value.
REQUIREMENTS = tuple(Requirement(*row) for row in _REQUIRED)
#: Those that verl's configuration omits: of the other engine, or read by verl's code with the wanted default.
MAY_BE_ABSENT = frozenset(
    (
        *("trainer.v1.sync.parameter_sync_step", "trainer.v1.colocate_async.parameter_sync_step"),
        *(f"{MEGATRON}.context_parallel_size", f"{MEGATRON}.dynamic_context_parallel"),
    )
)


def verl_problems(config: Mapping[str, Any], settings: VerlSettings) -> list[Problem]:
    """All problems of a resolved verl configuration in plain containers, whose section ``coca`` is ``settings``."""
    run = VerlRun(config, settings)
    found = [
        Problem(each.code, each.key, value, each.expected)
        for each in REQUIREMENTS
        if not each.accepts(value := run.value(each.key)) and (value is not None or not each.may_be_absent)
    ]
    conditions = [as_check(each, VerlRun.value) for each in (_method, _batches, _megatrons_warm_up, _best)]
    return [*found, *find_problems(run, (_engine,), (_counts,), (*conditions, _stages, _same_files))]


class VerlRun(NamedTuple):
    """A resolved verl configuration in plain containers, whose section ``coca`` is ``settings``."""

    config: Mapping[str, Any]
    settings: VerlSettings

    def value(self, key: str) -> Any:
        """The value of a dotted key; None if the configuration omits it."""
        return value_of(self.config, key)

    @property
    def trainer(self) -> str:
        """Verl's name of the trainer; an unknown one counts as ``sync``."""
        return TRAINERS.get(str(self.value("trainer.v1.trainer_mode")), "sync")

    @property
    def separate(self) -> bool:
        """Whether devices of their own sample."""
        return self.trainer == "separate_async"

    @property
    def rollout_devices(self) -> int:
        """Devices that sample and do not train; of the other trainers, those that do both."""
        each = self.value(f"{ROLLOUT}.n_gpus_per_node") or self.value("trainer.n_gpus_per_node")
        return int(self.value(f"{ROLLOUT}.nnodes") * each) if self.separate else self.devices

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

    @property
    def devices(self) -> int:
        return int(self.value("trainer.n_gpus_per_node") * self.value("trainer.nnodes"))

    @property
    def sizes_of_a_rank(self) -> tuple[str, str]:
        """Keys of the parallel sizes within a data-parallel rank."""
        if self.megatron:
            return f"{MEGATRON}.tensor_model_parallel_size", f"{MEGATRON}.pipeline_model_parallel_size"
        return f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"

    @property
    def devices_of_a_rank(self) -> int:
        """Devices of one data-parallel rank: TP x PP, or FSDP's sequence parallel size."""
        first, second = map(self.value, self.sizes_of_a_rank)
        return int(first * second if self.megatron else max(first, second))

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return self.devices // self.devices_of_a_rank

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.value("data.max_prompt_length") + self.value("data.max_response_length"))


def _engine(run: VerlRun) -> Iterator[Problem]:
    """The sections of the engine must be those of the strategy: verl's ``model_engine`` chooses them."""
    key = f"{ACTOR}.strategy"
    if run.megatron and run.value(MEGATRON) is None:
        fix = "take coca_qwen25_7b_megatron, or write {override /model_engine: megatron} into the defaults of your file"
        yield Problem("engine", key, run.value(key), "must be fsdp2 or fsdp with model_engine: dp", fix)
    if not run.megatron and run.value(f"{ACTOR}.fsdp_config") is None:
        fix = "take a run without megatron in its name, or model_engine: dp"
        yield Problem("engine", key, run.value(key), "must be megatron with model_engine: megatron", fix)


_COUNTS = (
    *("data.train_batch_size", "data.max_prompt_length", "data.max_response_length", MINI_BATCH, f"{ROLLOUT}.n"),
    *(f"{ROLLOUT}.tensor_model_parallel_size", "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.total_epochs"),
)


def _counts(run: VerlRun) -> Iterator[Problem]:
    """The numbers that the conditions below divide by or compare."""
    optional = {TOKENS: run.dynamic, SYNC_STEP: run.separate, _STEPS: run.value(_STEPS) is not None}
    keys = [*_COUNTS, *run.sizes_of_a_rank, *(key for key, used in optional.items() if used)]
    for key in keys:
        found = run.value(key)
        if type(found) is not int or found < 1:
            yield Problem("count", key, found, "must be a whole number of 1 or more")


def _batches(run: VerlRun) -> Iterator[Condition]:
    """Batch-size checks, in dependency order."""
    value = run.value
    prompts, mini, group = value("data.train_batch_size"), value(MINI_BATCH), value(f"{ROLLOUT}.n")
    yield "group-size", f"{ROLLOUT}.n", group >= 2, "must be 2 or more: a success rate needs a group"
    # verl would fill the last mini-batch up with rows of its own, and the mean would count them.
    yield "mini-batch", MINI_BATCH, prompts % mini == 0, f"must divide data.train_batch_size {prompts}"
    devices, size = run.devices, run.devices_of_a_rank
    product = f"TP x PP = {size} " if run.megatron else ""
    yield "devices", run.sizes_of_a_rank[0], devices % size == 0, f"{product}must divide the {devices} devices"
    tensor = f"{ROLLOUT}.tensor_model_parallel_size"
    for number in {devices, run.rollout_devices}:
        yield "devices", tensor, number % value(tensor) == 0, f"must divide the {number} devices"
    if run.separate:
        nodes, backend = f"{ROLLOUT}.nnodes", f"{ROLLOUT}.checkpoint_engine.backend"
        yield "devices", nodes, run.rollout_devices > 0, "must be 1 or more: devices of their own sample"
        yield "devices", backend, value(backend) != "naive", "must carry weights to other devices: nccl, hccl, nixl"
        updates = value(SYNC_STEP)
        whole = f"must be {SYNC_STEP} = {updates} times {MINI_BATCH} = {mini}"
        yield "mini-batch", "data.train_batch_size", prompts == updates * mini, whole
        prompts = mini
    if devices % size:
        return
    ranks = run.ranks
    shared = f"of {group} responses must divide among {ranks} data-parallel ranks"
    yield "mini-batch", MINI_BATCH, mini * group % ranks == 0, shared
    if mini * group % ranks or group < 2:
        return
    if run.dynamic:
        sequence = 1 if run.megatron else size
        reason = f"times {sequence} devices must hold the longest sequence, {run.longest} tokens"
        yield "packing", TOKENS, value(TOKENS) * sequence >= run.longest, reason
    sizes = [(f"{ACTOR}.ppo_micro_batch_size_per_gpu", run.dynamic, mini)]
    dynamic = value(f"{ROLLOUT}.log_prob_use_dynamic_bsz")
    sizes.append((f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", dynamic, prompts))
    for key, unused, questions in sizes:
        rows, micro = questions * group // ranks, value(key)
        fix = f"or set {ACTOR}.use_dynamic_bsz=true"
        yield "micro-batch", key, unused or (micro and rows % micro == 0), f"must divide a rank's {rows} rows", fix


def _method(run: VerlRun) -> Iterator[Condition]:
    key, weights = f"{CORRECTION}.rollout_is", run.value(f"{CORRECTION}.rollout_is")
    earlier = f"must be token with {run.trainer}: earlier weights sampled the responses"
    yield "objective", key, weights is not None or run.trainer == "sync", earlier
    # Without them verl leaves the weights out and says nothing.
    key = f"{ROLLOUT}.calculate_log_probs"
    yield "objective", key, weights is None or run.value(key), f"must be true for {CORRECTION}.rollout_is={weights}"


def _megatrons_warm_up(run: VerlRun) -> Iterator[Condition]:
    """Megatron's ``OptimizerParamScheduler`` asserts, in the workers and without a message, that a warm-up ends."""
    optim = f"{ACTOR}.optim"
    length, ratio = f"{optim}.lr_warmup_steps", f"{optim}.lr_warmup_steps_ratio"
    warm_up, share = run.value(length), run.value(ratio)
    steps = run.value(f"{optim}.lr_decay_steps") or run.value(_STEPS)
    if run.megatron and _is_number(warm_up) and warm_up > 0:
        reason = f"must be below the {steps} steps of the schedule; 0 for a --trial"
        yield "warm-up", length, steps is None or warm_up < steps, reason
    elif run.megatron and _is_number(share):
        yield "warm-up", ratio, share < 1, "must be below 1: the warm-up must end before the run does"


def _best(run: VerlRun) -> Iterator[Condition]:
    key, mine = "trainer.checkpoint_callback_class", "coca_mindspeed.verl.checkpoints.BestCheckpoint"
    if run.value(key) != mine:
        return
    save, test, kept = run.value("trainer.save_freq"), run.value("trainer.test_freq"), f"{ACTOR}.checkpoint.async_save"
    compared = f"must divide trainer.save_freq={save}: {mine} compares validated checkpoints"
    yield "best-checkpoint", "trainer.test_freq", save > 0 and test > 0 and save % test == 0, compared
    yield "best-checkpoint", kept, not run.value(kept), f"must be false: {mine} keeps finished checkpoints"


def _stages(run: VerlRun) -> Iterator[Problem]:
    stages = len(run.settings.method.training_method.stages)
    key = "trainer.total_epochs" if run.value(_STEPS) is None else _STEPS
    if run.value(key) % stages:
        reason = f"must be a multiple of the {stages} stages of {run.settings.method.name}"
        yield Problem("stages", key, run.value(key), reason)


def _same_files(run: VerlRun) -> Iterator[Problem]:
    without = "set trainer.test_freq=-1 and trainer.val_before_train=false"
    for train in run.files(TRAIN_FILES) if run.evaluates else ():
        for evaluate in run.files(VAL_FILES):
            yield from same_file(TRAIN_FILES, train, VAL_FILES, evaluate, without)


def check_rows(
    rows: Sequence[Mapping[str, Any]], what: str, system_prompt: str | None, tokenizer: Any, max_tokens: int
) -> list[Record]:
    """Return the records of all rows of a data set that verl has read.

    ``what`` is ``data.train_files`` or ``data.val_files``; a file made for another ``system_prompt`` is refused.
    ``max_tokens`` is ``data.max_prompt_length``; verl silently cuts a longer prompt.
    """
    records = []
    for number, row in enumerate(rows, start=1):
        record = record_of(row.get("extra_info"), f"{what}: row {number}")
        wanted = prompt_messages(record, system_prompt)
        if (found := [dict(message) for message in row["prompt"]]) != wanted:
            raise DataError(
                f"{record.name} has another prompt than the method's: expected "
                f"{_shown(wanted)}, found {_shown(found)}; export the file for this method "
                "(coca-mindspeed data export verl --prompt)"
            )
        records.append(record)
    for _ in bounded_prompt_tokens(tokenizer, records, system_prompt, max_tokens, "data.max_prompt_length"):
        pass
    return records


def check_prompts(
    records: Sequence[Record], system_prompt: str | None, tokenizer: Any, path: str, settings: VerlSettings
) -> None:
    """Check the prompts that the chat template renders; see ``check_template``.

    ``data.apply_chat_template_kwargs`` is written into the template of ``tokenizer``; ``path`` is the model's.
    """
    keys = TemplateKeys(
        variables="data.apply_chat_template_kwargs",
        allow_open_thinking="coca.allow_open_thinking",
        day="give the template's own variable a date by data.apply_chat_template_kwargs (Llama 3.1: date_string), or "
        "write the date into the template",
    )
    model = f"actor_rollout_ref.model.path={path}"
    check_template(tokenizer, records, system_prompt, model, keys, allow_open_thinking=settings.allow_open_thinking)


def _shown(messages: Sequence[Mapping[str, str]]) -> str:
    return " | ".join(f"{message.get('role')}: {message.get('content', '')!r:.60}" for message in messages)
