"""One response, token by token: sampling that can be left at any time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.sampler import Decoder, draw_tokens


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token.

    Attributes:
        id: its id.
        log_prob: nats, under the tempered distribution that it was drawn from.
        top: (id, log-prob) of the most probable tokens, most probable first.
        ended: whether it ends the response.
    """

    id: int
    log_prob: float
    top: tuple[tuple[int, float], ...]
    ended: bool


class TokenStream(Iterator[SampledToken]):
    """Tokens of one response, each computed when it is asked for, on whatever thread asks."""

    def __init__(
        self, policy: Policy, prompt: Sequence[int], *, temperature: float, generator: torch.Generator, top: int = 0
    ) -> None:
        """Begin; nothing is computed yet.

        Args:
            policy: what is sampled from.
            prompt: token ids.
            temperature: divides the logits; 0: the most probable token, always.
            generator: on the policy's device.
            top: how many alternatives to name.
        """
        self._policy, self._prompt, self._temperature = policy, list(prompt), temperature
        self._generator, self._top = generator, top
        self._decoder: Decoder | None = None
        self._last: torch.Tensor | None = None
        self._ended = False

    def __next__(self) -> SampledToken:
        if self._ended:
            raise StopIteration
        # Inference mode belongs to a thread, so it is entered for each token anew.
        with torch.inference_mode(), self._policy.autocast():
            if self._decoder is None:
                self._decoder = Decoder(self._policy, [self._prompt])
            elif self._last is not None:
                self._decoder.step(self._last)
            logits = self._policy.logits_of_policy(self._decoder.logits, self._temperature or 1.0)
            distribution = logits.log_softmax(dim=-1)
            if self._temperature == 0:
                token = distribution.argmax(dim=-1, keepdim=True)
            else:
                token = draw_tokens(distribution.exp(), self._generator)
            self._last = token
            values, ids = distribution[0].topk(min(self._top, distribution.shape[-1]))
            sampled = int(token)
            self._ended = sampled in self._policy.eos_ids
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
            return SampledToken(sampled, float(distribution[0, sampled]), top, self._ended)
