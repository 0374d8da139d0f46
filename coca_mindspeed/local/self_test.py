"""Self-test at load: sampler and update must match one plain eager forward pass.

Configurations do not reveal some differences: PyTorch's attention drops Gemma 2's soft cap, ALiBi and windows count the
padding behind a shared prefix, Gemma 3n reads another layer's keys with a cache.  A small batch reveals these in log-
probs and gradients, and the fastest correct computation is chosen.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from coca_mindspeed.local.lm_head import scores_of_logits
from coca_mindspeed.local.log_probs import ResponseBatch
from coca_mindspeed.local.policy import Policy, Sharing
from coca_mindspeed.local.sampler import Decoder

_SHARED = 16  # tokens that both prompts start with
_OWN, _RESPONSES = (2, 5), (5, 2)  # tokens of each prompt behind these, and of each of its two responses
_WINDOW = 8  # columns; windows that are not exceeded otherwise are made as small for the test
_LONGEST_WINDOW = 256  # columns, up to which the prompts exceed a window (GPT-Neo builds its masks when it is made)
_TOLERANCE = 1e-3  # nats of a log-prob, where these spread by a nat or more; float32 is off by 1e-5 (SmolLM2)
_TOLERANCE_OF_GRADIENT = 1e-2  # relative; float32 is off by 1e-4
_TOLERANCE_OF_BFLOAT16 = 0.2  # nats: flash attention takes no float32


class SelfTestError(ValueError):
    """No available computation matches the model's plain eager forward pass."""


def choose_computation(policy: Policy) -> str:
    """Set attention and :attr:`~Policy.sharing` by comparison with one plain eager forward pass.

    The configured attention is tried first, then ``eager``, each with as much sharing as possible.  Weights, gradients
    and random states are not changed.  Returns why the first choice was rejected; empty if it was taken.

    Raises:
        SelfTestError: every choice differs, or the model cannot be run.
    """
    model, first = policy.model, ""
    refusal = f"a {type(model).__name__} cannot be sampled and trained here"
    configured = model.config._attn_implementation
    exact = configured != "flash_attention_2"
    tested = dataclasses.replace(policy, compute_dtype=torch.float32 if exact else torch.bfloat16)
    with _prepared(model, exact):
        case = _Case.of(tested)
        _set_attention(model, "eager")
        expected = _run("the plain forward pass", case.by_plain_pass, tested)
        if isinstance(expected, str):
            raise SelfTestError(f"{refusal}: {expected}")
        attentions = (configured, "eager") if model._can_set_attn_implementation() else (configured,)
        for attention, sharing in itertools.product(dict.fromkeys(attentions), get_args(Sharing)):
            _set_attention(model, attention)
            tested.sharing = sharing
            problem = case.problem(tested, expected, _TOLERANCE if exact else _TOLERANCE_OF_BFLOAT16)
            if not problem:
                policy.sharing = sharing
                return first
            first = first or problem
    raise SelfTestError(f"{refusal}: {first}")


@dataclass(frozen=True)
class _Found:
    """Log-probs float32 ``[responses, tokens]``, and the embedding's gradient, sparse ``[vocabulary, hidden]``."""

    log_probs: Tensor
    gradient: Tensor | None


@dataclass(frozen=True)
class _Case:
    """Two prompts of different lengths with two responses each; all four texts have the same length.

    ``token_ids`` int64 ``[4, tokens]`` are the responses, padded on the right; ``inside`` is False on padding.
    """

    prompts: list[list[int]]
    token_ids: Tensor
    inside: Tensor

    @classmethod
    def of(cls, policy: Policy) -> "_Case":
        """Random tokens; the responses to a prompt share their first token."""
        random = torch.Generator().manual_seed(0)
        text = policy.model.config.get_text_config()
        rows = min(len(policy.model.get_input_embeddings().weight), policy.vocabulary)
        exceeded = max((w for w in _windows(text).values() if w <= _LONGEST_WINDOW), default=0)
        most = (getattr(text, "max_position_embeddings", None) or 2**31) - _OWN[0] - _RESPONSES[0]
        shared = max(1, min(_SHARED + exceeded, most))

        def tokens(count: int) -> list[int]:
            found = torch.randint(rows - 1, (count,), generator=random)
            return (found + (found >= policy.pad_id)).tolist()  # PAD has no probability

        start = tokens(shared)
        prompts = [start + tokens(own) for own in _OWN]
        responses = [first + tokens(n - 1) for n in _RESPONSES for first in [tokens(1)] for _ in range(2)]
        width = max(_RESPONSES)
        padded = [response + [policy.pad_id] * (width - len(response)) for response in responses]
        inside = torch.tensor([[t < len(response) for t in range(width)] for response in responses])
        return cls(prompts, torch.tensor(padded, device=policy.device), inside.to(policy.device))

    def by_plain_pass(self, policy: Policy) -> _Found:
        """All four texts in one forward pass without padding, cache or sharing."""
        responses = [ids[inside].tolist() for ids, inside in zip(self.token_ids, self.inside, strict=True)]
        texts = torch.tensor([self.prompts[row // 2] + ids for row, ids in enumerate(responses)], device=policy.device)
        predicted = torch.arange(1, texts.shape[1], device=policy.device)
        of_response = predicted >= texts.shape[1] - self.inside.sum(dim=1, keepdim=True)

        def log_probs() -> Tensor:
            with policy.autocast():
                logits = policy.model(input_ids=texts, use_cache=False).logits[:, :-1]
            found = scores_of_logits(policy.logits_of_policy(logits, 1.0), texts[:, 1:]).log_probs
            return torch.zeros(self.inside.shape, device=policy.device).masked_scatter(self.inside, found[of_response])

        return self._with_gradient(policy, log_probs)

    def by_sampler(self, policy: Policy) -> _Found:
        """As the sampler computes them."""
        with torch.inference_mode(), policy.autocast():
            decoder = Decoder(policy, self.prompts, self.token_ids.shape[1])
            rows = torch.arange(len(self.prompts), device=policy.device).repeat_interleave(2)
            logits = [decoder.logits[rows]]
            decoder.keep(rows)
            for token in self.token_ids[:, :-1].split(1, dim=1):
                decoder.step(token)
                logits.append(decoder.logits)
            found = scores_of_logits(policy.logits_of_policy(torch.stack(logits, dim=1), 1.0), self.token_ids)
            return _Found(found.log_probs.masked_fill(~self.inside, 0.0), None)

    def by_update(self, policy: Policy) -> _Found:
        """As an update computes them."""
        batch = ResponseBatch(policy, self.prompts, self.token_ids, 1.0)
        return self._with_gradient(policy, lambda: batch.scores().log_probs.masked_fill(~self.inside, 0.0))

    def problem(self, policy: Policy, expected: _Found, tolerance: float) -> str:
        """Compare the policy with the plain eager pass; describe the first mismatch, or return an empty string."""
        spread = min(1.0, float(expected.log_probs[self.inside].std()))
        for name, compute in (("sampler", self.by_sampler), ("update", self.by_update)):
            found = _run(f"the {name}", compute, policy)
            if isinstance(found, str):
                return found
            off = float((found.log_probs - expected.log_probs).abs().max())
            if not off <= tolerance * spread:
                return f"the {name}'s log-probs differ from the plain forward pass by {off:.2g} nats"
            if found.gradient is not None and expected.gradient is not None:
                off = float((found.gradient - expected.gradient).norm() / expected.gradient.norm())
                if not off <= _TOLERANCE_OF_GRADIENT:
                    return f"the {name}'s gradient differs from the plain forward pass by {off:.1%}"
        return ""

    def _with_gradient(self, policy: Policy, log_probs: Callable[[], Tensor]) -> _Found:
        """With gradient if weights are stored in float32; others are converted one module at a time."""
        embedding = policy.model.get_input_embeddings()
        if embedding.weight.dtype != torch.float32:
            with torch.no_grad():
                return _Found(log_probs(), None)
        looked_up: list[tuple[Tensor, Tensor]] = []
        hook = embedding.register_forward_hook(
            lambda module, inputs, output: looked_up.append((inputs[0], output.requires_grad_()))
        )
        try:
            found = log_probs()
            found.sum().backward()
        finally:
            hook.remove()
        used = [(ids.flatten(), rows.grad.flatten(0, -2)) for ids, rows in looked_up if rows.grad is not None]
        ids, gradients = (torch.cat(each).cpu() for each in zip(*used, strict=True))
        shape = embedding.weight.shape
        return _Found(found.detach(), torch.sparse_coo_tensor(ids[None], gradients, shape, check_invariants=True))


def _run(what: str, compute: Callable[[Policy], _Found], policy: Policy) -> _Found | str:
    """The result, or the error message of an architecture that cannot run."""
    try:
        return compute(policy)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - the code of an architecture
        reason = next(iter(str(error).splitlines()), "")
        return f"{what} fails: {type(error).__name__}: {reason}"


def _set_attention(model: Any, name: str) -> None:
    if model.config._attn_implementation != name and model._can_set_attn_implementation():
        model.set_attn_implementation(name)


def _windows(text: Any) -> dict[str, int]:
    """Attention window settings of a decoder's configuration."""
    return {
        name: value
        for name, value in vars(text).items()
        if ("window" in name or "chunk_size" in name) and type(value) is int and value > _WINDOW
    }


@contextlib.contextmanager
def _prepared(model: Any, exact: bool) -> Iterator[None]:
    """Shrink windows so that short texts exceed them, and freeze the weights; with ``exact``, compute in float32.

    Each weight is converted while its module runs: a float32 copy of all would take as much memory as the weights.
    """
    text = model.config.get_text_config()
    stored: dict[Any, dict[str, Any]] = {}

    def widen(module: Any, inputs: Any) -> None:
        stored[module] = dict(module._parameters)
        for name, parameter in stored[module].items():
            if parameter is not None and parameter.is_floating_point():
                module._parameters[name] = torch.nn.Parameter(parameter.float(), requires_grad=False)

    def narrow(module: Any, inputs: Any, output: Any) -> None:
        module._parameters.update(stored.pop(module))

    with contextlib.ExitStack() as undo:
        for name, value in _windows(text).items():
            if value > _LONGEST_WINDOW:
                undo.callback(setattr, text, name, value)
                setattr(text, name, _WINDOW)
        for parameter in model.parameters():
            undo.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(False)
        for module in model.modules():
            if exact and any(p is not None and p.dtype != torch.float32 for p in module._parameters.values()):
                undo.callback(module.register_forward_pre_hook(widen).remove)
                undo.callback(module.register_forward_hook(narrow, always_call=True).remove)
        yield
