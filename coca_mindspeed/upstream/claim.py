"""One run at a time in an output directory, also where locks of a shared file system are local to a node.

Beside the lock, the launcher writes the file :data:`CLAIM` exclusively: host, process and time, renewed each minute.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from coca_mindspeed.errors import Problem, raise_problems
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.directories import lock_run
from coca_mindspeed.utils.files import write_atomically

CLAIM = "running.json"
RENEWAL_SECONDS, STALE_SECONDS = 60.0, 300.0
_POLL_SECONDS = 5.0


def process_start(process: int) -> int | None:
    """When a process of this host started, in clock ticks since it booted; None: there is no such process."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


@dataclass(frozen=True)
class Claim:
    """Who runs in a directory: host, process and its start there, and the seconds since 1970 of the last sign."""

    host: str
    process: int
    started: int | None
    time: float

    def is_of(self, other: "Claim") -> bool:
        """Whether both are of one process, at whatever time."""
        return replace(self, time=other.time) == other


@dataclass(frozen=True)
class Claimant:
    """This process and its clock."""

    host: str
    process: int
    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    start_of: Callable[[int], int | None] = process_start

    @classmethod
    def this_process(cls) -> "Claimant":
        return cls(socket.gethostname(), os.getpid())

    def claim(self) -> Claim:
        """The claim of this process, now."""
        return Claim(self.host, self.process, self.start_of(self.process), self.now())

    def is_gone(self, claim: Claim) -> bool:
        """Whether a claim may be replaced: its process on this host ended, or it was not renewed for five minutes."""
        if claim.host == self.host:
            return self.start_of(claim.process) is None or self.start_of(claim.process) != claim.started
        return self.now() - claim.time >= STALE_SECONDS


@contextmanager
def claim_output(directory: Path, *, wait: bool, claimant: Claimant | None = None) -> Iterator[None]:
    """Hold the lock and the claim of an output directory; the claim is renewed each minute.

    With ``wait``, wait up to five minutes for a claim of another host that is not renewed, and say so.  Raises
    ConfigError if another process runs in the directory.
    """
    claimant = claimant or Claimant.this_process()
    with lock_run(directory):
        file = directory / CLAIM
        _take(file, claimant, wait=wait)
        ended = threading.Event()
        renewal = threading.Thread(target=_renew, args=(file, claimant, ended), daemon=True)
        renewal.start()
        try:
            yield
        finally:
            ended.set()
            renewal.join(RENEWAL_SECONDS)
            if (claim := read_claim(file)) is not None and claim.is_of(claimant.claim()):
                file.unlink(missing_ok=True)


def read_claim(file: Path) -> Claim | None:
    """The claim in a file; None if there is no file.  One that is being written, or damaged, is of no host."""
    try:
        text, written = file.read_text(encoding="utf-8"), file.stat().st_mtime
    except FileNotFoundError:
        return None
    try:
        return Claim(**json.loads(text))
    except (ValueError, TypeError):
        return Claim("", 0, None, written)


def _take(file: Path, claimant: Claimant, *, wait: bool) -> None:
    """Write the claim of this process, in place of one whose process is gone."""
    first = waited = None
    while True:
        try:
            with file.open("x", encoding="utf-8") as new:
                new.write(json.dumps(vars(claimant.claim())))
            return
        except FileExistsError:
            pass
        if (claim := read_claim(file)) is None:
            continue
        if waited is None:
            first, waited = claim, claimant.now()
        # A clock that is ahead of ours would make the wait longer than the five minutes without a sign.
        silent = claim == first and claimant.now() - waited >= STALE_SECONDS
        if claimant.is_gone(claim) or (silent and claim.host != claimant.host):
            _remove(file, claim, claimant)
        elif not wait or claim.host == claimant.host or claim != first:
            _refuse(file, claim)
        else:
            if claimant.now() == waited:
                left = min(STALE_SECONDS, claim.time + STALE_SECONDS - claimant.now())
                print_text(
                    f"launch: {file} is of process {claim.process} on {claim.host}; waiting up to {left:.0f} seconds "
                    "for a sign of it"
                )
            claimant.sleep(_POLL_SECONDS)


def _remove(file: Path, claim: Claim, claimant: Claimant) -> None:
    """Remove a claim whose process is gone, unless another process has just put its own in its place."""
    aside = file.with_name(f".{file.name}.{claimant.host}-{claimant.process}")
    with suppress(FileNotFoundError):
        file.rename(aside)
    if (removed := read_claim(aside)) is not None and removed != claim:
        with suppress(FileExistsError):
            os.link(aside, file)
    aside.unlink(missing_ok=True)


def _refuse(file: Path, claim: Claim) -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(claim.time))
    reason = f"process {claim.process} on {claim.host or 'an unknown host'} runs here, with a sign at {when} ({file})"
    fix = (
        "stop it, or choose another directory; if it is gone, add --resume, which waits for five minutes without a sign"
    )
    raise_problems([Problem("running", "--output", file.parent, reason, fix)])


def _renew(file: Path, claimant: Claimant, ended: threading.Event) -> None:
    """Renew the claim until ``ended``; a process that has lost it, being suspended for minutes, ends itself."""
    while not ended.wait(RENEWAL_SECONDS):
        claim, own = read_claim(file), claimant.claim()
        if claim is not None and not claim.is_of(own):
            print_text(f"launch: process {claim.process} on {claim.host} has taken {file}; ending")
            signal.raise_signal(signal.SIGTERM)
            return
        with suppress(OSError):  # a shared file system that is away for a moment
            write_atomically(file, json.dumps(vars(own)))
