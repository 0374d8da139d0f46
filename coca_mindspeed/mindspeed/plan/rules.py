"""What a cluster run must satisfy: MindSpeed-RL's, Megatron's and vLLM-Ascend's own conditions, checked beforehand.

Each rule names the upstream function that would refuse the run, hours later and on the cluster, or that would go wrong
in silence.  Rules are generators over :class:`RunFacts`; a rule that needs whole divisions yields nothing where another
rule already refuses those.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from coca_mindspeed.mindspeed.plan.resolved_config import KEYS, RunFacts


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: the field to change, and what is wrong with its value."""

    field: str
    reason: str

    @property
    def key(self) -> str:
        return KEYS[self.field]


Rule = Callable[[RunFacts], Iterator[Violation]]


def positive_sizes(facts: RunFacts) -> Iterator[Violation]:
    """Sizes below 1, which would end in a division by zero further down."""
    for field in ("npus", "tp", "pp", "cp", "rollout_tp", "rollout_pp", "micro_batch", "mini_batch", "prompts"):
        if getattr(facts, field) < 1:
            yield Violation(field, "must be at least 1")


def tensor_parallel(facts: RunFacts) -> Iterator[Violation]:
    """``TransformerConfig.__post_init__`` (heads, groups), Megatron's ``divide`` (MLP, vocabulary)."""
    for name, size in (
        ("attention heads", facts.heads),
        ("key/value groups", facts.kv_groups),
        ("inner size of the MLP", facts.ffn),
        ("rows of the embedding", facts.vocab),
    ):
        if size % facts.tp:
            yield Violation("tp", f"does not divide the {size} {name}")


def pipeline_parallel(facts: RunFacts) -> Iterator[Violation]:
    """``TransformerConfig.__post_init__``: layers by stages."""
    if facts.layers % facts.pp:
        yield Violation("pp", f"does not divide the {facts.layers} layers")


def context_parallel(facts: RunFacts) -> Iterator[Violation]:
    """Megatron's ``validate_args`` for context parallel; Ulysses also cuts the heads of each tensor-parallel rank.

    ``BaseWorker.dispatch_transfer_dock_data`` pads small batches to TP x CP when they go through ZMQ; the ring cuts
    them into twice as many parts as there are ranks.
    """
    if facts.cp == 1:
        return
    if facts.seq_length % (2 * facts.cp):
        yield Violation("cp", f"twice it does not divide the sequence length {facts.seq_length}")
    if facts.heads % (facts.tp * facts.cp):
        yield Violation("cp", f"{facts.tp} x {facts.cp} ranks do not divide the {facts.heads} attention heads")
    if facts.cp_algorithm == "megatron_cp_algo" and facts.zmq and facts.tp % 2 and not facts.remove_padding:
        yield Violation("remove_padding", "megatron_cp_algo with zmq_communication and an odd TP needs true")


def attention_mask(facts: RunFacts) -> Iterator[Violation]:
    """MindSpeed-LLM's ``_validate_create_attention_mask_in_dataloader``; MindSpeed-RL's page on context parallel."""
    if facts.cp == 1:
        return
    if facts.cp_algorithm == "megatron_cp_algo":
        if facts.attention_mask != "causal":
            yield Violation("attention_mask", "context parallel by ring attention needs causal")
    elif facts.reset_attention_mask and facts.attention_mask != "general":
        yield Violation("attention_mask", "context parallel by Ulysses with reset_attention_mask needs general")


def recomputation(facts: RunFacts) -> Iterator[Violation]:
    """``TransformerConfig.__post_init__`` and ``validate_args`` on activations that are computed twice."""
    if facts.recompute is None:
        return
    if facts.recompute not in ("full", "selective"):
        yield Violation("recompute", "is neither full nor selective")
    elif facts.recompute == "selective":
        if facts.recompute_method is not None:
            yield Violation("recompute_method", "recompute_granularity: selective needs null")
        if facts.recompute_layers is not None:
            yield Violation("recompute_layers", "recompute_granularity: selective needs null")
    else:
        if facts.recompute_method not in ("uniform", "block"):
            yield Violation("recompute_method", "recompute_granularity: full needs uniform or block")
        stage = facts.layers // facts.pp
        if facts.recompute_layers is None or not 1 <= facts.recompute_layers <= stage:
            yield Violation("recompute_layers", f"recompute_granularity: full needs a number from 1 to {stage}")


def npus_by_layout(facts: RunFacts) -> Iterator[Violation]:
    """``validate_rl_args._validate_resource``; the launcher's whole nodes."""
    if facts.npus % facts.model_parallel:
        yield Violation(
            "tp",
            f"{facts.npus} NPUs are not a multiple of TP x PP x CP = {facts.tp} x {facts.pp} x {facts.cp} "
            f"= {facts.model_parallel}",
        )
    if facts.npus % facts.nodes:
        yield Violation("npus", f"is not a multiple of the {facts.nodes} nodes")


def rollout_layout(facts: RunFacts) -> Iterator[Violation]:
    """``validate_rl_args``; ``MegatronStyleVllmWeightContainer._validate_parallel_config``; ``qkv_split_weight``."""
    if facts.rollout_pp != 1:
        yield Violation("rollout_pp", "pipeline parallel rollout is not supported")
        return
    if facts.npus % facts.rollout_tp:
        yield Violation("rollout_tp", f"does not divide the {facts.npus} NPUs")
    # The weight loader floors heads and groups by TP, so that a group is never shared between ranks.
    for name, size in (("attention heads", facts.heads), ("key/value groups", facts.kv_groups)):
        if size % facts.rollout_tp:
            yield Violation("rollout_tp", f"does not divide the {size} {name}")
    if facts.tp > facts.rollout_tp and facts.tp % facts.rollout_tp:
        yield Violation("rollout_tp", f"does not divide the training's TP {facts.tp}, and it is smaller")
    if facts.tp < facts.rollout_tp and (facts.npus // facts.pp) % facts.rollout_tp:
        yield Violation(
            "rollout_tp", f"does not divide the {facts.npus // facts.pp} NPUs of one pipeline stage, and is over TP"
        )


def batch(facts: RunFacts) -> Iterator[Violation]:
    """``validate_rl_args._validate_batch_ratio`` and ``_validate_data_parallel``; minibatches of whole groups."""
    if facts.npus % facts.model_parallel or facts.npus % (facts.rollout_tp * facts.rollout_pp):
        return
    if facts.group < 2:
        yield Violation("group", "a group has at least 2 responses")
        return
    if facts.prompts % facts.dp:
        yield Violation("prompts", f"is not a multiple of the {facts.dp} data-parallel ranks")
    elif facts.responses // facts.dp % facts.micro_batch:
        yield Violation(
            "micro_batch", f"does not divide the {facts.responses // facts.dp} responses of a data-parallel rank"
        )
    if facts.prompts % facts.rollout_dp:
        yield Violation("prompts", f"is not a multiple of the {facts.rollout_dp} rollout engines")
    if facts.prompts % facts.mini_batch:
        yield Violation("mini_batch", f"does not divide the {facts.prompts} prompts of an iteration")
    if facts.mini_batch % facts.dp and facts.prompts % facts.dp == 0:
        # BaseTrainingEngine floors mini_batch_size / dp: an update would be smaller than asked for.
        yield Violation("mini_batch", f"is not a multiple of the {facts.dp} data-parallel ranks")
    if facts.prompts % facts.nodes:
        yield Violation("prompts", f"is not a multiple of the {facts.nodes} nodes, each of which grades its share")


def dispatch_sizes(facts: RunFacts) -> Iterator[Violation]:
    """``validate_rl_args._validate_experience_ratio`` and ``_validate_dispatch_size``; whole groups for our stages.

    In order, ``ActorHybridWorkerBase.update`` takes one dispatch of each rank's share and no more.
    """
    if facts.npus % facts.model_parallel or facts.npus % (facts.rollout_tp * facts.rollout_pp):
        return
    for field, ranks in (
        ("rollout_dispatch", facts.rollout_dp),
        ("logprob_dispatch", facts.dp),
        ("update_dispatch", facts.dp),
        ("advantage_dispatch", 1),
        ("reward_dispatch", facts.nodes),
    ):
        size = getattr(facts, field)
        if size is None:
            continue
        share = facts.responses // ranks
        if size < 1 or share % size:
            yield Violation(field, f"does not divide the {share} responses of a rank")
        elif field in ("advantage_dispatch", "reward_dispatch") and size % facts.group:
            yield Violation(field, f"does not hold whole groups of {facts.group}")
    per_rank = facts.mini_batch * facts.group // facts.dp
    if facts.update_dispatch is not None and per_rank:
        if facts.update_dispatch < per_rank:
            yield Violation("update_dispatch", f"is less than a rank's minibatch of {per_rank} responses")
        elif facts.update_dispatch % per_rank:
            # BaseTrainingEngine.update would make a smaller minibatch of what is left of every dispatch.
            yield Violation("update_dispatch", f"is not a multiple of a rank's minibatch of {per_rank} responses")
    share = facts.responses // facts.dp
    if facts.guarantee_order and facts.update_dispatch is not None and facts.update_dispatch != share:
        yield Violation("update_dispatch", f"with guarantee_order a rank trains that many of its {share} responses")


def lengths(facts: RunFacts) -> Iterator[Violation]:
    """``validate_rl_args``, ``validate_args`` (context), vLLM-Ascend's scheduler, ``rearrange_micro_batches``."""
    longest = facts.max_prompt + facts.max_new
    if longest > facts.context:
        yield Violation(
            "max_new", f"with a prompt of {facts.max_prompt} it is longer than the model's context of {facts.context}"
        )
    if facts.seq_length > facts.context:
        yield Violation("seq_length", f"is longer than the model's context of {facts.context}")
    if facts.max_model_len < facts.seq_length:
        yield Violation("max_model_len", f"is less than megatron_training.seq_length = {facts.seq_length}")
    if facts.max_model_len < longest:
        yield Violation("max_model_len", f"is less than the longest prompt and response together, {longest}")
    if facts.max_batched_tokens < facts.max_model_len:
        yield Violation("max_batched_tokens", f"is less than max_model_len = {facts.max_model_len}")
    if facts.dynamic_batch:
        for field in ("update_tokens", "logprob_tokens"):
            if getattr(facts, field) < longest:
                yield Violation(field, f"cannot hold the longest prompt and response together, {longest}")


def padding(facts: RunFacts) -> Iterator[Violation]:
    """``validate_rl_args`` on ``use_remove_padding``; dynamic batches are packed."""
    if facts.remove_padding and not facts.reset_attention_mask:
        yield Violation("reset_attention_mask", "use_remove_padding needs true")
    if facts.remove_padding and facts.pp > 1 and not facts.no_pad_to_seq_lengths:
        yield Violation("no_pad_to_seq_lengths", "use_remove_padding with pipeline parallel needs true")
    if facts.dynamic_batch and not facts.remove_padding:
        yield Violation("remove_padding", "use_dynamic_bsz packs responses, which needs true")


def precision(facts: RunFacts) -> Iterator[Violation]:
    """``validate_rl_args``: bfloat16 in training and in rollout."""
    if not facts.bf16:
        yield Violation("bf16", "MindSpeed-RL trains in bfloat16 only: needs true")
    if facts.rollout_dtype != "bfloat16":
        yield Violation("rollout_dtype", "MindSpeed-RL samples in bfloat16 only")


def rewards(facts: RunFacts) -> Iterator[Violation]:
    """``validate_rl_args``: a weight for each verifier; groups of partial rollouts are not whole."""
    if facts.verifiers != facts.verifier_weights:
        yield Violation("verifier_weights", f"has {facts.verifier_weights} weights for {facts.verifiers} verifiers")
    if facts.partial_rollout_splits > 1:
        yield Violation("partial_rollout_splits", "cannot be more than 1: groups must be whole")


def sampling(facts: RunFacts) -> Iterator[Violation]:
    """The policy's own distribution, and noise of its own for every prompt and iteration.

    vLLM gives sample ``i`` of a prompt the seed ``seed + i``: the samples of a prompt differ, but those of every other
    prompt, in every iteration, are drawn with the same noise.
    """
    if facts.sampling_seed is not None:
        yield Violation(
            "sampling_seed", "vLLM would draw every prompt's responses with the same noise, iteration by iteration"
        )
    if facts.top_k > 0:
        yield Violation("top_k", "cuts the policy's distribution, whose success rate the confidence states: needs -1")
    if facts.top_p != 1.0:
        yield Violation("top_p", "cuts the policy's distribution, whose success rate the confidence states: needs 1.0")
    if facts.min_p != 0.0:
        yield Violation("min_p", "cuts the policy's distribution, whose success rate the confidence states: needs 0.0")


def temperature(facts: RunFacts) -> Iterator[Violation]:
    """``BaseTrainingEngine.forward_step`` divides the output of every pipeline stage by it, not the logits alone."""
    if facts.temperature != 1.0 and facts.pp > 1:
        yield Violation("temperature", "MindSpeed-RL divides every pipeline stage's output by it: with PP it needs 1.0")


RULES: tuple[Rule, ...] = (
    tensor_parallel,
    pipeline_parallel,
    context_parallel,
    attention_mask,
    recomputation,
    npus_by_layout,
    rollout_layout,
    batch,
    dispatch_sizes,
    lengths,
    padding,
    precision,
    rewards,
    sampling,
    temperature,
)


def violations(facts: RunFacts) -> list[Violation]:
    """Every broken rule; where sizes are below 1, only those."""
    return list(positive_sizes(facts)) or [violation for rule in RULES for violation in rule(facts)]
