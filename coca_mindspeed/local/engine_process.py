"""The process that holds vLLM, as the trainer sees it: started, asked, and ended with the trainer."""

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

import coca_mindspeed
from coca_mindspeed.grading import lifeline
from coca_mindspeed.local.sampling_engine import RolloutError
from coca_mindspeed.local.vllm_wire import receive, send

# Our package by its place alone: on the path, its neighbours would stand in the way of the environment's own packages.
_BOOTSTRAP = """
import importlib, importlib.util, sys
place, module, connection, lifeline = sys.argv[1:]
spec = importlib.util.spec_from_file_location(
    "coca_mindspeed", place + "/__init__.py", submodule_search_locations=[place]
)
sys.modules["coca_mindspeed"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["coca_mindspeed"])
importlib.import_module(module).main(int(connection), int(lifeline))
"""
_TICK_SECONDS = 0.5  # between looks at whether the process still runs; an answer is taken as soon as it comes
_PATIENCE_SECONDS = 10.0  # for an end that has begun
_LAST_LINES = 8  # of its output, in a message


class EngineProcess:
    """Runs ``main(connection, lifeline)`` of a module in another Python, and exchanges messages (:mod:`.vllm_wire`)."""

    def __init__(self, python: str, module: str, log: Path, environment: Mapping[str, str]) -> None:
        """Start it.

        Args:
            python: of the environment that it needs.
            module: of this package, that imports nothing which that environment lacks.
            log: where its output goes, behind what is there.
            environment: of the process.

        Raises:
            RolloutError: it cannot be started.
        """
        self._log = log
        ours, theirs = multiprocessing.Pipe()
        watched, held = os.pipe()
        self._connection, self._held = ours, held
        # Processes that are forked off this one meanwhile must not keep any of this open when it is gone.
        for descriptor in (ours.fileno(), theirs.fileno(), watched, held):
            lifeline.hold(descriptor)
        command = [python, "-c", _BOOTSTRAP, str(Path(coca_mindspeed.__file__).parent), module]
        try:
            with log.open("ab") as output:
                self._start = output.tell()
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(watched)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**environment, "PYTHONSAFEPATH": "1"},  # nor the directory that the user is in
                    start_new_session=True,  # Ctrl-C is for the trainer, which finishes its step
                    pass_fds=(theirs.fileno(), watched),
                )
        except OSError as error:
            self._let_go()
            raise RolloutError(f"{python}: cannot be started, with its output in {log}: {error.strerror}") from error
        finally:
            for descriptor in (theirs.fileno(), watched):
                lifeline.let_go(descriptor)
            theirs.close()
            os.close(watched)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(
        self,
        message: Mapping[str, Any],
        tensors: Sequence[Tensor] = (),
        following: Iterable[tuple[Mapping[str, Any], Sequence[Tensor]]] = (),
    ) -> list[Tensor]:
        """Send a message, and those that follow it, and wait for the answer's tensors.

        Raises:
            RolloutError: the process has failed or is gone; it says why, as far as that is known.
        """
        try:
            send(self._connection, message, tensors)
            for more in following:
                send(self._connection, *more)
            answer, found = self._answer()
        except (OSError, EOFError) as error:
            raise RolloutError(self._why_it_ended()) from error
        if "error" in answer:
            raise RolloutError(self._failed(answer["error"]))
        return found

    def _answer(self) -> tuple[dict[str, Any], list[Tensor]]:
        while not self._connection.poll(_TICK_SECONDS):
            if self._process.poll() is not None and not self._connection.poll():
                raise EOFError("the process has ended")
        return receive(self._connection)

    def _why_it_ended(self) -> str:
        """What it said last, if it could say something; else how it ended."""
        with suppress(OSError, EOFError):
            while self._connection.poll():
                answer, _ = receive(self._connection)
                if "error" in answer:
                    return self._failed(answer["error"])
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_SECONDS)
        code = self._process.returncode
        if code is None:
            return f"vLLM's process {self.pid} does not answer any more; {self._output()}"
        if code < 0:
            name = signal.Signals(-code).name
            memory = " (the kernel does so where memory is short)" if name == "SIGKILL" else ""
            return f"vLLM's process {self.pid} was ended by {name}{memory}; {self._output()}"
        return f"vLLM's process {self.pid} ended by itself, with status {code}; {self._output()}"

    def _failed(self, error: str) -> str:
        return f"vLLM has failed: {error}; its output is in {self._log}"

    def _output(self) -> str:
        """Where its output is, and the last lines of it."""
        with suppress(OSError):
            with self._log.open("rb") as output:
                output.seek(self._start)
                lines = output.read().decode("utf-8", "replace").splitlines()
            if lines:
                return f"the end of {self._log}:\n" + "\n".join(f"  {line}" for line in lines[-_LAST_LINES:])
        return f"its output is in {self._log}, and there is none"

    def close(self) -> None:
        """End the process and all that it has started; more than once is no harm."""
        if self._connection.closed:
            return
        self._let_go()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _let_go(self) -> None:
        for descriptor in (self._connection.fileno(), self._held):
            lifeline.let_go(descriptor)
        self._connection.close()
        os.close(self._held)
