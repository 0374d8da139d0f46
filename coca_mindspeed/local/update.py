"""The update of a policy: AdamW, log-probs of given responses with gradient, and one step's microbatches."""

import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from coca_mindspeed.algorithm.advantages import SegmentMasks
from coca_mindspeed.algorithm.objective import Objective, segment_objective
from coca_mindspeed.config.schema import OptimizerConfig, RunConfig, TrainerConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.lm_head import TokenScores, scores_of_logits
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prefill import common_prefix_length, pad_left, positions_of, prefill_prompts
from coca_mindspeed.local.sampler import Rollout
from coca_mindspeed.scoring.rollout import Credited
from coca_mindspeed.utils.packages import require


def require_optimizer(config: OptimizerConfig, device: torch.device) -> None:
    """Raise ConfigError if bitsandbytes is needed and missing, or does not support the device."""
    if config.name == "adamw_8bit":
        where = f"optimizer.name={config.name}"
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"{where}: bitsandbytes computes on cpu and cuda, not {device.type}; use adamw")
        require("bitsandbytes", purpose=where)


def build_optimizer(policy: Policy, config: OptimizerConfig) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.name == "adamw_8bit":
        return _build_8_bit(policy, settings)
    fused = policy.device.type in ("cpu", "cuda") or None  # one kernel for all parameters
    return torch.optim.AdamW(policy.trained_parameters(), fused=fused, **settings)


def _build_8_bit(policy: Policy, settings: dict[str, Any]) -> torch.optim.Optimizer:
    bitsandbytes: Any = importlib.import_module("bitsandbytes")

    class AdamW(bitsandbytes.optim.AdamW):
        """Each group sets the bits of its moments; the library's own setting is global."""

        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            return {**super().get_config(gindex, pindex, group), "optim_bits": group["optim_bits"]}

    # Most rows of an embedding have no gradient in a step: where a second moment is rounded to 0, the rest of the first
    # moment would be divided by eps alone.  Of small tensors the library itself keeps moments of 32 bits.
    embedding = policy.model.get_input_embeddings().weight
    bits: dict[int, list[torch.nn.Parameter]] = {8: [], 32: []}
    for parameter in policy.trained_parameters():
        bits[32 if parameter is embedding else 8].append(parameter)
    groups = [{"params": parameters, "optim_bits": count} for count, parameters in bits.items() if parameters]
    optimizer: torch.optim.Optimizer = AdamW(groups, optim_bits=8, **settings)
    return optimizer


@dataclass(frozen=True)
class ResponseBatch:
    """Responses to score; :mod:`coca_mindspeed.local.lm_head` bounds the logits in memory."""

    policy: Policy
    prompts: Sequence[Sequence[int]]
    token_ids: Tensor  # int64 `[B, T]`, group by group; results behind a response's end are meaningless
    temperature: float  # as in sampling
    share_prompts: bool = True  # run each prompt once; its responses attend to its keys and values, gradient included
    group_sizes: Sequence[int] | None = None  # rows of each prompt, if groups differ in size

    def scores(self) -> TokenScores:
        """Log-prob and entropy of every response token, float32 ``[B, T]`` each."""
        with self.policy.autocast():
            states = self._states()
            if not self._fits_one_chunk:
                return self.policy.lm_head.scores(states, self.token_ids, self._sampling_logits)
            logits = self.policy.lm_head.logits(states)
        return scores_of_logits(self._sampling_logits(logits), self.token_ids)

    def backward(self, loss_of: Callable[[Tensor], Tensor]) -> TokenScores:
        """Accumulate the gradient of a loss; return the scores, detached.  Logits are computed once.

        ``loss_of`` maps log-probs ``[B, T]`` to a sum over tokens; each term depends on one token's log-prob.  It may
        be called several times; the last call has the log-probs of all tokens.
        """
        if self._fits_one_chunk:
            log_probs, entropy = self.scores()
            loss_of(log_probs).backward()
            return TokenScores(log_probs.detach(), entropy)
        with self.policy.autocast():
            return self.policy.lm_head.backward(self._states(), self.token_ids, self._sampling_logits, loss_of)

    @cached_property
    def _prompt_of(self) -> Tensor:
        """The prompt of each response, int64 ``[B]``."""
        prompts, rows = len(self.prompts), len(self.token_ids)
        sizes = [rows // prompts] * prompts if self.group_sizes is None else self.group_sizes
        if len(sizes) != prompts or sum(sizes) != rows:
            raise ValueError(f"group_sizes {list(sizes)} should name {prompts} prompts and {rows} rows in all")
        return torch.tensor([p for p, size in enumerate(sizes) for _ in range(size)], device=self.policy.device)

    @property
    def _fits_one_chunk(self) -> bool:
        return self.policy.lm_head.fits_one_chunk(self.token_ids.numel())

    def _sampling_logits(self, logits: Tensor) -> Tensor:
        return self.policy.sampling_logits(logits, self.temperature)

    def _states(self) -> Tensor:
        """Hidden states that predict each response token, ``[B, T, hidden]``."""
        groups = len(self._prompt_of) > len(self.prompts)
        sharing = self.policy.sharing if self.share_prompts else "none"
        # With nothing to share, a separate prefill would be one more pass and save none.
        if sharing != "none" and (groups or common_prefix_length(self.prompts, sharing)):
            return self._states_behind_prefill()
        policy, rows = self.policy, self._prompt_of
        ids, mask = pad_left(self.prompts, policy.pad_id, policy.device)
        ids = torch.cat([ids[rows], self.token_ids[:, :-1]], dim=1)
        if mask is not None:
            mask = torch.nn.functional.pad(mask[rows], (0, self.token_ids.shape[1] - 1), value=True)
        states = policy.lm_head.hidden_states(
            input_ids=ids,
            # Without an explicit mask, transformers looks for packed sequences and builds a mask.
            attention_mask=torch.ones_like(ids, dtype=torch.bool) if mask is None else mask,
            position_ids=positions_of(mask, ids),
            use_cache=False,
        )
        return states[:, -self.token_ids.shape[1] :]

    def _states_behind_prefill(self) -> Tensor:
        policy, rows, width = self.policy, self._prompt_of, self.token_ids.shape[1]
        forward, cache = policy.lm_head.hidden_states, DynamicCache(config=policy.model.config)
        started = prefill_prompts(forward, self.prompts, cache, policy.pad_id, policy.device, policy.sharing)
        first = _take_rows(started.output[:, -1:], rows)
        if width == 1:
            return first
        for layer in cache.layers:
            layer.keys, layer.values = _take_rows(layer.keys, rows), _take_rows(layer.values, rows)
        mask = started.mask
        if mask is not None:
            mask = torch.nn.functional.pad(mask[rows], (0, width - 1), value=True)
        states = forward(
            input_ids=self.token_ids[:, :-1],
            attention_mask=mask,
            position_ids=started.lengths[rows, None] + torch.arange(width - 1, device=policy.device),
            cache=cache,
            use_cache=True,
        )
        return torch.cat([first, states], dim=1)


def _take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """``tensor[rows]``; a CPU's index_select is faster, a GPU's gradient by brackets is deterministic."""
    return tensor.index_select(0, rows) if tensor.device.type == "cpu" else tensor[rows]


#: Overhead of a pass in tokens: the minimum (a small model on a CPU), and a share of a full pass, so that large
#: microbatches are few.
_PASS_OVERHEAD_TOKENS, _PASS_OVERHEAD_SHARE = 256, 1 / 16


def microbatches(
    prompts: Sequence[int],
    group_size: int,
    lengths: Sequence[int],
    prompt_lengths: Sequence[int],
    config: TrainerConfig,
) -> list[list[int]]:
    """Split a minibatch by ``trainer.microbatch_prompts`` or ``trainer.microbatch_tokens``; without either: one part.

    Returns the rows of each, ascending; row ``p * group_size + g`` is response g to prompt p, and ``lengths`` and
    ``prompt_lengths`` are those of the whole step.  By tokens, padded rows and prompts together have at most so many; a
    longer response is a microbatch of its own.  Responses fill the microbatches in the order of their length, or by
    groups (longest response first); the order that costs less, padding included, is taken.
    """

    def rows_of(prompt: int) -> range:
        return range(prompt * group_size, (prompt + 1) * group_size)

    if config.microbatch_tokens is None:
        size = config.microbatch_prompts or len(prompts)
        return [[row for p in prompts[i : i + size] for row in rows_of(p)] for i in range(0, len(prompts), size)]

    rows = [row for prompt in prompts for row in rows_of(prompt)]
    if config.share_prompts:
        longest = {prompt: max(lengths[row] for row in rows_of(prompt)) for prompt in prompts}
        by_group = sorted(rows, key=lambda row: (-longest[row // group_size], row // group_size, -lengths[row]))
        orders = [by_group, sorted(rows, key=lambda row: (-lengths[row], -prompt_lengths[row // group_size]))]
    else:
        orders = [sorted(rows, key=lambda row: -lengths[row] - prompt_lengths[row // group_size])]
    pass_overhead = max(_PASS_OVERHEAD_TOKENS, int(_PASS_OVERHEAD_SHARE * config.microbatch_tokens))
    splits = [list(_fill(order, group_size, lengths, prompt_lengths, config)) for order in orders]
    best = min(splits, key=lambda split: sum(tokens + pass_overhead for tokens, _ in split))
    return [sorted(part) for _, part in best]


def largest_group_sizes(
    prompts: int, group_size: int, length: int, prompt_length: int, config: TrainerConfig
) -> list[int]:
    """Group sizes of the microbatch with the most rows, if all responses and prompts have these lengths."""
    if config.microbatch_tokens is None:
        return [group_size] * min(prompts, config.microbatch_prompts or prompts)
    each, shared = (length, prompt_length) if config.share_prompts else (length + prompt_length, 0)
    whole, room = divmod(config.microbatch_tokens, group_size * each + shared)
    if whole >= prompts:
        return [group_size] * prompts
    rest = max(0, room - shared) // each
    return [group_size] * whole + [rest] * (rest > 0) or [1]


def _fill(
    order: Sequence[int], group_size: int, lengths: Sequence[int], prompt_lengths: Sequence[int], config: TrainerConfig
) -> Iterator[tuple[int, list[int]]]:
    """Fill passes with rows, in order; yield the tokens and the rows of each pass."""
    assert config.microbatch_tokens is not None
    part: list[int] = []
    prompts: set[int] = set()
    tokens = response = prompt = 0
    for row in order:
        owner = row // group_size
        response, prompt = max(response, lengths[row]), max(prompt, prompt_lengths[owner])
        copies = len(prompts | {owner}) if config.share_prompts else len(part) + 1
        grown = (len(part) + 1) * response + copies * prompt
        if part and grown > config.microbatch_tokens:
            yield tokens, part
            part, prompts, response, prompt = [], set(), lengths[row], prompt_lengths[owner]
            grown = response + prompt
        part.append(row)
        prompts.add(owner)
        tokens = grown
    yield tokens, part


class _MicrobatchResult(NamedTuple):
    """Objective of a microbatch, and the sum of each segment's entropies."""

    objective: Objective
    entropy: dict[str, Tensor]


class NotFiniteError(ArithmeticError):
    """A loss or a gradient is NaN or infinite; it was not applied."""


def update_policy(
    policy: Policy,
    rollout: Rollout,
    credited: Credited,
    optimizer: torch.optim.Optimizer,
    lr: float,
    config: RunConfig,
) -> dict[str, float]:
    """Run ``trainer.ppo_epochs`` passes over the step's prompts in ``trainer.minibatches`` updates.

    Returns loss and gradient norm as means over the updates, and each segment's statistics and entropy (nats) as means
    over its tokens.  Raises NotFiniteError before any weight changes.
    """
    if policy.sharing == "none":  # microbatches count a prompt per response
        config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"share_prompts": False})})
    for group in optimizer.param_groups:
        group["lr"] = lr
    group_size, masks = credited.credit.group_size, credited.masks
    lengths, prompt_lengths = rollout.lengths.tolist(), list(map(len, rollout.prompts[::group_size]))
    losses, norms = [], []
    every_part: list[_MicrobatchResult] = []
    for _ in range(config.trainer.ppo_epochs):
        for minibatch in torch.arange(len(credited.credit.gesr)).chunk(config.trainer.minibatches):
            split = microbatches(minibatch.tolist(), group_size, lengths, prompt_lengths, config.trainer)
            responses = sum(map(len, split))
            tokens = sum(lengths[row] for rows in split for row in rows)
            parts = [_backward(policy, rollout, credited, rows, masks, config, responses, tokens) for rows in split]
            loss = sum(float(part.objective.loss) for part in parts)
            norm = float(torch.nn.utils.clip_grad_norm_(policy.trained_parameters(), config.optimizer.grad_clip))
            for name, value in (("objective/loss", loss), ("objective/grad_norm", norm)):
                if not math.isfinite(value):
                    raise NotFiniteError(f"{name} is {value}; the weights were not updated with it")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss)
            norms.append(norm)
            every_part += parts
    metrics = {"objective/loss": sum(losses) / len(losses), "objective/grad_norm": sum(norms) / len(norms)}
    for name in every_part[0].entropy:
        total, *others = (part.objective.segments[name] for part in every_part)
        for more in others:
            total = total + more
        metrics |= {f"{name}/{key}": value for key, value in total.means().items()}
        entropy = sum(float(part.entropy[name]) for part in every_part)
        metrics[f"{name}/entropy"] = entropy / max(1.0, float(total.tokens))
    return metrics


def _backward(
    policy: Policy,
    rollout: Rollout,
    credited: Credited,
    rows: Sequence[int],
    masks: SegmentMasks,
    config: RunConfig,
    responses: int,
    tokens: int,
) -> _MicrobatchResult:
    """Run the backward pass of a microbatch; the minibatch has ``responses`` responses and ``tokens`` tokens in all.

    ``rows`` are those of the microbatch, ``masks`` those of the rollout.
    """
    batch = responses_of(policy, rollout, rows, credited.credit.group_size, config)
    width, device = batch.token_ids.shape[1], policy.device
    old_log_probs, advantages = rollout.log_probs[rows, :width].to(device), credited.token_advantages[rows, :width]
    advantages, masks = advantages.to(device), {name: mask[rows, :width].to(device) for name, mask in masks.items()}
    objective = None

    def loss_of(log_probs: Tensor) -> Tensor:
        nonlocal objective
        objective = segment_objective(
            log_probs,
            old_log_probs,
            advantages,
            masks,
            clip=config.method.clip,
            aggregation=config.method.loss_aggregation,
            responses=responses,
            tokens=tokens,
        )
        return objective.loss

    scores = batch.backward(loss_of)
    assert objective is not None
    entropy = {name: scores.entropy.masked_fill(~mask, 0.0).sum() for name, mask in masks.items()}
    return _MicrobatchResult(objective._replace(loss=objective.loss.detach()), entropy)


def responses_of(
    policy: Policy, rollout: Rollout, rows: Sequence[int], group_size: int, config: RunConfig
) -> ResponseBatch:
    """The responses in ``rows``, ascending, padded to the longest, on the policy's device."""
    groups = Counter(row // group_size for row in rows)
    token_ids = rollout.token_ids[rows, : int(rollout.lengths[rows].max())]
    return ResponseBatch(
        policy,
        [rollout.prompts[prompt * group_size] for prompt in groups],
        token_ids.to(policy.device),
        temperature=config.rollout.temperature,
        share_prompts=config.trainer.share_prompts,
        group_sizes=list(groups.values()),
    )
