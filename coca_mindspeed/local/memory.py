"""Memory estimate of a local run before its model is loaded.

The engine's passes run once on PyTorch's fake tensors, and live bytes are counted: the estimate follows the code in
every mode, at no memory, and takes seconds to a minute of processor time.
"""

import bisect
import copy
import functools
import math
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from coca_mindspeed.algorithm.advantages import SegmentMasks
from coca_mindspeed.algorithm.objective import segment_objective
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import CocaError
from coca_mindspeed.local.activation_checkpointing import checkpoint_activations
from coca_mindspeed.local.attention import most_matmul_tokens, suggest_eager_attention, use_fast_attention
from coca_mindspeed.local.device import choose_device, resolve_dtype
from coca_mindspeed.local.lm_head import add_embedding_gradients
from coca_mindspeed.local.log_probs import ResponseBatch
from coca_mindspeed.local.lora import add_adapters
from coca_mindspeed.local.optimizer import moments_bytes, step_bytes
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.respond import largest_evaluation_batch
from coca_mindspeed.local.sampler import Decoder, draw
from coca_mindspeed.local.update import largest_group_sizes

#: CPU heap fragmentation as a share of a backward pass's memory, where malloc keeps freed memory: measured 10 to
#: 13% in the first pass and 15 to 42% in later ones.
_FRAGMENTS = 0.25
#: CPU memory lost to freed chunks of logits, in chunks: measured 1 to 3 if a pass holds little else.
_LOST_CHUNKS = 1.75
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # names of one setting
_SHORTEST = 2  # tokens; the prompt's states predict the first one of a response


class NotEstimatedError(CocaError):
    """A model's passes cannot run on fake tensors."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a run holds on its device, without the process and its libraries.

    Attributes:
        parameters: number of parameters, adapters included.
        trained: number of trained parameters.
        weights: of the model.
        gradients: of trained parameters, during the update only.
        moments: AdamW's two, and the scales of 8-bit ones.
        step: peak of the optimizer step besides these three.
        update: peak of a microbatch's backward pass besides these three.
        cache: KV cache when the longest responses end.
        rollout: peak of sampling besides weights and moments, cache included.
        merged: float32 model with merged adapters at the end, if it lies on the device.
    """

    parameters: int
    trained: int
    weights: int
    gradients: int
    moments: int
    step: int
    update: int
    cache: int
    rollout: int
    merged: int = 0

    @property
    def update_peak(self) -> int:
        return self.weights + self.gradients + self.moments + max(self.update, self.step)

    @property
    def export_peak(self) -> int:
        return self.weights + self.moments + self.merged

    @property
    def rollout_peak(self) -> int:
        return self.weights + self.moments + self.rollout


def estimate_memory(config: RunConfig, architecture: Any) -> MemoryEstimate:
    """Estimate the memory of a run on a model of this architecture (its Hugging Face configuration).

    Prompts and responses have their maximal lengths and every token has a gradient; with ``trainer.microbatch_tokens``,
    the shapes of :func:`largest_microbatches` are tried.

    Raises:
        NotEstimatedError: a pass depends on the contents of tensors, or the model cannot be built.
    """
    try:
        return _estimate(config, architecture)
    except (CocaError, MemoryError):
        raise
    except Exception as error:  # of the architecture's code
        reason = next(iter(str(error).splitlines()), "")
        kind = getattr(architecture, "model_type", type(architecture).__name__)
        raise NotEstimatedError(
            f"the memory of a run of {kind} was not estimated: {type(error).__name__}: {reason}"
        ) from error


def _estimate(config: RunConfig, architecture: Any) -> MemoryEstimate:
    policy = _fake_policy(config, architecture)
    with FakeTensorMode(), _AllocationCounter(_experts(architecture)) as live:
        _allocate_on_cpu(policy.model)
        parameters = list(policy.model.parameters())
        trained = policy.trained_parameters()
        weights = live.now
        update, largest = 0, largest_microbatches(config)
        responses = config.rollout.prompts // config.trainer.minibatches * config.rollout.group_size
        for microbatch in largest:
            before = live.start()
            if sum(microbatch.group_sizes) < responses:  # gradients of earlier microbatches exist
                for parameter in trained:
                    parameter.grad = torch.empty_like(parameter)
            update_pass(responses_of(policy, microbatch, config))
            update = max(update, live.most - before + _fragments(policy, config, microbatch, live.most - before))
            for parameter in trained:
                parameter.grad = None
        adapters = 0 if policy.adapters is None else sum(p.numel() for p in trained)
        plain = sum(p.numel() for p in parameters) - adapters
        gradients = sum(p.numel() * p.element_size() for p in trained)
        moments = moments_bytes(policy, config.optimizer.name)
        step = step_bytes(policy, config.optimizer.name, choose_device(config.trainer.device))
        before = live.start()
        cache = max(rollout_pass(policy, config, *batch) for batch in _sampled_at_once(config))
        rollout = live.most - before
    return MemoryEstimate(
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in trained),
        weights=weights,
        gradients=gradients,
        moments=moments,
        step=step,
        update=update - gradients,
        cache=cache,
        rollout=rollout,
        merged=4 * plain if adapters and choose_device(config.trainer.device).type == "cpu" else 0,
    )


def _fragments(policy: Policy, config: RunConfig, microbatch: "LargestMicrobatch", held: int) -> int:
    """Bytes of a CPU's memory that a backward pass leaves unused between tensors."""
    if choose_device(config.trainer.device).type != "cpu":
        return 0
    layer, tokens = policy.lm_head, sum(microbatch.group_sizes) * microbatch.response
    chunk = 0 if layer.fits_one_chunk(tokens) else 4 * layer.chunk_of(tokens) * policy.vocabulary
    return int(max(_FRAGMENTS * held, _LOST_CHUNKS * chunk))


def _experts(architecture: Any) -> int | None:
    """Number of experts that a token is routed among; None: the model has none."""
    text = architecture.get_text_config()
    counts = (getattr(text, name, None) for name in _EXPERTS)
    return next((count for count in counts if isinstance(count, int) and count > 0), None)


class _AllocationCounter(TorchDispatchMode):
    """Counts bytes of live storages and their peak; answers data-dependent operations.  Experts get equal shares."""

    def __init__(self, experts: int | None = None) -> None:
        super().__init__()
        self._experts = experts
        self._indices: set[int] = set()  # storages that hold 0, 1, 2, ...
        self.now = 0
        self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].dtype == torch.bool:
                return False  # "no padding": prompts usually differ in length
            if args[0].untyped_storage()._cdata in self._indices:
                return args[0].storage_offset()
        nonzero = func is torch.ops.aten.nonzero.default
        result = self._nonzero(args[0]) if nonzero else func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _nonzero(self, of: Tensor) -> Tensor:
        """Indices ``[n, dimensions]``: every token has a gradient, every expert its share of the tokens."""
        if of.dim() == 1:
            count = self._experts if of.dtype == torch.bool and self._experts else len(of)  # or the experts in use
            found = torch.arange(count, device=of.device)[:, None]
            self._indices.add(found.untyped_storage()._cdata)
            return found
        if self._experts is None:
            raise RuntimeError("the number of elements of a mask that are true is not known")
        return torch.zeros(math.ceil(of.numel() / self._experts), of.dim(), dtype=torch.long, device=of.device)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._indices.discard(key)
        self.now -= size

    def start(self) -> int:
        """Reset the peak; return the live bytes."""
        self.most = self.now
        return self.now


def _fake_policy(config: RunConfig, architecture: Any) -> Policy:
    """The policy as it is loaded, on the meta device."""
    architecture = copy.deepcopy(architecture)
    architecture._experts_implementation = "eager"  # transformers 5: its grouped products have no fake float32 kernel
    # Flash attention has no fake kernel and needs no more memory than PyTorch's.
    attention = "sdpa" if config.model.attention == "flash_attention_2" else config.model.attention
    with torch.device("meta"):
        with suggest_eager_attention(config.model.attention, f"model.path={config.model.path}"):
            model = AutoModelForCausalLM.from_config(architecture, attn_implementation=attention, dtype=torch.float32)
        device = choose_device(config.trainer.device)
        use_fast_attention(model, device)
        add_embedding_gradients(model, device)
        model.eval()
        text: Any = None  # not used
        policy = Policy(model, None, text, (1,), 0, getattr(torch, resolve_dtype(config.model, device)))
        if config.model.gradient_checkpointing:
            checkpoint_activations(model)
        add_adapters(policy, config.model.lora, seed=0)
    return policy


def _allocate_on_cpu(model: torch.nn.Module) -> None:
    """Replace meta tensors by CPU tensors, tied ones by the same, plain attributes (GPT-J's positions) included."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in moved:
                there = torch.empty(parameter.shape, dtype=parameter.dtype)
                moved[id(parameter)] = torch.nn.Parameter(there, requires_grad=parameter.requires_grad)
            setattr(module, name, moved[id(parameter)])
        plain = [(name, value) for name, value in vars(module).items() if isinstance(value, Tensor)]
        for name, buffer in [*module.named_buffers(recurse=False), *plain]:
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


class LargestMicrobatch(NamedTuple):
    """Tokens of each prompt and response, and the responses of each prompt."""

    prompt: int
    response: int
    group_sizes: list[int]


def largest_microbatches(config: RunConfig) -> list[LargestMicrobatch]:
    """The microbatches that may need most memory.

    With ``trainer.microbatch_tokens`` these are the longest responses to the longest prompts, and what fits if
    responses or prompts are shorter: one more row, the most rows on shared prompts (counted once, but their keys and
    values are held for each row), one more prompt, and on a CPU the longest texts attended to by matrix products.
    """
    rollout, prompts = config.rollout, config.rollout.prompts // config.trainer.minibatches
    longest_prompt, longest = rollout.max_prompt_tokens, rollout.max_new_tokens

    def sizes_at(response: int, prompt: int) -> list[int]:
        return largest_group_sizes(prompts, rollout.group_size, response, prompt, config.trainer)

    def with_rows(rows: int, prompt: int) -> LargestMicrobatch:
        """The longest responses of which at least ``rows`` fit."""
        shorter = range(_SHORTEST + 1, longest + 1)
        length = _SHORTEST + bisect.bisect_left(shorter, True, key=lambda n: sum(sizes_at(n, prompt)) < rows)
        return LargestMicrobatch(prompt, length, sizes_at(length, prompt))

    found = [LargestMicrobatch(longest_prompt, longest, sizes_at(longest, longest_prompt))]
    limit = config.trainer.microbatch_tokens
    if limit is None:
        return found
    shared = config.trainer.share_prompts
    rows = sum(found[0].group_sizes)
    many = sizes_at(_SHORTEST, longest_prompt)
    if sum(many) > rows:
        found.append(with_rows(rows + 1, longest_prompt))
        if shared:
            found.append(with_rows(sum(many), longest_prompt))
    beside_short = sizes_at(longest, 1)
    if sum(beside_short) > rows:
        copies = len(beside_short) if shared else sum(beside_short)
        room = limit - sum(beside_short) * longest
        found.append(LargestMicrobatch(min(longest_prompt, room // copies), longest, beside_short))
    more = len(many) + 1
    short_prompt = limit // more - _SHORTEST * rollout.group_size
    if shared and more <= prompts and short_prompt > 0:
        found.append(with_rows(more * rollout.group_size, min(longest_prompt, short_prompt)))
    before = longest_prompt if shared else 0
    matmul_tokens = most_matmul_tokens(before) + 1 - (longest_prompt - before)  # the last token is not run
    if choose_device(config.trainer.device).type == "cpu" and _SHORTEST <= matmul_tokens < longest:
        sizes = sizes_at(matmul_tokens, longest_prompt)
        if sum(sizes) > rows:
            found.append(LargestMicrobatch(longest_prompt, matmul_tokens, sizes))
    return found


def update_pass(responses: ResponseBatch) -> None:
    """Run one microbatch forwards and backwards."""
    ones = torch.ones_like(responses.token_ids, dtype=torch.float32)
    objective_of = functools.partial(
        segment_objective, old_log_probs=ones, advantages=ones, masks=SegmentMasks(ones.bool(), ~ones.bool())
    )
    responses.backward(lambda log_probs: objective_of(log_probs).loss)


def responses_of(policy: Policy, microbatch: LargestMicrobatch, config: RunConfig) -> ResponseBatch:
    """A microbatch of fake responses, no two of which share a prefix."""
    return ResponseBatch(
        policy,
        _prompts(len(microbatch.group_sizes), microbatch.prompt),
        torch.ones(sum(microbatch.group_sizes), microbatch.response, dtype=torch.long, device=policy.device),
        temperature=config.rollout.temperature,
        share_prompts=config.trainer.share_prompts,
        group_sizes=microbatch.group_sizes,
    )


def _sampled_at_once(config: RunConfig) -> list[tuple[int, int]]:
    """(prompts, responses per prompt) of the largest batch of a step, and of an evaluation if there is one."""
    held_out = largest_evaluation_batch(config)
    return [(prompts_at_once(config), config.rollout.group_size), *([(held_out, 1)] if held_out else [])]


def prompts_at_once(config: RunConfig) -> int:
    """Prompts of a step whose groups are sampled as one batch."""
    rollout, limit = config.rollout, config.rollout.batch_responses
    return rollout.prompts if limit is None else min(rollout.prompts, max(1, limit // rollout.group_size))


def rollout_pass(policy: Policy, config: RunConfig, prompts: int, group_size: int) -> int:
    """Sample one batch, only the steps that grow the cache; return the cache's final bytes."""
    rollout, prompt = config.rollout, config.rollout.max_prompt_tokens
    with torch.no_grad(), policy.autocast():
        decoder = Decoder(policy, _prompts(prompts, prompt), rollout.max_new_tokens)
        row_of = torch.arange(prompts).repeat_interleave(group_size)
        draw(policy, decoder.logits, rollout.temperature, row_of=row_of)
        decoder.keep(row_of)  # no response shares a row
        token = torch.ones(prompts * group_size, 1, dtype=torch.long)
        while decoder.width < prompt + rollout.max_new_tokens - 1:  # the last token is drawn and not run
            decoder.skip_to(prompt + rollout.max_new_tokens - 2)
            decoder.step(token)
            draw(policy, decoder.logits, rollout.temperature)
        return decoder.cache.nbytes()


def _prompts(count: int, tokens: int) -> list[list[int]]:
    """Prompts of maximal length but one, so that padding is needed, and without a common prefix."""
    return [[int(n > 0)] * (tokens - (n == 0 and count > 1 and tokens > 1)) for n in range(count)]
