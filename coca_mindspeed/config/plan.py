"""The plan of a run: what ``coca-mindspeed check`` prints, and the problems for which the run is refused.

The module ``plan`` of each engine makes one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import Problem
from coca_mindspeed.utils.process import GIB

Row = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a memory estimate: name, bytes on the fullest device, and the formula in words."""

    name: str
    bytes: float
    formula: str = ""


@dataclass(frozen=True, slots=True)
class Phase:
    """Estimated memory of one phase of a step on the fullest device.

    Attributes:
        parts: add up to :attr:`gib`.
        limit_gib: what the device has for it.
    """

    name: str
    parts: tuple[Part, ...]
    limit_gib: float

    @property
    def gib(self) -> float:
        return sum(part.bytes for part in self.parts) / GIB

    def bytes_of(self, name: str) -> float:
        """Bytes of a part; 0 if there is none of this name."""
        return sum(part.bytes for part in self.parts if part.name == name)


@dataclass(frozen=True)
class Plan:
    """A run before it starts: labels and values, estimated memory, notes, and the problems; without any it may start.

    ``memory`` is empty if it cannot be estimated.
    """

    title: str
    rows: tuple[Row, ...]
    memory: tuple[Phase, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def file_rows(files: Mapping[str, str | None]) -> Iterator[Row]:
    """Paths by their keys, those of missing files marked; a key without a path has no row."""
    for key, path in files.items():
        if path:
            yield key, path if Path(path).exists() else f"{path} (MISSING)"


def evaluations(config: RunConfig, unit: str) -> str:
    """When a run evaluates; ``unit`` is the engine's name of a step, in the plural."""
    if not config.data.has_held_out:
        return "none: data.evaluate is null, so nothing is evaluated"
    interval = config.evaluation.interval
    return f"every {interval} {unit}" if interval else "none"


def batch_rows(step: str, prompts: int, group: int, mini_batch: int, passes: int) -> Iterator[Row]:
    """Responses and updates of a step, by the engine's name of it; a minibatch has ``mini_batch`` prompts."""
    yield step, f"{prompts} prompts x {group} responses = {prompts * group}"
    yield f"updates per {step}", f"{prompts // max(1, mini_batch) * passes} of {mini_batch} prompts"
