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
from torch.utils.checkpoint import checkpoint
from transformers import Cache


def add_embedding_gradients(model: Any, device: torch.device) -> None:
    """Let the input embedding accumulate its gradient in place, on a CPU only; a GPU's order of adding rows varies."""
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


CHUNK_BYTES = 2**25  # of float32 logits; the working memory is about six times this
LEAST_CHUNK = 128  # tokens; with fewer, accumulating the gradient takes longer than computing it


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
    """A causal LM split into its body and its output layer."""

    body: Any  # makes the last hidden states
    head: torch.nn.Linear  # the linear layer behind it
    factor: float = 1.0  # multiplies the logits (Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`)
    # bounds them by `cap * tanh(logits / cap)` (Gemma's `final_logit_softcapping`); None: no bound
    cap: float | None = None

    @classmethod
    def of(cls, model: Any) -> "LMHead":
        """The LM head of ``model``; raises ValueError if it is not linear, or the model has no separate body."""
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

        ``loss_of`` maps log-probs ``[...]`` to a sum of terms of one token's log-prob each; it is called once a chunk,
        the last time with the log-probs of all tokens.  The other arguments are as in :meth:`scores`.
        """
        inputs, chosen = states.detach().flatten(0, -2), tokens.flatten()
        by_inputs = torch.zeros_like(inputs)
        log_probs, entropy = (torch.zeros(len(chosen), device=states.device) for _ in range(2))
        chunk = self.chunk_of(len(chosen))

        def add(rows: slice) -> None:
            with torch.no_grad():
                logits = self.head(inputs[rows])
            logits.requires_grad_()
            scores = scores_of_logits(to_sampling_logits(self.scaled(logits)), chosen[rows])
            log_probs[rows], entropy[rows] = scores.log_probs.detach(), scores.entropy
            # Each term depends on one token, so tokens that are not computed yet do not affect this gradient.
            known = log_probs.clone().requires_grad_()
            gradient = torch.autograd.grad(loss_of(known.view(tokens.shape)), known)[0][rows]
            # Padding, groups without reward variance and clipped tokens have none.
            some = gradient.nonzero()[:, 0]
            if not len(some):
                return
            with torch.autocast(states.device.type, enabled=False):
                (by_logits,) = torch.autograd.grad(scores.log_probs, logits, gradient)
                part: Tensor | slice = slice(None) if len(some) == len(gradient) else some  # all: without a copy
                by_inputs[rows][part] = self._accumulate(by_logits[part], inputs[rows][part])

        for start in range(0, len(chosen), chunk):
            add(slice(start, start + chunk))
        if states.requires_grad:
            with torch.autocast(states.device.type, enabled=False):
                states.backward(by_inputs.view_as(states))
        return TokenScores(log_probs.view(tokens.shape), entropy.view(tokens.shape))

    def _accumulate(self, by_logits: Tensor, inputs: Tensor) -> Tensor:
        """Add to the gradient of the linear layer in place; return that of its ``inputs``."""
        weight, bias = self.head.weight, self.head.bias
        inputs_as_used = inputs.to(by_logits.dtype)
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            if weight.dtype == by_logits.dtype:
                weight.grad.addmm_(by_logits.T, inputs_as_used)  # needs no second tensor of this size
            else:
                weight.grad += by_logits.T @ inputs_as_used
        if bias is not None and bias.requires_grad:
            bias.grad = torch.zeros_like(bias) if bias.grad is None else bias.grad
            bias.grad += by_logits.sum(dim=0, dtype=bias.grad.dtype)
        return (by_logits @ weight.detach().to(by_logits.dtype)).to(inputs.dtype)

    def fits_one_chunk(self, tokens: int) -> bool:
        """Whether the logits of so many tokens can be held at once."""
        return tokens <= self._chunk

    def chunk_of(self, tokens: int) -> int:
        """Tokens per chunk: as few chunks as possible, of equal size."""
        return math.ceil(tokens / math.ceil(tokens / self._chunk)) if tokens else self._chunk

    @property
    def _chunk(self) -> int:
        return max(LEAST_CHUNK, CHUNK_BYTES // (4 * len(self.head.weight)))

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
    # Finite, so that 0 x log 0 is 0.  torch.special.entr would take every logarithm again, slowly on a CPU.
    finite = distribution.clamp(min=torch.finfo(distribution.dtype).min)
    return finite.mul_(probabilities).sum(dim=-1).neg()
