"""A tier that is ready to be asked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coca_mindspeed.algorithm.response import CONFIDENCE_FIRST_PROMPT
from coca_mindspeed.serving.backends import Backend
from coca_mindspeed.serving.decision import Rule
from coca_mindspeed.serving.serving_config import TierConfig

Messages = Sequence[Mapping[str, Any]]
Recalibrate = Callable[[float, str | None], float]


@dataclass(frozen=True)
class Tier:
    """One step of the ladder.

    Attributes:
        index: from the cheapest.
        config: as the file has it.
        backend: its server.
        rule: what its confidence means; None where it states none.
        recalibrate: from a stated confidence (and a domain) to the one that is decided by.
    """

    index: int
    config: TierConfig
    backend: Backend
    rule: Rule | None
    recalibrate: Recalibrate

    @property
    def name(self) -> str:
        return self.config.name

    def messages(self, messages: Messages) -> list[Mapping[str, Any]]:
        """The client's messages, the format's instructions before its own system message."""
        if not self.config.states_confidence:
            return list(messages)
        system = CONFIDENCE_FIRST_PROMPT if self.config.system_prompt is None else self.config.system_prompt
        if messages[0]["role"] == "system":
            return [{"role": "system", "content": f"{system}\n\n{messages[0]['content']}"}, *messages[1:]]
        return [{"role": "system", "content": system}, *messages]
