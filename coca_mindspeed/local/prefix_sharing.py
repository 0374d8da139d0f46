"""Which tokens of a batch of responses are run: what several responses to a prompt begin with, once.

A confidence before the answer makes beginnings alike, as the sampler knows (:mod:`.branches`).  Here the responses are
cut, all at the same columns, into passes that go on from each other's keys and values.  A pass has one row for all
responses to a prompt that are the same up to its end, and none for those that have ended before it.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import DynamicCache

Indices = NDArray[np.int64]

_MOST_CUTS = 24  # columns that are tried; the work grows with their square


@dataclass(frozen=True)
class PassCost:
    """What a pass costs besides running its tokens, in tokens.

    Attributes:
        each: every pass.
        token_before: each token before it whose keys and values a row goes on from: they are copied for the row and
            held for the backward pass.
    """

    each: float
    token_before: float


class Scored(NamedTuple):
    """Tokens of responses, and the states that predict them.

    Attributes:
        states: int64 ``[n]``, among the states of a pass, which stand row by row.
        places: int64 ``[n]``, among the tokens of the responses ``[responses * width]``.
    """

    states: Indices
    places: Indices


@dataclass(frozen=True)
class ResponsePass:
    """Tokens of responses that are run at once.

    Attributes:
        start: the first of the columns that are run.
        stop: behind the last of them.
        rows_before: int64 ``[rows]``, the row of the pass before that each goes on from; of the prompts' in the first.
        responses: int64 ``[rows]``, the response whose tokens each runs.
        scored: what the states predict.
    """

    start: int
    stop: int
    rows_before: Indices
    responses: Indices
    scored: Scored


@dataclass(frozen=True)
class ResponsePasses:
    """How the tokens of responses are run.

    Attributes:
        first: the responses' first tokens; the prompts' last states predict them, one for each prompt.
        passes: the tokens that predict the others.
    """

    first: Scored
    passes: tuple[ResponsePass, ...]

    @classmethod
    def whole(cls, prompt_of: Indices, width: int) -> "ResponsePasses":
        """Every token of every response, in one pass.

        Args:
            prompt_of: int64 ``[R]``, the prompt of each response.
            width: tokens of each.
        """
        rows = len(prompt_of)
        order = _Order(np.arange(rows), prompt_of, np.full(rows, width - 1), np.full(rows, -1), width)
        return order.passes([0, width - 1] if width > 1 else [0])

    @classmethod
    def cheapest(
        cls, token_ids: Indices, lengths: Indices, prompt_of: Indices, prompt_tokens: int, cost: PassCost
    ) -> "ResponsePasses":
        """Those that cost least.

        Args:
            token_ids: int64 ``[R, width]``, of each response, and anything behind its end.
            lengths: int64 ``[R]``, tokens of each, 1 to width.
            prompt_of: int64 ``[R]``, the prompt of each.
            prompt_tokens: of the longest prompt.
            cost: of a pass.
        """
        order = _Order.of(token_ids, lengths, prompt_of)
        return order.passes(_cheapest_cuts(order, prompt_tokens, cost))


def take_rows(tensor: Tensor, rows: Indices) -> Tensor:
    """``tensor[rows]``, or the tensor itself where that is all of it in order."""
    if np.array_equal(rows, np.arange(len(tensor))):
        return tensor
    indices = torch.tensor(rows, device=tensor.device)
    if tensor.device.type == "cpu":
        return tensor.index_select(0, indices)
    return tensor[indices]  # whose gradient a GPU adds up in the same order every time


@dataclass(frozen=True)
class _Order:
    """Responses, ordered so that those that begin alike are neighbours; one that another goes on from stands before it.

    Attributes:
        responses: int64 ``[R]``, which they are.
        prompts: int64 ``[R]``, the prompt of each.
        run: int64 ``[R]``, tokens of each that predict another: all but the last.
        alike: int64 ``[R]``, how many of these are those of the neighbour before it; -1: it has another prompt.
        width: tokens of the longest.
    """

    responses: Indices
    prompts: Indices
    run: Indices
    alike: Indices
    width: int

    @classmethod
    def of(cls, token_ids: Indices, lengths: Indices, prompt_of: Indices) -> "_Order":
        run, width = lengths - 1, token_ids.shape[1]
        tokens = np.where(np.arange(width) < run[:, None], token_ids, -1)  # whose last column is run by none
        order = np.lexsort((*tokens.T[::-1], prompt_of))
        tokens, run, prompts = tokens[order], run[order], prompt_of[order]
        same = (tokens[1:] == tokens[:-1]) & (tokens[1:] >= 0)
        alike = np.where(prompts[1:] == prompts[:-1], same.argmin(axis=1), -1)
        return cls(order, prompts, run, np.concatenate([[-1], alike]), width)

    def last_of_rows(self, stop: int) -> NDArray[np.bool_]:
        """Whether a row that runs up to ``stop`` ends with a response; the responses of a row stand side by side.

        The last of them has the most tokens to run up to there.
        """
        another = self.alike[1:] < np.minimum(stop, self.run[:-1])
        return np.concatenate([another, [True]])

    def passes(self, cuts: Sequence[int]) -> ResponsePasses:
        """Passes between these columns, the first of which is 0 and the last of which is the most that is run."""
        row_of, passes = self.prompts, []
        for start, stop in itertools.pairwise(cuts):
            last = self.last_of_rows(stop)
            runs = last & (self.run > start)
            row_before, row_of = row_of, np.concatenate([[0], runs.cumsum()[:-1]])
            scored = self._scored(row_of, start, stop)
            passes.append(ResponsePass(start, stop, row_before[runs], self.responses[runs], scored))
        return ResponsePasses(Scored(self.prompts, self.responses * self.width), tuple(passes))

    def _scored(self, row_of: Indices, start: int, stop: int) -> Scored:
        each = (np.minimum(self.run, stop) - start).clip(min=0)  # columns of a response in the pass
        column = np.arange(each.sum()) - np.repeat(each.cumsum() - each, each)
        states = np.repeat(row_of * (stop - start), each) + column
        return Scored(states, np.repeat(self.responses * self.width, each) + start + column + 1)


def _cheapest_cuts(order: _Order, prompt_tokens: int, cost: PassCost) -> list[int]:
    """Columns, from 0 to the most that is run, between which passes cost least in all."""
    # Only where responses part or end does a further cut save anything.
    places = np.concatenate([order.alike[order.alike > 0], order.run[order.run > 0]])
    if not len(places):
        return [0]
    found = np.unique(places)
    if len(found) > _MOST_CUTS:
        found = np.unique(np.quantile(places, np.linspace(0, 1, _MOST_CUTS), method="nearest"))
    cuts = np.concatenate([[0], found])
    least, before = np.zeros(len(cuts)), np.zeros(len(cuts), dtype=np.int64)
    for stop in range(1, len(cuts)):
        start = cuts[:stop]
        run = np.sort(order.run[order.last_of_rows(cuts[stop])])
        rows = len(run) - np.searchsorted(run, start, side="right")
        each_row = cuts[stop] - start + cost.token_before * (prompt_tokens + start)
        totals = least[:stop] + cost.each + rows * each_row
        before[stop] = totals.argmin()
        least[stop] = totals[before[stop]]
    chosen = [len(cuts) - 1]
    while chosen[-1]:
        chosen.append(int(before[chosen[-1]]))
    return [int(cuts[place]) for place in reversed(chosen)]


class GoOn(Protocol):
    """How a pass goes on from a cache."""

    def __call__(
        self, forward: Callable[..., Tensor], repeat: Callable[[], None], *, last: bool = False, **inputs: Any
    ) -> Tensor:
        """What ``forward(**inputs)`` makes, once ``repeat()`` has given the cache its rows.

        Args:
            forward: hidden states from ``inputs``; ``past_key_values`` is the cache, filled.
            repeat: called before it.
            last: no further pass goes on from the cache, whose contents are not to be read any more.
            inputs: of ``forward``.
        """


def go_on(forward: Callable[..., Tensor], repeat: Callable[[], None], *, last: bool = False, **inputs: Any) -> Tensor:
    """One pass after the other, on one graph."""
    repeat()
    return forward(**inputs)


def go_on_separately(
    forward: Callable[..., Tensor], repeat: Callable[[], None], *, last: bool = False, **inputs: Any
) -> Tensor:
    """The same numbers and gradients, which have to be asked for by ``backward()``."""
    cache: DynamicCache = inputs["past_key_values"]
    before = _tensors(cache)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in before):
        return go_on(forward, repeat, **inputs)

    def from_cache(*cached: Tensor) -> tuple[Tensor, ...]:
        _fill(cache, cached)
        states = go_on(forward, repeat, **inputs)
        return (states,) if last else (states, *_tensors(cache))

    after: list[Tensor]
    states: Tensor
    states, *after = _Pass.apply(from_cache, *before)
    _fill(cache, before if last else after)  # in the place of those on the pass's own graph
    return states


def _tensors(cache: DynamicCache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _fill(cache: DynamicCache, tensors: Sequence[Tensor]) -> None:
    for layer, keys, values in zip(cache.layers, tensors[::2], tensors[1::2], strict=True):
        layer.keys, layer.values = keys, values


class _Pass(torch.autograd.Function):
    """What a function makes of tensors, on a graph of its own."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
            outputs = function(*leaves)
        ctx.leaves, ctx.outputs = leaves, outputs
        found = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(*(new for new, old in zip(found, outputs, strict=True) if not old.requires_grad))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        leaves, outputs = ctx.leaves, ctx.outputs
        del ctx.leaves, ctx.outputs  # and the graph with them
        asked = [number for number, gradient in enumerate(gradients) if gradient is not None]
        torch.autograd.backward([outputs[number] for number in asked], [gradients[number] for number in asked])
        return None, *(leaf.grad for leaf in leaves)
