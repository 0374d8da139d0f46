"""The tests' view of the program: proxies for its functions, plain data for its results."""

import builtins
import importlib
import json
import subprocess
import sys
from collections.abc import Collection
from typing import Any

codec = importlib.import_module("program")
names = importlib.import_module("names")
process = importlib.import_module("process")

JobError, WRONG, UNGRADABLE = process.JobError, process.WRONG, process.UNGRADABLE
_MAX_ANSWER_BYTES = 64 << 20
_ENDS_LOOPS = (StopIteration, StopAsyncIteration)
_INVALID = "sent invalid data"


class RemoteError(Exception):
    """The program raised an exception of its own class."""


class LoadError(JobError):  # type: ignore[misc, valid-type]
    """The program raised an exception (the cause) while it was loaded."""


class RemoteProgram:
    """The model's program in a process of its own; a context manager.

    The program shares that process with the server and may forge any answer, early or twice. An answer is therefore
    only data, or an exception, for the one pending request.

    Args:
        job: with ``source``, ``entry_point`` (the function under test, or None), and time limits in ``seconds`` for
            loading and for each request and ``total_seconds`` for all of it, as ``process.py`` counts.
        wanted: names of the program that the tests use; no other name is accepted from it.

    Attributes:
        exports: the names that the program defines, and their encoded values.
        failure: why no further test can pass, or None.

    Raises:
        LoadError: the program raises an exception.
    """

    def __init__(self, job: dict[str, Any], wanted: Collection[str]) -> None:
        self.failure: Any = None
        self._seconds, self._total_seconds = job["seconds"], job["total_seconds"]
        self._deadline = process.program_clock().deadline(self._total_seconds)
        script = __file__.replace("remote.py", "program.py")
        command = [sys.executable, "-I", "-B", "-X", "utf8", script]
        self._pipes = process.Pipes(process.start(command, stderr=subprocess.DEVNULL))
        request = {"source": job["source"], "entry_point": job["entry_point"], "names": sorted(wanted)}
        try:
            exports = self.exports = self._ask(request, "exports")
            if type(exports) is not dict or not exports.keys() <= set(wanted) or any(map(names.is_dunder, exports)):
                raise self.fails(_INVALID)
        except BaseException as error:
            self._pipes.close()
            if isinstance(error, JobError) or not isinstance(error, Exception):
                raise
            raise LoadError(WRONG, f"does not load: {type(error).__name__}: {error}") from error

    def __enter__(self) -> "RemoteProgram":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipes.close()

    def value_of(self, name: str) -> Any:
        return self._decode(self.exports[name])

    def request(self, target: int, operation: str, arguments: Any, keywords: dict[str, Any]) -> Any:
        try:
            request = {
                "target": target,
                "operation": operation,
                "arguments": [codec.encode(item, self._owned) for item in arguments],
                "keywords": {name: codec.encode(item, self._owned) for name, item in keywords.items()},
            }
        except JobError as error:
            self.failure = error
            raise
        return self._decode(self._ask(request, "value"))

    def fails(self, why: str, timed_out: bool = False) -> Exception:
        """No further test can pass, also if the tests catch the exception."""
        self.failure = JobError(WRONG, why, timed_out)
        return self.failure  # type: ignore[no-any-return]

    def _owned(self, value: Any) -> int:
        if type(value) is not Remote:
            raise JobError(UNGRADABLE, f"the tests pass a {type(value).__name__}, which cannot go to another process")
        return int(object.__getattribute__(value, "_target"))

    def _proxy(self, target: Any) -> "Remote":
        if type(target) is not int:
            raise ValueError("a reference should be a number")
        return Remote(self, target)

    def _decode(self, encoded: Any) -> Any:
        try:
            return codec.decode(encoded, self._proxy)
        except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
            raise self.fails(_INVALID) from None

    def _ask(self, request: dict[str, Any], expected: str) -> Any:
        """The field ``expected`` of the answer; raises the program's exception instead."""
        if self.failure is not None:
            raise self.failure
        self._pipes.unsent = memoryview(json.dumps(request).encode("ascii") + b"\n")
        try:
            answer = json.loads(self._line())
        except JobError as error:
            self.failure = error
            raise
        except (ValueError, RecursionError):
            raise self.fails(_INVALID) from None
        if type(answer) is dict and answer.keys() == {expected}:
            return answer[expected]
        if type(answer) is dict and answer.keys() == {"error", "message"} and set(map(type, answer.values())) == {str}:
            raise _exception(answer["error"], answer["message"])
        raise self.fails(_INVALID)

    def _line(self) -> bytes:
        """Send the request, and return the next line of the program."""
        deadline, received = self._deadline.sooner(self._seconds), self._pipes.output
        while self._pipes.open and not self._pipes.refused and (self._pipes.unsent or b"\n" not in received):
            if not any(self._pipes.move(lambda *descriptors: process.until_ready(*descriptors, deadline))):
                in_all = deadline.charged == self._deadline.charged
                deadline.expired(self._total_seconds if in_all else self._seconds)
                limit = f"{self._total_seconds:g} s in all" if in_all else f"{self._seconds:g} s"
                raise self.fails(f"took longer than {limit}", timed_out=True)
            if len(received) > _MAX_ANSWER_BYTES:
                raise self.fails("answered too much")
        if self._pipes.refused or b"\n" not in received:
            raise self.fails("ended before its tests did")
        line, _, rest = bytes(received).partition(b"\n")
        received[:] = rest
        return line


def _exception(name: str, message: str) -> Exception:
    kind = getattr(builtins, name, None)
    # Not SystemExit or the like, which would end the tests, nor StopIteration, which silently ends a loop over calls:
    # ``all(map(f, inputs))`` would be true.
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _ENDS_LOOPS):
        try:
            return kind(message)
        except TypeError:  # UnicodeDecodeError takes five arguments
            pass
    return RemoteError(f"{name}: {message}")


class Remote:
    """A proxy for an object of the program: it can be called, read, set and iterated over, and equals nothing."""

    __slots__ = ("_program", "_target")

    def __init__(self, program: RemoteProgram, target: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_target", target)

    def _request(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        program = object.__getattribute__(self, "_program")
        return program.request(object.__getattribute__(self, "_target"), operation, arguments, keywords)

    def __call__(self, /, *arguments: Any, **keywords: Any) -> Any:
        return self._request("call", *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._request("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._request("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._request("item", key)

    def __len__(self) -> int:
        return int(self._checked("length", int))

    def __bool__(self) -> bool:
        return bool(self._checked("truth", bool))

    def __iter__(self) -> Any:
        return iter(self._checked("iterate", list))

    def _checked(self, operation: str, kind: type) -> Any:
        reply = self._request(operation)
        if type(reply) is not kind:
            program = object.__getattribute__(self, "_program")
            raise program.fails(_INVALID)
        return reply
