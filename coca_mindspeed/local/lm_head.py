"""The LM head by chunks of tokens, so that few logits are held at once, and an embedding that accumulates in place.

PyTorch makes a dense gradient of the whole vocabulary for every embedding lookup and then adds these up: 113 MB each
for a model of 576 dimensions and 49,152 tokens, twice a microbatch.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import Cache


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
    """Log-probs of given tokens, with gradient, and the entropy (nats) of their distributions, without; float32."""

    log_probs: Tensor
    entropy: Tensor


@lru_cache
def _cache_argument(forward: Callable[..., Any]) -> str:
    """The name of the cache among a body's arguments, which transformers 5.24 changed."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


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
        """The LM head of ``model`` by its configuration.

        Raises ValueError if it is not linear, or the model has no separate body.
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

    def hidden_states(self, *, cache: Cache | None = None, **inputs: Any) -> Tensor:
        """The body's last hidden states ``[rows, tokens, hidden]``, after its final norm."""
        if cache is not None:
            inputs[_cache_argument(type(self.body).forward)] = cache
        states: Tensor = self.body(**inputs).last_hidden_state
        return states

    def logits(self, states: Tensor) -> Tensor:
        """The model's own logits ``[..., vocabulary]`` from hidden states ``[..., hidden]``."""
        return self.scaled(self.head(states))

    def scores(self, states: Tensor, tokens: Tensor, to_sampling_logits: Callable[[Tensor], Tensor]) -> TokenScores:
        """Log-prob and entropy of each token ``[...]``, by chunks; the backward pass recomputes the logits.

        ``states`` ``[..., hidden]`` predict the tokens.  ``to_sampling_logits`` maps the model's logits to
        those of the policy, float32, row by row.
        """

        def of_chunk(some: Tensor, chosen: Tensor) -> TokenScores:
            return scores_of_logits(to_sampling_logits(self.logits(some)), chosen)

        flat = states.flatten(0, -2)
        chunk = self.chunk_of(len(flat))
        parts = [
            checkpoint(of_chunk, *each, use_reentrant=False, preserve_rng_state=False)
            for each in zip(flat.split(chunk), tokens.flatten().split(chunk), strict=True)
        ]
        return TokenScores(*(torch.cat(each).view(tokens.shape) for each in zip(*parts, strict=True)))

    def backward(
        self,
        states: Tensor,
        tokens: Tensor,
        to_sampling_logits: Callable[[Tensor], Tensor],
        loss_of: Callable[[Tensor], Tensor],
    ) -> TokenScores:
        """Accumulate the gradient of a loss of the log-probs, by chunks; the logits are computed once.

        ``loss_of`` maps log-probs ``[...]`` to a sum of terms of one token's log-prob each; it is called once a chunk.
        The other arguments are as in :meth:`scores`.
        """
        sums = _Gradient(self, states, to_sampling_logits)
        log_probs, entropy = (torch.zeros(tokens.numel(), device=states.device) for _ in range(2))

        with torch.no_grad(), torch.autocast(states.device.type, enabled=False):
            for rows in torch.arange(len(log_probs), device=states.device).split(self.chunk_of(len(log_probs))):
                chosen = tokens.flatten()[rows]
                logits, of_policy = sums.logits(rows)
                of_tokens = of_policy.detach().log_softmax(dim=-1)
                probabilities = of_tokens.exp()
                log_probs[rows] = of_tokens.gather(-1, chosen[:, None])[:, 0]
                entropy[rows] = _entropy_in_place(of_tokens, probabilities)
                del of_tokens
                # Each term depends on one token, so tokens that are not computed yet do not affect this gradient.
                gradient = _gradient_of(lambda found: loss_of(found.view(tokens.shape)), log_probs)[rows]
                sums.add(rows, logits, of_policy, probabilities, chosen, gradient)
                del logits, of_policy, probabilities
            by_states = sums.finish()
        if by_states is not None:
            with torch.autocast(states.device.type, enabled=False):
                states.backward(by_states.view_as(states))
        return TokenScores(log_probs.view(tokens.shape), entropy.view(tokens.shape))

    def fits_one_chunk(self, tokens: int) -> bool:
        """Whether the logits of so many tokens can be held at once."""
        return tokens <= self._chunk

    def chunk_of(self, tokens: int) -> int:
        """Tokens per chunk: as few chunks as possible, of equal size."""
        return math.ceil(tokens / math.ceil(tokens / self._chunk)) if tokens else self._chunk

    @property
    def _chunk(self) -> int:
        return max(_LEAST_CHUNK, _CHUNK_BYTES // (4 * len(self.head.weight)))

    def scaled(self, logits: Tensor) -> Tensor:
        """The model's logits from those of the linear layer."""
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
    """Entropy; overwrites ``distribution``."""
    # Finite, so that 0 x log 0 is 0.  torch.special.entr takes every logarithm anew, one at a time on a CPU.
    finite = distribution.clamp_min_(torch.finfo(distribution.dtype).min)
    return finite.mul_(probabilities).sum(dim=-1).neg()


def _gradient_of(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    with torch.enable_grad():
        at = at.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(at), at)
    return gradient


class _Gradient:
    """A loss's gradient by the LM head and its inputs, accumulated by chunks; the head's is added to in place."""

    def __init__(self, layer: LMHead, states: Tensor, to_sampling_logits: Callable[[Tensor], Tensor]) -> None:
        self._layer, self._as_policy, device = layer, to_sampling_logits, states.device.type
        weight, bias = layer.head.weight, layer.head.bias
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        self._states = states.detach().flatten(0, -2)
        self._weight, self._bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        self._by_states = torch.zeros_like(self._states) if states.requires_grad else None
        self._begun = weight.grad is not None
        if weight.requires_grad and not self._begun:
            weight.grad = torch.empty_like(weight)
        if bias is not None and bias.requires_grad and bias.grad is None:
            bias.grad = torch.zeros_like(bias)

    def finish(self) -> Tensor | None:
        """Return the gradient by the states; None if they need none."""
        if self._layer.head.weight.grad is not None and not self._begun:
            self._layer.head.weight.grad.zero_()
        return self._by_states

    def logits(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The head's and the policy's logits of these rows, connected by autograd."""
        logits = linear(self._states[rows].to(self._weight.dtype), self._weight, self._bias).requires_grad_()
        with torch.enable_grad():
            return logits, self._as_policy(self._layer.scaled(logits))

    def add(
        self, rows: Tensor, logits: Tensor, of_policy: Tensor, probabilities: Tensor, tokens: Tensor, gradient: Tensor
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
        head = self._layer.head
        if head.weight.requires_grad and head.weight.grad is not None:
            _add_product(head.weight.grad, by_logits, self._states[rows].to(self._weight.dtype), begun=self._begun)
            self._begun = True
        if self._bias is not None and head.bias.requires_grad and head.bias.grad is not None:
            head.bias.grad += by_logits.sum(dim=0, dtype=head.bias.grad.dtype)


def _add_product(total: Tensor, by_logits: Tensor, states: Tensor, *, begun: bool) -> None:
    """Add ``by_logits.T @ states`` to ``total`` in its own precision; ``total`` is uninitialised unless ``begun``."""
    if total.dtype == states.dtype:
        total.addmm_(by_logits.T, states, beta=int(begun))
    elif begun:
        total += by_logits.T @ states
    else:
        total.copy_(by_logits.T @ states)
