"""The tests' view of the program: its functions as stand-ins, its results as plain data."""

import builtins
import importlib
import json
import os
import select
import subprocess
import sys
import time
from typing import Any

sys.path.insert(0, __file__.rpartition("/")[0])
values = importlib.import_module("values")

_MAX_ANSWER_BYTES = 64 << 20


class ProgramError(Exception):
    """The program ended, hung or answered nonsense; no test of it can pass any more."""


class CannotTestError(Exception):
    """The tests cannot be run, and that is not the program's fault."""


class RemoteError(Exception):
    """The program raised an exception of its own making."""


class RemoteProgram:
    """The model's program in a process of its own.

    Args:
        source: Python source.
        entry_point: the function under test, or None.
        seconds: how long it may take to load, and for each request.
    """

    def __init__(self, source: str, entry_point: str | None, seconds: float) -> None:
        self._seconds = seconds
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
            self.exports: dict[str, Any] = self._ask({"source": source, "entry_point": entry_point})["exports"]
        except KeyError:
            raise ProgramError("answered nonsense") from None

    def value_of(self, name: str) -> Any:
        """What the program calls ``name``; raises ``KeyError`` if it has no such value."""
        return self._decode(self.exports[name]["value"])

    def module_of(self, name: str) -> str | None:
        """The module that the program imported as ``name``, or None."""
        module = self.exports.get(name, {}).get("module")
        return module if isinstance(module, str) else None

    def request(self, target: int, operation: str, arguments: Any, keywords: dict[str, Any] | None = None) -> Any:
        answer = self._ask(
            {
                "target": target,
                "operation": operation,
                "arguments": [values.encode(item, self._owned) for item in arguments],
                "keywords": {name: values.encode(item, self._owned) for name, item in (keywords or {}).items()},
            }
        )
        if "value" not in answer:
            raise ProgramError("answered nonsense")
        return self._decode(answer["value"])

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
            return values.decode(encoded, lambda target: Remote(self, int(target)))
        except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
            raise ProgramError("answered nonsense") from None

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + self._seconds
        self._send(json.dumps(request).encode("ascii") + b"\n", deadline)
        try:
            answer = json.loads(self._line(deadline))
        except (ValueError, RecursionError):
            raise ProgramError("answered nonsense") from None
        if not isinstance(answer, dict):
            raise ProgramError("answered nonsense")
        if "error" in answer:
            _raise(str(answer["error"]), str(answer.get("message")))
        return answer

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            if not select.select([], [self._requests], [], max(0.0, deadline - time.monotonic()))[1]:
                raise ProgramError(f"took longer than {self._seconds:g} s")
            try:
                view = view[os.write(self._requests, view) :]
            except BrokenPipeError:
                raise ProgramError("ended before its tests did") from None

    def _line(self, deadline: float) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise ProgramError(f"took longer than {self._seconds:g} s")
            chunk = os.read(self._answers, 1 << 16)
            if not chunk:
                raise ProgramError("ended before its tests did")
            self._buffer += chunk
            if len(self._buffer) > _MAX_ANSWER_BYTES:
                raise ProgramError("answered too much")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line


def start(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start the program's process."""
    try:
        return subprocess.Popen(command, **options)
    except OSError as error:
        raise CannotTestError(f"the program's process does not start: {error}") from None


def _raise(name: str, message: str) -> None:
    kind = getattr(builtins, name, None)
    # Never SystemExit or the like: the tests' process goes on whatever the program raises.
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            error = kind(message)
        except TypeError:  # UnicodeDecodeError takes five arguments
            error = RemoteError(f"{name}: {message}")
        raise error
    raise RemoteError(f"{name}: {message}")


class Remote:
    """Stands for an object of the program's process: can be called, read, set and iterated over, and equals nothing."""

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
        return int(self._request("length"))

    def __iter__(self) -> Any:
        return iter(self._request("iterate"))
