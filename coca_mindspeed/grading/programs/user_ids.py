"""A user id for each sandbox that root starts, that no other sandbox of this machine has at the time.

The kernel counts processes by user: two sandboxes of one id would use up each other's limit.  Standard library only.
"""

import fcntl
import os
import random
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coca_mindspeed.errors import GradingError

# Ranges that systemd's list of user ids leaves unused.  The first is wide enough that containers that do not see each
# other's locks hardly ever draw the same id; it is not mapped where root is root of a user namespace only.
_RANGES = ((1_900_000_000, 4_096), (60_578, 606))
_ATTEMPTS = 1_000


@contextmanager
def locked_user_id() -> Iterator[tuple[int, int]]:
    """A free id, and the descriptor that holds its lock.

    The lock is on the open file: whoever inherits the descriptor keeps the id taken until it ends.

    Raises:
        GradingError: no id is free.
    """
    first, count = next(((first, count) for first, count in _RANGES if _mapped(first, count)), _RANGES[-1])
    directory = _lock_directory()
    for _ in range(_ATTEMPTS):
        uid = first + random.randrange(count)
        descriptor = os.open(directory / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if _lock(descriptor):
                yield uid, descriptor
                return
        finally:
            os.close(descriptor)
    raise GradingError(f"every user id that was tried is in use by another sandbox; see the locks in {directory}")


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _mapped(first: int, count: int) -> bool:
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, _, length = map(int, line.split())
        if inside <= first and first + count <= inside + length:
            return True
    return False


def _lock_directory() -> Path:
    for parent in (Path("/run"), Path(tempfile.gettempdir())):
        directory = parent / "coca-mindspeed-user-ids"
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            continue
        found = directory.lstat()
        # In /tmp another user may have been there first.
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o022:
            return directory
    raise GradingError(f"no directory for the locks of user ids: neither /run nor {tempfile.gettempdir()} can be used")
