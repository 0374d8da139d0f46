"""From a causal LM's last hidden states to log-probs of given tokens, without the logits of a whole batch.

With a vocabulary of 150,000 the logits of 16 responses of 4,096 tokens take 40 GB, and softmax and its gradient several
times that.  Here a chunk of tokens has its logits at a time, and the backward pass computes them once more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

_CHUNK_BYTES = 2**27  # of float32 logits; the working memory is about six times this


class TokenScores(NamedTuple):
    """What a policy says of given tokens, float32 each, of the tokens' shape.

    Attributes:
        log_probs: the log-prob of each token, with gradient.
        entropy: nats, of the distribution that the token was drawn from; without gradient.
    """

    log_probs: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class OutputLayer:
    """A causal LM taken apart: its body, and how its logits follow from the body's last hidden states.

    Attributes:
        model: a Hugging Face causal LM.
        factor: multiplies the logits (Cohere's ``logit_scale``, the inverse of Granite's ``logits_scaling``).
        cap: bounds them by ``cap * tanh(logits / cap)`` (Gemma's ``final_logit_softcapping``); None: no bound.
    """

    model: Any
    factor: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, model: Any) -> "OutputLayer":
        """The output layer of ``model``, compared with the model's own logits.

        Raises:
            ValueError: the model makes its logits in a way that is not known here.
        """
        layer = cls.unchecked(model)
        if problem := layer._problem():
            raise ValueError(
                f"the logits of a {type(model).__name__} cannot be computed from its hidden states: {problem}"
            )
        return layer

    @classmethod
    def unchecked(cls, model: Any) -> "OutputLayer":
        """The same by the model's configuration alone."""
        config = model.config
        cap = getattr(config, "final_logit_softcapping", None)
        factor = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        return cls(model, float(factor), None if cap is None else float(cap))

    def hidden_states(self, **inputs: Any) -> Tensor:
        """The body's last hidden states ``[rows, tokens, hidden]``, after its final norm."""
        states: Tensor = self.model.base_model(**inputs).last_hidden_state
        return states

    def logits(self, states: Tensor) -> Tensor:
        """The model's own logits ``[..., vocabulary]`` from hidden states ``[..., hidden]``."""
        return self._scaled(self.model.get_output_embeddings()(states))

    def scores(self, states: Tensor, tokens: Tensor, as_policy: Callable[[Tensor], Tensor]) -> TokenScores:
        """Log-prob and entropy of each token, by chunks.

        Args:
            states: ``[..., hidden]``, those that predict the tokens.
            tokens: int64 ``[...]``.
            as_policy: from the model's logits to those of the distribution in question, float32; row by row.
        """
        head = self.model.get_output_embeddings()
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
        chunk = max(1, _CHUNK_BYTES // (4 * len(head.weight)))
        distribution = _Distribution(lambda logits: as_policy(self._scaled(logits)), dtype, chunk)
        flat = states.flatten(0, -2)
        log_probs, entropy = _ChunkedScores.apply(flat, head.weight, head.bias, tokens.flatten(), distribution)
        return TokenScores(log_probs.view(tokens.shape), entropy.view(tokens.shape))

    def fits_one_chunk(self, tokens: int) -> bool:
        """Whether the logits of so many tokens are few enough to be held at once."""
        return 4 * len(self.model.get_output_embeddings().weight) * tokens <= _CHUNK_BYTES

    def _scaled(self, logits: Tensor) -> Tensor:
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits

    def _problem(self) -> str | None:
        head = self.model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear):
            return f"its output layer is a {type(head).__name__}, not a Linear"
        if self.model.base_model is self.model:
            return "it has no body apart from its output layer"
        ids = torch.arange(min(8, len(head.weight)), device=head.weight.device)[None]
        with torch.inference_mode():
            expected = self.model(input_ids=ids, use_cache=False).logits.float()
            found = self.logits(self.hidden_states(input_ids=ids, use_cache=False)).float()
        if found.shape != expected.shape:
            return f"they have the shape {list(expected.shape)}, its output layer's {list(found.shape)}"
        tolerance = 1e-4 * max(1.0, float(expected.abs().max()))
        if not torch.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True):
            return f"they differ from its output layer's by up to {float((found - expected).abs().max()):.3g}"
        return None


def scores_of_logits(logits: Tensor, tokens: Tensor) -> TokenScores:
    """Log-prob and entropy of tokens ``[...]`` from float32 logits ``[..., vocabulary]``, all at once."""
    distribution = logits.log_softmax(dim=-1)
    log_probs = distribution.gather(-1, tokens[..., None]).squeeze(-1)
    with torch.no_grad():
        entropy = entropy_of(distribution, distribution.exp())
    return TokenScores(log_probs, entropy)


def entropy_of(distribution: Tensor, probabilities: Tensor) -> Tensor:
    """Entropy ``[...]``, nats, of log-probs ``[..., vocabulary]`` and what they are the logarithms of."""
    # Finite, so that 0 x log 0 is 0.  torch.special.entr takes every logarithm anew, one at a time on a CPU.
    finite = distribution.clamp_min(torch.finfo(distribution.dtype).min)
    return finite.mul_(probabilities).sum(dim=-1).neg()


class _Distribution(NamedTuple):
    """How hidden states become a distribution, a chunk at a time."""

    as_policy: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    chunk: int


class _ChunkedScores(torch.autograd.Function):
    """Forward: log-probs and entropies ``[n]``.  Backward: the logits again, of the tokens that have a gradient."""

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
        as_policy, dtype, chunk = ctx.distribution
        need_states, need_weight, need_bias, *_ = ctx.needs_input_grad
        by_states = torch.zeros_like(states) if need_states else None
        by_weight = torch.zeros_like(weight) if need_weight else None
        by_bias = torch.zeros_like(bias) if need_bias else None
        with torch.autocast(states.device.type, enabled=False):
            w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
            # Padding, groups without a spread of rewards and clipped tokens have none: their part of the sums is 0.
            for rows in gradient.nonzero()[:, 0].split(chunk):
                s = states[rows].to(dtype)
                logits = linear(s, w, b).requires_grad_()
                with torch.enable_grad():
                    of_policy = as_policy(logits)
                # d log p(token) = 1 at the token - p; by autograd it would take two more tensors of this size.
                by_policy = of_policy.detach().softmax(dim=-1).mul_(-gradient[rows, None])
                by_policy.scatter_add_(1, tokens[rows, None], gradient[rows, None])
                (by_logits,) = torch.autograd.grad(of_policy, logits, by_policy)
                del logits, of_policy, by_policy
                if by_states is not None:
                    by_states[rows] = (by_logits @ w).to(by_states.dtype)
                if by_weight is not None:
                    _add_product(by_weight, by_logits, s)
                if by_bias is not None:
                    by_bias += by_logits.sum(dim=0, dtype=by_bias.dtype)
        return by_states, by_weight, by_bias, None, None


def _add_product(total: Tensor, by_logits: Tensor, states: Tensor) -> None:
    """Add ``by_logits.T @ states`` to ``total``, in its own precision."""
    if total.dtype == states.dtype:
        total.addmm_(by_logits.T, states)
    else:
        total += by_logits.T @ states
