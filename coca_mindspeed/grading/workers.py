"""Process pool with limits on processor time, wall time and memory, for functions of untrusted input."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from coca_mindspeed.errors import GradingError
from coca_sandbox.inside import process as processes
from coca_sandbox.inside.process import WALL_FACTOR

Item = TypeVar("Item")
Result = TypeVar("Result")

_MAX_FAILED_STARTS, PAUSE_SECONDS = 3, 0.1  # in a row; before the next one, doubled each time
# Tasks taken from the input per worker: enough for the others while one waits for its time limit.
_IN_FLIGHT = 256
_START_SECONDS = 180.0  # for a worker to start and warm up, perhaps from a slow file system
_EXIT_SECONDS = 1.0
_EXIT_OUT_OF_MEMORY = 77
_STARVED_ATTEMPTS = 2  # of a task that got too little processor time


class Failure(str, Enum):
    """Why a task has no result; only ``STARVED`` is the machine's fault."""

    TIMEOUT = "timeout"
    STARVED = "starved"
    DIED = "died"
    RAISED = "raised"


@dataclass(frozen=True, slots=True)
class TaskResult(Generic[Result]):
    value: Result | None  # None if the function failed
    failure: Failure | None = None
    detail: str = ""
    seconds: float = 0.0  # wall time of the function; the limit after a timeout; 0 if it raised or its process died


@dataclass(slots=True, eq=False)
class _Task:
    function: Callable[[Any], Any]
    item: Any
    starved: int = 0
    result: TaskResult[Any] | None = None


def serve(descriptor: int) -> None:
    """Run tasks until the caller is gone: the main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller too, which ends its workers
    processes.end_with_writer(sys.stdin.fileno())
    # The default actions of the timer and of an inherited ``ulimit -t`` take effect at once. Python's handlers run
    # between bytecodes, and 9**9**9 is one bytecode.
    numbers = (signal.SIGPROF, signal.SIGXCPU)
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    connection = Connection(descriptor)
    seconds, memory_bytes, warm_up = connection.recv()
    processes.limit_resource("RLIMIT_CORE", 0)
    processes.limit_resource("RLIMIT_AS", memory_bytes)
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if soft == hard > 1:  # for SIGXCPU before SIGKILL
        resource.setrlimit(resource.RLIMIT_CPU, (hard - 1, hard))
    try:
        if warm_up is not None:
            warm_up()
        with suppress(EOFError, ConnectionError):  # the caller is gone
            connection.send(None)  # ready
            while True:
                function, item = connection.recv()
                connection.send(_run(function, item, seconds))
    except MemoryError:
        # The heap may stay full: replace the process.
        os._exit(_EXIT_OUT_OF_MEMORY)


def _run(function: Callable[[Any], Any], item: Any, seconds: float) -> TaskResult[Any]:
    # A timer of the kernel on processor time: it also works while the caller is stopped.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    started = time.perf_counter()
    try:
        return TaskResult(function(item), seconds=time.perf_counter() - started)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever the function raises is the task's outcome
        return TaskResult(None, Failure.RAISED, f"{type(error).__name__}: {error!s:.200}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


class _Worker:
    """A process and its connection; it does one task at a time.

    The interpreter does not import the caller's ``__main__``: a training script imports torch, seconds and hundreds of
    megabytes for each replaced worker.
    """

    def __init__(self, *settings: Any) -> None:
        self.connection, other = Pipe()
        with other:
            path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores other entries too
            serve_tasks = (
                f"import sys; sys.path[:] = {path!a}; "
                f"from coca_mindspeed.grading.workers import serve; serve({other.fileno()})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", serve_tasks], stdin=subprocess.PIPE, pass_fds=[other.fileno()]
            )
        assert self._process.stdin is not None
        self._alive = self._process.stdin  # the worker ends when this is closed, by end() or the end of this process
        processes.hold(self._alive)
        with suppress(OSError):  # it has died, and its connection is at its end
            self.connection.send(settings)
        self.ready, self.tasks_done = False, 0
        self.task: _Task | None = None
        self.deadline = 0.0

    def start(self, task: _Task, seconds: float) -> None:
        self.task, self.deadline = task, time.monotonic() + seconds
        with suppress(OSError):  # as above
            self.connection.send((task.function, task.item))

    def end(self, grace_seconds: float = 0.0) -> int:
        """Kill the process if it still runs after ``grace_seconds``, and return its exit code."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_seconds)
        self._process.kill()
        exit_code = self._process.wait()
        self._alive.close()
        self.connection.close()
        return exit_code


class Workers:
    """A pool of processes for functions of untrusted input. Not thread-safe; it runs one :meth:`map` at a time.

    Args:
        count: number of processes.
        seconds: processor time limit for each task. A task that does not end within ``WALL_FACTOR`` times that in wall
            time runs once more, then fails as starved.
        tasks_per_worker: a worker is replaced after so many tasks, to bound leaks.
        memory_bytes: address space of each worker; a task that needs more fails alone.
        warm_up: run once in every new worker, before its first task is timed.
    """

    def __init__(
        self,
        count: int,
        seconds: float,
        tasks_per_worker: int = 2_000,
        memory_bytes: int = 2 << 30,
        warm_up: Callable[[], object] | None = None,
    ) -> None:
        if count < 1:
            raise GradingError(f"a pool needs at least 1 worker, found {count}")
        if seconds <= 0:
            raise GradingError(f"the limit for one answer should be more than 0 seconds, found {seconds}")
        self._count, self._tasks_per_worker = count, tasks_per_worker
        self._seconds, self._wall_seconds = seconds, WALL_FACTOR * seconds
        self._settings = (seconds, memory_bytes, warm_up)
        self._workers: list[_Worker] = []
        self._queue: deque[_Task] = deque()  # to be run, for the first time or again
        self._failed_starts = 0
        self._closed = False
        self.timeouts = 0
        self.restarts = 0

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[TaskResult[Result]]:
        """Run ``function`` on every item; results come in order, and a limited number of items is taken ahead.

        Args:
            function: importable; its argument and result must be picklable.
            items: may be a stream; taken as tasks are finished.
        """
        if self._closed:
            raise GradingError("these workers were closed")
        new = (_Task(function, item) for item in items)
        unfinished: deque[_Task] = deque()  # in order; tasks after the first one may have a result
        try:
            while True:
                while len(self._busy()) < self._count:
                    if not self._queue and len(unfinished) < _IN_FLIGHT * self._count and (task := next(new, None)):
                        unfinished.append(task)
                        self._queue.append(task)
                    if not self._queue or not self._start(self._queue.popleft()):
                        break
                if not unfinished:
                    return
                while unfinished and (result := unfinished[0].result):
                    unfinished.popleft()
                    yield result
                if unfinished:
                    self._receive()
        finally:
            self._queue.clear()
            for worker in self._busy():  # interrupted
                self._remove(worker)

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.task]

    def _start(self, task: _Task) -> bool:
        """Give a task to an idle or a new worker; return False if it has to wait for a busy worker."""
        for idle in [worker for worker in self._workers if not worker.task]:
            if not idle.connection.poll():
                idle.start(task, self._wall_seconds)
                return True
            self._remove(idle)  # at its end: it was killed from outside
            self.restarts += 1
        try:
            worker = _Worker(*self._settings)
        except OSError as error:
            if self._busy():  # the system allows fewer workers
                self._queue.append(task)
                return False
            self._start_again(task, str(error))
            return True
        self._workers.append(worker)
        worker.start(task, _START_SECONDS)
        return True

    def _receive(self) -> None:
        """Wait for messages or the next deadline. All messages are read before a worker counts as late."""
        busy = self._busy()
        timeout = min(worker.deadline for worker in busy) - time.monotonic()
        readable = wait([worker.connection for worker in busy], max(0.0, timeout))
        for worker in busy:
            if worker.connection in readable:
                self._read(worker)
            elif time.monotonic() > worker.deadline:
                self._lose(worker, late=True)

    def _read(self, worker: _Worker) -> None:
        try:
            result: TaskResult[Any] | None = worker.connection.recv()
        except (EOFError, OSError):
            self._lose(worker)
            return
        if result is None:  # it is ready
            worker.ready, worker.deadline = True, time.monotonic() + self._wall_seconds
            self._failed_starts = 0
            return
        assert worker.task is not None
        worker.task.result, worker.task = result, None
        worker.tasks_done += 1
        if worker.tasks_done == self._tasks_per_worker:
            self._remove(worker)

    def _lose(self, worker: _Worker, late: bool = False) -> None:
        """Remove a worker that has died or is late, and give its task a result or another attempt."""
        # A process whose connection is at its end may still be exiting.
        exit_code, task = self._remove(worker, 0.0 if late else _EXIT_SECONDS), worker.task
        assert task is not None
        self.restarts += 1
        if not worker.ready:
            self._start_again(task, "too slow" if late else f"exit code {exit_code}")
            return
        failure, detail = self._reason(exit_code, late)
        task.starved += failure is Failure.STARVED
        if failure is Failure.STARVED and task.starved < _STARVED_ATTEMPTS:
            self._queue.append(task)
            return
        self.timeouts += failure is Failure.TIMEOUT
        task.result = TaskResult(None, failure, detail, self._seconds if failure is Failure.TIMEOUT else 0.0)

    def _start_again(self, task: _Task, problem: str) -> None:
        self._failed_starts += 1
        if self._failed_starts > _MAX_FAILED_STARTS:
            raise GradingError(
                f"the grading workers did not start {self._failed_starts} times in a row ({problem}); see the standard "
                "error output of the worker processes, and the kernel's log for out-of-memory kills"
            )
        time.sleep(PAUSE_SECONDS * 2**self._failed_starts)
        self._queue.append(task)

    def _reason(self, exit_code: int, late: bool) -> tuple[Failure, str]:
        if late:
            return Failure.STARVED, f"did not get {self._seconds:g} s in {self._wall_seconds:g} s"
        if exit_code == -signal.SIGPROF:
            return Failure.TIMEOUT, f"took longer than {self._seconds:g} s"
        if exit_code == -signal.SIGXCPU:  # earlier tasks have used most of it
            return Failure.STARVED, "its worker reached the limit on processor time that it inherited (ulimit -t)"
        return Failure.DIED, "ran out of memory" if exit_code == _EXIT_OUT_OF_MEMORY else "killed its worker process"

    def _remove(self, worker: _Worker, grace_seconds: float = 0.0) -> int:
        self._workers.remove(worker)
        return worker.end(grace_seconds)

    def close(self) -> None:
        self._closed = True
        for worker in list(self._workers):
            self._remove(worker)
