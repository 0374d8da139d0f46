"""pebble's pool of processes, in which a failure is put down to the task that it is of.

pebble judges timeouts and deaths by what it has read of the workers' messages, and a busy caller reads them late.  So a
task whose result lay unread was said to have killed its worker, or to have passed its limit, in the place of one that
its worker had begun since.  Here all that workers have sent is read before one of them is judged.
"""

import threading
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pebble import ProcessPool
from pebble.pool.process import PoolManager

# How long to wait until no worker is sending; one that died while it was keeps all others from it.
_SILENCE_SECONDS = 1.0


class OrderlyPool(ProcessPool):
    """A pebble pool with a manager that reads first and judges then; arguments are pebble's."""

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
            if silent:  # otherwise a worker is sending: a tenth of a second later, then
                self._read_all()
                super().update_tasks()

    def handle_worker_expiration(self, expiration: tuple[int, int]) -> None:
        with self.worker_manager.workers_channel.lock(timeout=_SILENCE_SECONDS) as silent:
            if not silent:  # and nobody else can send any more: pebble would blame them a minute later
                raise BrokenProcessPool("a worker died while it was sending")
            self._read_all()
        super().handle_worker_expiration(expiration)

    def _read_all(self) -> None:
        """Read what workers have sent; they are silent meanwhile, so that it comes to an end."""
        with self._reading:
            while self.worker_manager.pool_channel.poll(0):
                super().process_next_message(0)
