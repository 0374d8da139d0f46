"""Which responses of a minibatch share a backward pass."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coca_mindspeed.config.schema import TrainerConfig

#: What a pass costs besides its tokens, in tokens: the least, a small model's on a CPU, and as a share of a full pass,
#: so that whoever has room for few passes gets few.
_PASS, _PASS_SHARE = 256, 1 / 16


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

    By tokens, a microbatch's rows, padded to the longest of them, have no more than so many tokens, prompts included; a
    response that alone has more is a microbatch of its own.  Responses are put in order by length, and group by group,
    by the longest response and by the prompt; the order is taken that can be cut into passes with the least padding: by
    length where responses are long, by groups where prompts are, which responses of a pass share.

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

    def groups_by(size_of: Mapping[int, int] | Sequence[int]) -> list[int]:
        return sorted(rows, key=lambda row: (-size_of[row // group_size], row // group_size, -lengths[row]))

    if config.share_prompts:
        longest = {prompt: max(lengths[row] for row in rows_of(prompt)) for prompt in prompts}
        by_length = sorted(rows, key=lambda row: (-lengths[row], -prompt_lengths[row // group_size]))
        orders = [groups_by(longest), groups_by(prompt_lengths), by_length]
    else:
        orders = [sorted(rows, key=lambda row: -lengths[row] - prompt_lengths[row // group_size])]
    sizes = _Sizes(group_size, lengths, prompt_lengths, config.share_prompts, config.microbatch_tokens)
    best = min((_cut(order, sizes) for order in orders), key=lambda split: split.tokens)
    return [_microbatch(part, group_size) for part in best.parts]


def fullest(prompts: int, group_size: int, length: int, prompt_length: int, config: TrainerConfig) -> list[int]:
    """Group sizes of the microbatch that holds the most, where responses and prompts are all as long as these.

    None of a step with shorter ones among them has more rows of this length.
    """
    if config.microbatch_tokens is None:
        return [group_size] * min(prompts, config.microbatch_prompts or prompts)
    each, shared = (length, prompt_length) if config.share_prompts else (length + prompt_length, 0)
    whole, room = divmod(config.microbatch_tokens, group_size * each + shared)
    if whole >= prompts:
        return [group_size] * prompts
    rest = max(0, room - shared) // each
    return [group_size] * whole + [rest] * (rest > 0) or [1]


def _microbatch(rows: Sequence[int], group_size: int) -> Microbatch:
    rows = sorted(rows)
    groups = Counter(row // group_size for row in rows)
    return Microbatch(list(groups), rows, list(groups.values()))


@dataclass(frozen=True)
class _Sizes:
    """How long responses and prompts are, and how many tokens of both share a pass."""

    group_size: int
    lengths: Sequence[int]
    prompt_lengths: Sequence[int]
    share_prompts: bool
    limit: int

    def runs(self, rows: Sequence[int]) -> Iterator[NDArray[np.int64]]:
        """For each of the rows: tokens, padding included, of the runs that end there, the shortest run first.

        Runs beyond the limit are left out, but for the row alone.
        """
        prompts = [row // self.group_size for row in rows]
        response = np.array(self.lengths)[rows]
        prompt = np.array(self.prompt_lengths)[prompts]
        again = np.array(_next_alike(prompts))
        first = 0  # of the longest run that fits; a later row's begins no earlier
        for last in range(len(rows)):
            run = slice(first, last + 1)
            count = np.arange(1, last - first + 2)
            copies = (again[run][::-1] > last).cumsum() if self.share_prompts else count
            tokens = count * np.maximum.accumulate(response[run][::-1])
            tokens += copies * np.maximum.accumulate(prompt[run][::-1])
            fitting = max(1, int(np.searchsorted(tokens, self.limit, side="right")))
            first = last + 1 - fitting
            yield tokens[:fitting]


def _next_alike(values: Sequence[int]) -> list[int]:
    """For each value the place where it comes again; one behind the last where it does not."""
    places: dict[int, int] = {}
    following = [0] * len(values)
    for place in reversed(range(len(values))):
        following[place] = places.get(values[place], len(values))
        places[values[place]] = place
    return following


class _Split(NamedTuple):
    """Rows in passes, and the tokens that these cost, padding and what each pass costs besides included."""

    tokens: int
    parts: list[list[int]]


def _cut(rows: Sequence[int], sizes: _Sizes) -> _Split:
    """Cut rows, in their order, into the passes that cost least in all."""
    costs = np.zeros(len(rows) + 1, dtype=np.int64)  # of the first n rows
    another = max(_PASS, int(_PASS_SHARE * sizes.limit))
    begins = np.zeros(len(rows) + 1, dtype=np.int64)  # of the last pass of those
    for last, tokens in enumerate(sizes.runs(rows)):
        totals = tokens + another + costs[last + 1 - len(tokens) : last + 1][::-1]
        chosen = int(totals.argmin())
        costs[last + 1], begins[last + 1] = totals[chosen], last - chosen
    parts = []
    end = len(rows)
    while end:
        parts.append(list(rows[begins[end] : end]))
        end = int(begins[end])
    return _Split(int(costs[-1]), parts[::-1])
