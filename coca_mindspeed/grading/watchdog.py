"""The end of a pipe that this process holds, so that what waits at the other end dies with it.

See :mod:`coca_mindspeed.grading.code.inside.lifeline` for the other end.
"""

import os

_held: set[int] = set()


def hold(descriptor: int) -> None:
    """Keep a forked child of this process from holding the pipe as well: it would outlive this process and keep it."""
    _held.add(descriptor)


def let_go(descriptor: int) -> None:
    """Forget the descriptor; to be called before it is closed."""
    _held.discard(descriptor)


def _let_go_in_child() -> None:
    # Replaced, not closed: whatever Python object owns the number in the child closes it some time later.
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in _held:
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
