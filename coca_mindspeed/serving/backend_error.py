"""What can go wrong with a backend, each of one kind."""

from typing import Literal

ErrorKind = Literal["unreachable", "timeout", "busy", "rejected", "failed", "garbage", "cut"]


class BackendError(Exception):
    """A backend did not give a whole answer.

    Attributes:
        kind: ``unreachable``, ``timeout``, ``busy`` (429), ``rejected`` (it finds fault with the request), ``failed``
            (it finds fault with itself, or with our key), ``garbage`` (no protocol we know) or ``cut`` (it ended in
            the middle).
        retry_after: seconds, where it said so.
    """

    def __init__(self, kind: ErrorKind, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.kind, self.retry_after = kind, retry_after
