"""The tests' view of the program: proxies for its functions, plain data for its results."""

import builtins
import errno
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Collection
from typing import Any, NamedTuple

names = importlib.import_module("names")
values = importlib.import_module("values")
process = importlib.import_module("process")

_MAX_ANSWER_BYTES = 64 << 20
_ENDS_LOOPS = (StopIteration, StopAsyncIteration)

RIGHT, WRONG, UNGRADABLE = "right", "wrong", "ungradable"
UNAVAILABLE, STARVED = "unavailable", "starved"


class JobResult(NamedTuple):
    outcome: str  # after UNAVAILABLE (no process) or STARVED (too little processor time) another attempt may succeed
    reason: str = ""
    timed_out: bool = False
    outputs: tuple[str | None, ...] = ()  # of a job of the kind "outputs": a digest for each input


class ProgramError(Exception):
    """The program ended, hung or sent invalid data; no further test can pass."""

    def __init__(self, why: str, timed_out: bool = False) -> None:
        super().__init__(why)
        self.timed_out = timed_out


class CannotTestError(Exception):
    """The tests cannot be run, which is not the program's fault."""


class UnavailableError(CannotTestError):
    """No process was available; another attempt may succeed."""


class StarvedError(CannotTestError):
    def __init__(self, seconds: float) -> None:
        wall = process.WALL_FACTOR * seconds
        super().__init__(f"the machine was too busy: in {wall:g} s the program did not get its {seconds:g} s")


def expired(deadline: Any, seconds: float) -> bool:
    """Whether the limit is used up; ``StarvedError`` if only the wall time is."""
    if deadline.left() > 0:
        return False
    if deadline.starved():
        raise StarvedError(seconds)
    return True


class RemoteError(Exception):
    """The program raised an exception of its own class."""


class LoadError(ProgramError):
    """The program raised an exception (the cause) while it was loaded."""


def load(job: dict[str, Any], wanted: Collection[str]) -> "RemoteProgram":
    """Start the program of a job; ``LoadError`` if it raises an exception."""
    try:
        return RemoteProgram(job["source"], job["entry_point"], wanted, job["seconds"], job["total_seconds"])
    except (ProgramError, CannotTestError):
        raise
    except Exception as error:  # whatever the program raises
        raise LoadError(f"does not load: {type(error).__name__}: {error}") from error


class RemoteProgram:
    """The model's program in a process of its own.

    The program shares that process with the server and may forge any answer, early or twice. An answer is therefore
    only data, or an exception, for the one pending request.

    Args:
        entry_point: the function under test, or None.
        wanted: names of the program that the tests use; no other name is accepted from it.
        seconds: time limit for loading and for each request, as ``process.py`` counts.
        total_seconds: time limit for all of it.

    Attributes:
        failure: why no further test can pass, or None.
    """

    def __init__(
        self, source: str, entry_point: str | None, wanted: Collection[str], seconds: float, total_seconds: float
    ) -> None:
        self.failure: ProgramError | CannotTestError | None = None
        self._seconds, self._total_seconds = seconds, total_seconds
        self._deadline = process.program_clock().deadline(total_seconds)
        requests, requests_writer = os.pipe()
        answers, answers_writer = os.pipe()
        script = __file__.replace("remote.py", "program.py")
        self._process = start(
            [sys.executable, "-I", "-B", "-X", "utf8", script, str(requests), str(answers_writer)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(requests, answers_writer),
        )
        os.close(requests)
        os.close(answers_writer)
        os.set_blocking(answers, False)
        os.set_blocking(requests_writer, False)
        self._requests, self._answers = requests_writer, answers
        self._buffer = bytearray()
        try:
            exports = self._ask({"source": source, "entry_point": entry_point, "names": sorted(wanted)}, "exports")
            if type(exports) is not dict or not exports.keys() <= set(wanted) or any(map(names.is_dunder, exports)):
                raise self._fails("sent invalid data")
        except BaseException:
            self.close()
            raise
        self.exports: dict[str, Any] = exports

    def value_of(self, name: str) -> Any:
        return self._decode(self.exports[name])

    def request(self, target: int, operation: str, arguments: Any, keywords: dict[str, Any] | None = None) -> Any:
        try:
            request = {
                "target": target,
                "operation": operation,
                "arguments": [values.encode(item, self._owned) for item in arguments],
                "keywords": {name: values.encode(item, self._owned) for name, item in (keywords or {}).items()},
            }
        except CannotTestError as error:
            self.failure = error
            raise
        return self._decode(self._ask(request, "value"))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._requests)
        os.close(self._answers)

    def _owned(self, value: Any) -> int:
        if type(value) is not Remote:
            raise CannotTestError(f"the tests pass a {type(value).__name__}, which cannot go to another process")
        return int(object.__getattribute__(value, "_target"))

    def _decode(self, encoded: Any) -> Any:
        try:
            return values.decode(encoded, self._proxy)
        except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
            raise self._fails("sent invalid data") from None

    def _wait(self, reading: list[int], writing: list[int], deadline: Any) -> None:
        try:
            ready = process.until_ready(reading, writing, deadline)
        except process.TooManyFilesError as error:
            raise self._fails(str(error)) from None
        if not any(ready):
            in_all = deadline.charged == self._deadline.charged
            try:
                expired(deadline, self._total_seconds if in_all else self._seconds)
            except StarvedError as error:
                self.failure = error
                raise
            limit = f"{self._total_seconds:g} s in all" if in_all else f"{self._seconds:g} s"
            raise self._fails(f"took longer than {limit}", timed_out=True)

    def _proxy(self, target: Any) -> "Remote":
        if type(target) is not int:
            raise ValueError("a reference should be a number")
        return Remote(self, target)

    def _fails(self, why: str, timed_out: bool = False) -> ProgramError:
        self.failure = ProgramError(why, timed_out)
        return self.failure

    def _ask(self, request: dict[str, Any], expected: str) -> Any:
        """The field ``expected`` of the answer; raises the program's exception instead."""
        if self.failure is not None:
            raise self.failure
        deadline = self._deadline.sooner(self._seconds)
        self._send(json.dumps(request).encode("ascii") + b"\n", deadline)
        try:
            answer = json.loads(self._line(deadline))
        except (ValueError, RecursionError):
            raise self._fails("sent invalid data") from None
        if type(answer) is dict and answer.keys() == {expected}:
            return answer[expected]
        if type(answer) is dict and answer.keys() == {"error", "message"}:
            name, message = answer["error"], answer["message"]
            if type(name) is str and type(message) is str:
                _raise(name, message)
        raise self._fails("sent invalid data")

    def _send(self, data: bytes, deadline: Any) -> None:
        view = memoryview(data)
        while view:
            self._wait([], [self._requests], deadline)
            try:
                view = view[os.write(self._requests, view) :]
            except BrokenPipeError:
                raise self._fails("ended before its tests did") from None

    def _line(self, deadline: Any) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            self._wait([self._answers], [], deadline)
            chunk = os.read(self._answers, 1 << 16)
            if not chunk:
                raise self._fails("ended before its tests did")
            self._buffer += chunk
            if len(self._buffer) > _MAX_ANSWER_BYTES:
                raise self._fails("answered too much")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line


def start(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(command, **options)
    except OSError as error:
        kind = UnavailableError if error.errno in (errno.EAGAIN, errno.ENOMEM) else CannotTestError
        raise kind(f"the program's process does not start: {error}") from None


def _raise(name: str, message: str) -> None:
    kind = getattr(builtins, name, None)
    # Not SystemExit or the like, which would end the tests, nor StopIteration, which silently ends a loop over calls:
    # ``all(map(f, inputs))`` would be true.
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _ENDS_LOOPS):
        try:
            error = kind(message)
        except TypeError:  # UnicodeDecodeError takes five arguments
            error = RemoteError(f"{name}: {message}")
        raise error
    raise RemoteError(f"{name}: {message}")


class Remote:
    """A proxy for an object of the program: it can be called, read, set and iterated over, and equals nothing."""

    __slots__ = ("_program", "_target")

    def __init__(self, program: RemoteProgram, target: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_target", target)

    def _request(self, operation: str, *arguments: Any) -> Any:
        program = object.__getattribute__(self, "_program")
        return program.request(object.__getattribute__(self, "_target"), operation, arguments)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        program = object.__getattribute__(self, "_program")
        return program.request(object.__getattribute__(self, "_target"), "call", arguments, keywords)

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
        found = self._request(operation)
        if type(found) is not kind:
            program = object.__getattribute__(self, "_program")
            raise program._fails("sent invalid data")
        return found
