"""The LM head by chunks of tokens, so that few logits are held at once, and an embedding that accumulates in place.

PyTorch makes a dense gradient of the whole vocabulary for every embedding lookup and then adds these up: 113 MB each
for a model of 576 dimensions and 49,152 tokens, twice a microbatch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


def add_embedding_gradients(model: Any, device: torch.device) -> None:
    """Let the input embedding of ``model`` accumulate its gradient in place, on a CPU only.

    A GPU would add the rows in a different order every time.
    """
    found = model.get_input_embeddings()
    plain = type(found) is torch.nn.Embedding and found.max_norm is None and not found.scale_grad_by_freq
    if device.type == "cpu" and plain and not found.sparse:
        found.__class__ = _Embedding


class _Embedding(torch.nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.weight.requires_grad:
            rows: Tensor = _Rows.apply(self.weight, input, self.padding_idx)
            return rows
        return super().forward(input)


class _Rows(torch.autograd.Function):
    """Rows ``[..., hidden]`` of a leaf ``[vocabulary, hidden]``; the backward pass adds to its gradient in place."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
        ctx.weight, ctx.ids, ctx.padding_idx = weight, ids, padding_idx
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        weight, ids = ctx.weight, ctx.ids.flatten()
        gradient = gradient.reshape(len(ids), -1).to(weight.dtype)
        if ctx.padding_idx is not None:  # as in PyTorch, lookups do not train this row
            gradient = gradient.masked_fill((ids == ctx.padding_idx)[:, None], 0)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, ids, gradient)
        return None, None, None


_CHUNK_BYTES = 2**25  # of float32 logits; the working memory is about six times this
_LEAST_CHUNK = 128  # tokens; with fewer, accumulating the gradient takes longer than computing it


class TokenScores(NamedTuple):
    """Scores of given tokens, float32, of the tokens' shape.

    Attributes:
        log_probs: the log-prob of each token, with gradient.
        entropy: nats, of the distribution at that position; without gradient.
    """

    log_probs: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class LMHead:
    """A causal LM split into its body and its output layer.

    Attributes:
        body: makes the last hidden states.
        head: the linear layer behind it.
        factor: multiplies the logits (Cohere's ``logit_scale``, the inverse of Granite's ``logits_scaling``).
        cap: bounds them by ``cap * tanh(logits / cap)`` (Gemma's ``final_logit_softcapping``); None: no bound.
    """

    body: Any
    head: torch.nn.Linear
    factor: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, model: Any) -> "LMHead":
        """The LM head of ``model`` by its configuration; the self-test at load compares its logits.

        Raises:
            ValueError: it is not linear, or the model has no separate body.
        """
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        body = next((part for part in model.children() if any(each is embedding for each in part.modules())), None)
        if not isinstance(head, torch.nn.Linear) or body is None:
            raise ValueError(
                f"a {type(model).__name__} has the output layer {type(head).__name__}"
                f"{' and no body' if body is None else ''}; expected a Linear behind a body with the input embedding"
            )
        config = model.config.get_text_config()
        cap = getattr(config, "final_logit_softcapping", None)
        factor = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        return cls(body, head, float(factor), None if cap is None else float(cap))

    def hidden_states(self, **inputs: Any) -> Tensor:
        """The body's last hidden states ``[rows, tokens, hidden]``, after its final norm."""
        states: Tensor = self.body(**inputs).last_hidden_state
        return states

    def logits(self, states: Tensor) -> Tensor:
        """The model's own logits ``[..., vocabulary]`` from hidden states ``[..., hidden]``."""
        return self._scaled(self.head(states))

    def scores(self, states: Tensor, tokens: Tensor, as_policy: Callable[[Tensor], Tensor]) -> TokenScores:
        """Log-prob and entropy of each token, by chunks; the backward pass recomputes the logits.

        Args:
            states: ``[..., hidden]``, the states that predict the tokens.
            tokens: int64 ``[...]``.
            as_policy: from the model's logits to those of the policy, float32, row by row.
        """
        found = _ChunkedScores.apply(*self._inputs(states), tokens.flatten(), self._distribution(states, as_policy))
        return TokenScores(*(each.view(tokens.shape) for each in found))

    def backward(
        self,
        states: Tensor,
        tokens: Tensor,
        as_policy: Callable[[Tensor], Tensor],
        loss_of: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, TokenScores]:
        """Accumulate the gradient of a loss of the log-probs; the logits are computed once.

        Args:
            states: as in :meth:`scores`.
            tokens: as in :meth:`scores`.
            as_policy: as in :meth:`scores`.
            loss_of: from log-probs ``[...]`` to a sum of terms of one token's log-prob each; called once a chunk.

        Returns:
            The loss and the scores, detached.
        """
        flat, weight, bias = self._inputs(states.detach())
        distribution = self._distribution(states, as_policy)
        needed = [part is not None and part.requires_grad for part in (states, weight, bias)]
        so_far = (weight.grad, None if bias is None else bias.grad)
        sums = _Gradient(needed, flat, weight, bias, distribution, so_far)
        log_probs, entropy = (torch.zeros(len(flat), device=states.device) for _ in range(2))

        def known(log_probs: Tensor) -> Tensor:
            return loss_of(log_probs.view(tokens.shape))

        with torch.no_grad(), torch.autocast(states.device.type, enabled=False):
            for rows in torch.arange(len(flat), device=states.device).split(distribution.chunk):
                chosen = tokens.flatten()[rows]
                logits, of_policy = sums.logits(rows)
                of_tokens = of_policy.detach().log_softmax(dim=-1)
                probabilities = of_tokens.exp()
                log_probs[rows] = of_tokens.gather(-1, chosen[:, None])[:, 0]
                entropy[rows] = _entropy_in_place(of_tokens, probabilities)
                del of_tokens
                # Each term depends on one token, so tokens that are not computed yet do not affect this gradient.
                gradient = _gradient_of(known, log_probs)[rows]
                sums.add(rows, logits, of_policy, probabilities, chosen, gradient)
                del logits, of_policy, probabilities
        by_states, by_weight, by_bias = sums.totals
        if by_weight is not None:
            weight.grad = by_weight
        if bias is not None and by_bias is not None:
            bias.grad = by_bias
        if by_states is not None:
            with torch.autocast(states.device.type, enabled=False):
                states.backward(by_states.view_as(states))
        return known(log_probs).detach(), TokenScores(log_probs.view(tokens.shape), entropy.view(tokens.shape))

    def _inputs(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return states.flatten(0, -2), self.head.weight, self.head.bias

    def _distribution(self, states: Tensor, as_policy: Callable[[Tensor], Tensor]) -> "_Distribution":
        weight, device = self.head.weight, states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        chunk = self.chunk_of(states.shape[:-1].numel())
        return _Distribution(lambda logits: as_policy(self._scaled(logits)), dtype, chunk)

    def fits_one_chunk(self, tokens: int) -> bool:
        """Whether the logits of so many tokens can be held at once."""
        return tokens <= self._chunk

    def chunk_of(self, tokens: int) -> int:
        """Tokens per chunk: as few chunks as possible, of equal size."""
        return math.ceil(tokens / math.ceil(tokens / self._chunk)) if tokens else self._chunk

    @property
    def _chunk(self) -> int:
        return max(_LEAST_CHUNK, _CHUNK_BYTES // (4 * len(self.head.weight)))

    def _scaled(self, logits: Tensor) -> Tensor:
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits


def scores_of_logits(logits: Tensor, tokens: Tensor) -> TokenScores:
    """Log-prob and entropy of tokens ``[...]`` from float32 logits ``[..., vocabulary]``."""
    distribution = logits.log_softmax(dim=-1)
    log_probs = distribution.gather(-1, tokens[..., None]).squeeze(-1)
    with torch.no_grad():
        entropy = entropy_of(distribution, distribution.exp())
    return TokenScores(log_probs, entropy)


def entropy_of(distribution: Tensor, probabilities: Tensor) -> Tensor:
    """Entropy ``[...]``, nats, from log-probs ``[..., vocabulary]`` and their exponentials."""
    return _entropy_in_place(distribution.clone(), probabilities)


def _entropy_in_place(distribution: Tensor, probabilities: Tensor) -> Tensor:
    """The same; ``distribution`` is overwritten."""
    # Finite, so that 0 x log 0 is 0.  torch.special.entr takes every logarithm anew, one at a time on a CPU.
    finite = distribution.clamp_min_(torch.finfo(distribution.dtype).min)
    return finite.mul_(probabilities).sum(dim=-1).neg()


class _Distribution(NamedTuple):
    """How hidden states become a distribution, one chunk at a time."""

    as_policy: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    chunk: int


class _ChunkedScores(torch.autograd.Function):
    """Forward: log-probs and entropies ``[n]``.  Backward: the logits again, for tokens with a gradient."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, distribution: _Distribution
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(states, weight, bias, tokens)
        ctx.distribution = distribution
        as_policy, dtype, chunk = distribution
        with torch.autocast(states.device.type, enabled=False):
            w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
            parts = [
                scores_of_logits(as_policy(linear(s.to(dtype), w, b)), t)
                for s, t in zip(states.split(chunk), tokens.split(chunk), strict=True)
            ]
        log_probs, entropy = map(torch.cat, zip(*parts, strict=True))
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, tokens = ctx.saved_tensors
        sums = _Gradient(ctx.needs_input_grad, states, weight, bias, ctx.distribution)
        with torch.autocast(states.device.type, enabled=False):
            for rows in gradient.nonzero()[:, 0].split(ctx.distribution.chunk):
                logits, of_policy = sums.logits(rows)
                sums.add(rows, logits, of_policy, of_policy.detach().softmax(dim=-1), tokens[rows], gradient[rows])
        return *sums.totals, None, None


def _gradient_of(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    with torch.enable_grad():
        at = at.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(at), at)
    return gradient


class _Gradient:
    """A loss's gradient by the LM head and its inputs, accumulated by chunks."""

    def __init__(
        self,
        needed: Sequence[bool],
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        distribution: _Distribution,
        so_far: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        """``so_far``: existing gradients by weight and bias, added to in place."""
        self._states, self._distribution = states, distribution
        self._weight = weight.to(distribution.dtype)
        self._bias = None if bias is None else bias.to(distribution.dtype)
        of_states, of_weight, of_bias, *_ = needed
        by_weight, by_bias = so_far
        self._by_states = torch.zeros_like(states) if of_states else None
        self._by_weight = (torch.empty_like(weight) if by_weight is None else by_weight) if of_weight else None
        self._by_bias = None
        if of_bias and bias is not None:
            self._by_bias = torch.zeros_like(bias) if by_bias is None else by_bias
        self._weight_begun = by_weight is not None

    @property
    def totals(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients by states, weight and bias; None if not needed."""
        if self._by_weight is not None and not self._weight_begun:
            self._by_weight.zero_()
        return self._by_states, self._by_weight, self._by_bias

    def logits(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The model's and the policy's logits of these rows, connected by autograd."""
        logits = linear(self._states[rows].to(self._weight.dtype), self._weight, self._bias).requires_grad_()
        with torch.enable_grad():
            return logits, self._distribution.as_policy(logits)

    def add(
        self,
        rows: Tensor,
        logits: Tensor,
        of_policy: Tensor,
        probabilities: Tensor,
        tokens: Tensor,
        gradient: Tensor,
    ) -> None:
        """Add the gradient of these rows; ``gradient`` is the loss's by the log-probs of ``tokens``.

        ``probabilities`` of ``of_policy`` are overwritten.
        """
        some = gradient.nonzero()[:, 0]
        if not len(some):
            return
        # d log p(token) = 1 at the token - p; by autograd it would take two more tensors of this size.
        by_policy = probabilities.mul_(-gradient[:, None])
        by_policy.scatter_add_(1, tokens[:, None], gradient[:, None])
        (by_logits,) = torch.autograd.grad(of_policy, logits, by_policy)
        if len(some) < len(rows):
            # Padding, groups without reward variance and clipped tokens have no gradient.
            rows, by_logits = rows[some], by_logits[some]
        if self._by_states is not None:
            self._by_states[rows] = (by_logits @ self._weight).to(self._by_states.dtype)
        if self._by_weight is not None:
            of_rows = self._states[rows].to(self._weight.dtype)
            _add_product(self._by_weight, by_logits, of_rows, begun=self._weight_begun)
            self._weight_begun = True
        if self._by_bias is not None:
            self._by_bias += by_logits.sum(dim=0, dtype=self._by_bias.dtype)


def _add_product(total: Tensor, by_logits: Tensor, states: Tensor, *, begun: bool) -> None:
    """Add ``by_logits.T @ states`` to ``total`` in its own precision; ``total`` is uninitialised unless ``begun``."""
    if total.dtype == states.dtype:
        total.addmm_(by_logits.T, states, beta=int(begun))
    elif begun:
        total += by_logits.T @ states
    else:
        total.copy_(by_logits.T @ states)
