"""Which rows of a batch of verl's are the responses to one question.

verl names a row ``UID_SESSION_INDEX``: the question's draw, which of its samples, and which turn of it.  A batch may
be reordered for balance, may lack the responses of failed sessions, and may hold rows that only fill it up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coca_mindspeed.errors import TrainingError


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of a batch.

    Attributes:
        rows: of the whole groups, one group after the other, samples in order; indexes into the batch.
        size: G.
        broken: how many groups lack at least one of their responses.
    """

    rows: tuple[int, ...]
    size: int
    broken: int


def find_groups(keys: Sequence[str], tags: Sequence[Mapping[str, Any]], size: int, expected: int) -> Groups:
    """Take a batch apart.

    Args:
        keys: of the rows.
        tags: of the rows; those that fill the batch up have ``is_padding``.
        size: responses that each question has.
        expected: questions that the batch should have; one that is not there at all counts as broken.

    Raises:
        TrainingError: a key of another form, more than one turn or sample where there should be one, or too many
            questions.
    """
    groups: dict[str, dict[int, int]] = {}
    for row, (key, tag) in enumerate(zip(keys, tags, strict=True)):
        if tag.get("is_padding", False):
            continue
        uid, session, turn = _parts(key)
        if turn != 0:
            raise TrainingError(f"row {key}: a response has one turn, found a second one")
        if session in (group := groups.setdefault(uid, {})):
            raise TrainingError(f"row {key}: sample {session} of its question was there already")
        group[session] = row
    if len(groups) > expected:
        raise TrainingError(f"{len(groups)} questions in a step of data.train_batch_size {expected}")
    whole = [group for group in groups.values() if len(group) == size]
    if larger := [uid for uid, group in groups.items() if len(group) > size]:
        raise TrainingError(f"question {larger[0]}: {len(groups[larger[0]])} responses, rollout.n is {size}")
    rows = tuple(group[session] for group in whole for session in sorted(group))
    return Groups(rows, size, expected - len(whole))


def _parts(key: str) -> tuple[str, int, int]:
    parts = key.rsplit("_", 2)
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        raise TrainingError(f"row {key!r}: expected a key UID_SESSION_INDEX")
    return parts[0], int(parts[1]), int(parts[2])


def check_broken(broken: int, allowed: int, total: int, what: str) -> None:
    """Refuse more broken groups than the settings allow.

    Raises:
        TrainingError: there are more.
    """
    if broken > allowed:
        raise TrainingError(
            f"{broken} of {total} {what} lack responses because sessions of verl's failed (its log says why), and "
            f"coca.broken_groups allows {allowed}"
        )
