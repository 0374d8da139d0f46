"""Process pool with limits on processor time, wall time and memory.

Built on pebble, which judges timeouts and deaths by the worker messages that it has read. A busy caller reads late, so
that pebble blames a task whose unread result has long arrived. Here all messages are read before a worker is judged.
"""

import multiprocessing
import multiprocessing.context
import multiprocessing.popen_spawn_posix
import multiprocessing.spawn
import os
import resource
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from pebble import ProcessExpired, ProcessPool
from pebble.pool.process import PoolManager

from coca_mindspeed.errors import GradingError
from coca_mindspeed.grading.code.inside import process as processes
from coca_mindspeed.grading.code.inside.process import WALL_FACTOR

# Wait until no worker is sending; a worker that died while sending blocks the others.
_SILENCE_SECONDS = 1.0


class OrderlyPool(ProcessPool):
    """A pebble pool that reads all messages before it judges a worker."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._pool_manager = _ReadingFirst(self._context, options["context"])


class _ReadingFirst(PoolManager):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reading = threading.Lock()

    def process_next_message(self, timeout: float) -> None:
        try:
            arrived = self.worker_manager.pool_channel.poll(timeout)
        except OSError as error:
            raise BrokenProcessPool from error
        if arrived:
            with self._reading:
                super().process_next_message(0)

    def update_tasks(self) -> None:
        if not self.task_manager.timeout_tasks():
            super().update_tasks()
            return
        with self.worker_manager.workers_channel.lock(block=False) as silent:
            if silent:  # otherwise try again in a tenth of a second
                self._read_all()
                super().update_tasks()

    def handle_worker_expiration(self, expiration: tuple[int, int]) -> None:
        with self.worker_manager.workers_channel.lock(timeout=_SILENCE_SECONDS) as silent:
            if not silent:  # no other worker can send
                raise BrokenProcessPool("a worker died while it was sending")
            self._read_all()
        super().handle_worker_expiration(expiration)

    def _read_all(self) -> None:
        """Read all sent messages; workers do not send meanwhile."""
        with self._reading:
            while self.worker_manager.pool_channel.poll(0):
                super().process_next_message(0)


Item = TypeVar("Item")
Result = TypeVar("Result")

_MAX_REBUILDS = 3
# Tasks in flight per worker: enough for the others while one waits for its time limit.
_IN_FLIGHT = 256
_START_SECONDS = 60.0  # for a worker to start and warm up
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


class _Popen(multiprocessing.popen_spawn_posix.Popen):
    """Starts an interpreter that does not import the caller's ``__main__``.

    The standard one does, to unpickle functions defined there. A training script imports torch: seconds and hundreds of
    megabytes for each replaced worker.
    """

    def _launch(self, process_obj: Any) -> None:
        with _MAIN_LOCK:
            original = multiprocessing.spawn.get_preparation_data
            launching = threading.get_ident()

            def without_main(name: str) -> dict[str, Any]:
                data = original(name)
                if threading.get_ident() != launching:  # another thread's process
                    return data
                return {key: value for key, value in data.items() if not key.startswith("init_main")}

            multiprocessing.spawn.get_preparation_data = without_main
            try:
                super()._launch(process_obj)  # type: ignore[misc]  # not in typeshed
            finally:
                multiprocessing.spawn.get_preparation_data = original


_MAIN_LOCK = threading.Lock()


class _Process(multiprocessing.context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  # multiprocessing's own hook
        return _Popen(process_obj)


class _Context(multiprocessing.context.SpawnContext):
    """The spawn start method: unlike fork, safe while the caller's threads (torch, Ray) hold locks."""

    Process = _Process


def _start_worker(memory_bytes: int, warm_up: Callable[[], None] | None, caller: Connection) -> None:
    # Reopened: the kernel notifies one process per open file description, and all workers inherit the same one.
    processes.end_with_writer(os.open(f"/proc/self/fd/{caller.fileno()}", os.O_RDONLY | os.O_CLOEXEC))
    # The default actions of pebble's terminate(), of the timer and of an inherited ``ulimit -t`` take effect at once.
    # Python's handlers run between bytecodes, and 9**9**9 is one bytecode.
    numbers = (signal.SIGTERM, signal.SIGPROF, signal.SIGXCPU)
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    processes.limit_resource("RLIMIT_CORE", 0)
    processes.limit_resource("RLIMIT_AS", memory_bytes)
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if soft == hard > 1:  # for SIGXCPU before SIGKILL
        resource.setrlimit(resource.RLIMIT_CPU, (hard - 1, hard))
    if warm_up is not None:
        warm_up()


def _run(function: Callable[[Item], Result], item: Item, seconds: float) -> tuple[Result, float]:
    # A timer of the kernel on processor time: it also works while the caller is stopped.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    started = time.perf_counter()
    try:
        return function(item), time.perf_counter() - started
    except MemoryError:
        # The heap may stay full: replace the process.
        os._exit(_EXIT_OUT_OF_MEMORY)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


@dataclass(frozen=True, slots=True)
class _Task:
    function: Callable[[Any], Any]
    item: Any
    future: Any
    pool: Any
    starved: int


def _has_result(future: Any) -> bool:
    return future.done() and not isinstance(future.exception(), BrokenProcessPool)


class Workers:
    """A pool of processes for functions of untrusted input. Not thread-safe.

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
        warm_up: Callable[[], None] | None = None,
    ) -> None:
        if count < 1:
            raise GradingError(f"a pool needs at least 1 worker, found {count}")
        if seconds <= 0:
            raise GradingError(f"the limit for one answer should be more than 0 seconds, found {seconds}")
        self._count = count
        self._seconds, self._wall_seconds = seconds, WALL_FACTOR * seconds
        # Workers inherit the reading end; close() or the end of this process closes the writing end.
        self._caller, self._alive = multiprocessing.Pipe(duplex=False)
        processes.hold(self._alive.fileno())
        self._pool_options = {
            "max_workers": count,
            "max_tasks": tasks_per_worker,
            "initializer": _start_worker,
            "initargs": (memory_bytes, warm_up, self._caller),
            "context": _Context(),
        }
        self._pool: Any = None  # an OrderlyPool, from the first task on
        self._closed = False
        self.timeouts = 0
        self.restarts = 0

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[TaskResult[Result]]:
        """Run ``function`` on every item; results come in order, and a limited number of tasks is in flight.

        Args:
            function: importable; its argument and result must be picklable.
            items: may be a stream; taken as tasks are finished.
        """
        waiting: deque[_Task] = deque()
        try:
            for item in items:
                waiting.append(self._submit(function, item))
                if len(waiting) >= _IN_FLIGHT * self._count:
                    yield self._finish(waiting)
            while waiting:
                yield self._finish(waiting)
        finally:
            if waiting:  # interrupted
                self._discard_pool()

    def _finish(self, waiting: "deque[_Task]") -> TaskResult[Any]:
        rebuilds = 0
        while True:
            task = waiting[0]
            result = self._result(task)
            if result is not None:
                if result.failure is not Failure.STARVED or task.starved + 1 == _STARVED_ATTEMPTS:
                    waiting.popleft()
                    return result
                waiting[0] = self._submit(task.function, task.item, task.starved + 1)
                continue
            # The pool broke (a worker was killed between tasks) under all tasks that have no result yet.
            rebuilds += 1
            if rebuilds > _MAX_REBUILDS:
                raise GradingError(
                    f"the grading workers broke {rebuilds} times in a row; see the standard error output of the "
                    "worker processes, and the kernel's log for out-of-memory kills"
                )
            for place, task in enumerate(waiting):
                if task.pool is not self._pool and not _has_result(task.future):
                    waiting[place] = self._submit(task.function, task.item, task.starved)

    def _submit(self, function: Callable[[Any], Any], item: Any, starved: int = 0) -> _Task:
        if self._closed:
            raise GradingError("these workers were closed")
        for _ in range(_MAX_REBUILDS):
            if self._pool is None or not self._pool.active:
                self._discard_pool()
                self._pool = OrderlyPool(**self._pool_options)
            try:
                future = self._pool.schedule(_run, args=(function, item, self._seconds), timeout=self._wall_seconds)
                return _Task(function, item, future, self._pool, starved)
            except RuntimeError:  # it broke since the check
                self.restarts += 1
        raise GradingError("the grading workers do not start; see the standard error output of the worker processes")

    def _result(self, pending: _Task) -> TaskResult[Any] | None:
        """The task's result, or None if the pool broke."""
        # pebble never answers tasks that were queued when a pool broke, so the pool is watched too. All earlier tasks
        # are done: this one is running or next.
        timeout = time.perf_counter() + 2 * self._wall_seconds + _START_SECONDS
        while not wait([pending.future], timeout=0.5).done:
            if pending.pool is not self._pool or not pending.pool.active or time.perf_counter() > timeout:
                self._broken(pending.pool)
                return None
        failure: Failure
        try:
            value, seconds = pending.future.result()
            return TaskResult(value, seconds=seconds)
        except BrokenProcessPool:
            self._broken(pending.pool)
            return None
        except FutureTimeoutError:
            self.restarts += 1
            failure, detail = Failure.STARVED, f"did not get {self._seconds:g} s in {self._wall_seconds:g} s"
        except ProcessExpired as error:
            self.restarts += 1
            failure, detail = self._death(error.exitcode)
            self.timeouts += failure is Failure.TIMEOUT
        except Exception as error:  # noqa: BLE001  # whatever the function raised is the task's outcome
            failure, detail = Failure.RAISED, f"{type(error).__name__}: {error!s:.200}"
        return TaskResult(None, failure, detail, self._seconds if failure is Failure.TIMEOUT else 0.0)

    def _death(self, exit_code: int) -> tuple[Failure, str]:
        if exit_code == -signal.SIGPROF:
            return Failure.TIMEOUT, f"took longer than {self._seconds:g} s"
        if exit_code == -signal.SIGXCPU:  # earlier tasks have used most of it
            return Failure.STARVED, "its worker reached the limit on processor time that it inherited (ulimit -t)"
        return Failure.DIED, "ran out of memory" if exit_code == _EXIT_OUT_OF_MEMORY else "killed its worker process"

    def _broken(self, pool: Any) -> None:
        if pool is self._pool:
            self._discard_pool()
            self.restarts += 1

    def _discard_pool(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._discard_pool()
        processes.release(self._alive.fileno())
        self._alive.close()
        self._caller.close()
