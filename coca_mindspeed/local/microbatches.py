"""Which responses of a minibatch share a backward pass."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from coca_mindspeed.config.schema import TrainerConfig


@dataclass(frozen=True)
class Microbatch:
    """Responses of one backward pass.

    Attributes:
        prompts: P indices, ascending.
        rows: the responses' rows, prompt by prompt.
        group_sizes: how many of them answer each prompt.
    """

    prompts: list[int]
    rows: list[int]
    group_sizes: list[int]


def microbatches(
    prompts: Sequence[int],
    group_size: int,
    lengths: Sequence[int],
    prompt_lengths: Sequence[int],
    config: TrainerConfig,
) -> list[Microbatch]:
    """Split a minibatch by ``trainer.microbatch_prompts`` or ``trainer.microbatch_tokens``; by neither: one.

    By tokens, the longest come first, and a microbatch is filled as long as its rows, padded to the longest of them,
    have no more than so many tokens, prompts included; a response that alone has more is a microbatch of its own.
    Where prompts are shared, a group stays together as far as it fits, and its prompt counts once a microbatch.

    Args:
        prompts: the minibatch's prompts.
        group_size: G; row ``p * G + g`` is response g to prompt p.
        lengths: tokens of every response of the step.
        prompt_lengths: tokens of every prompt of the step.
        config: says how to split.
    """

    def rows_of(prompt: int) -> range:
        return range(prompt * group_size, (prompt + 1) * group_size)

    if config.microbatch_tokens is None:
        size = config.microbatch_prompts or len(prompts)
        parts = [[row for p in prompts[i : i + size] for row in rows_of(p)] for i in range(0, len(prompts), size)]
        return [_microbatch(part, group_size) for part in parts]

    rows = [row for prompt in prompts for row in rows_of(prompt)]
    longest = {prompt: max(lengths[row] for row in rows_of(prompt)) for prompt in prompts}
    if config.share_prompts:
        rows.sort(key=lambda row: (-longest[row // group_size], row // group_size, -lengths[row]))
    else:
        rows.sort(key=lambda row: -(prompt_lengths[row // group_size] + lengths[row]))
    filled: list[_Filling] = []
    for row in rows:
        if not filled or not filled[-1].takes(row):
            filled.append(_Filling(group_size, lengths, prompt_lengths, config.share_prompts, config.microbatch_tokens))
        filled[-1].add(row)
    return [_microbatch(part.rows, group_size) for part in filled]


def _microbatch(rows: Sequence[int], group_size: int) -> Microbatch:
    rows = sorted(rows)
    groups = Counter(row // group_size for row in rows)
    return Microbatch(list(groups), rows, list(groups.values()))


class _Filling:
    """A microbatch that is being filled with rows, up to a number of tokens."""

    def __init__(
        self,
        group_size: int,
        lengths: Sequence[int],
        prompt_lengths: Sequence[int],
        share_prompts: bool,
        limit: int,
    ) -> None:
        self.rows: list[int] = []
        self._group_size, self._lengths, self._prompt_lengths = group_size, lengths, prompt_lengths
        self._share_prompts, self._limit = share_prompts, limit
        self._prompts: set[int] = set()
        self._longest = self._longest_prompt = 0

    def takes(self, row: int) -> bool:
        """Whether it has room, padding included; an empty one takes any row."""
        prompt = row // self._group_size
        rows = len(self.rows) + 1
        prompts = len(self._prompts) + (prompt not in self._prompts) if self._share_prompts else rows
        tokens = rows * max(self._longest, self._lengths[row])
        tokens += prompts * max(self._longest_prompt, self._prompt_lengths[prompt])
        return not self.rows or tokens <= self._limit

    def add(self, row: int) -> None:
        """Put a row in."""
        prompt = row // self._group_size
        self.rows.append(row)
        self._prompts.add(prompt)
        self._longest = max(self._longest, self._lengths[row])
        self._longest_prompt = max(self._longest_prompt, self._prompt_lengths[prompt])
