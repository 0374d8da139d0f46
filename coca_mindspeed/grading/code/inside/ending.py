"""How a job ended, as every kind of test says it."""

from typing import NamedTuple

RIGHT, WRONG, UNGRADABLE = "right", "wrong", "ungradable"
UNAVAILABLE, STARVED = "unavailable", "starved"


class Ending(NamedTuple):
    """What is said about a job, besides its token.

    Attributes:
        outcome: one of the five.  Another attempt may go better where the machine had no process to give
            (``unavailable``) or too little processor time (``starved``).
        reason: why, for people alone.
        timed_out: whether a limit on its time has ended the program.
        outputs: of a job of the kind ``outputs``, a digest for each input.
    """

    outcome: str
    reason: str = ""
    timed_out: bool = False
    outputs: tuple[str | None, ...] = ()
