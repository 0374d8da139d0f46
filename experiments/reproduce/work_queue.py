"""Running cells in processes, each as soon as those that it needs are done."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.grading.code.inside import process as watchdog
from experiments.reproduce.cells import ReproductionCell
from experiments.reproduce.work import Workplace, run_cell
from experiments.reproduce.worker_process import end_with_parent


def run_cells(
    place: Workplace,
    cells: Sequence[ReproductionCell],
    jobs: int,
    report: Callable[[ReproductionCell, float], None],
    work: Callable[[Workplace, ReproductionCell], float] = run_cell,
) -> None:
    """Run every cell that is not done yet.

    Args:
        place: where and by which plan.
        cells: each after those that it needs.
        jobs: processes; 1 runs all cells in this one.
        report: called with each cell that was run and its seconds.
        work: runs one cell; can be pickled.

    Raises:
        CocaError: a cell failed; those that ran beside it are finished first, and nothing new is begun.
    """
    pending = [cell for cell in cells if not cell.done(place.output)]
    if jobs == 1:
        for cell in pending:
            report(cell, work(place, cell))
        return
    with _processes(jobs) as pool:
        running: dict[Future[float], ReproductionCell] = {}
        failure: BaseException | None = None
        while running or (pending and failure is None):
            if failure is None:
                for cell in [c for c in pending if all(c.of(n).done(place.output) for n in c.needs)]:
                    if len(running) == jobs:
                        break
                    pending.remove(cell)
                    running[pool.submit(work, place, cell)] = cell
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(future)
                error = future.exception()
                if error is None:
                    report(cell, future.result())
                elif failure is None:
                    failure = _named(cell, error)
        if failure is not None:
            raise failure


@contextmanager
def _processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end at once with this one, however it ends, and where it is interrupted."""
    # Spawned, not forked: a process that has used PyTorch's threads must not be forked.
    context = multiprocessing.get_context("spawn")
    parent, alive = context.Pipe(duplex=False)
    watchdog.hold(alive.fileno())

    def end_them() -> None:
        if not alive.closed:
            watchdog.release(alive.fileno())
            alive.close()

    try:
        with ProcessPoolExecutor(count, context, initializer=end_with_parent, initargs=(parent,)) as pool:
            try:
                yield pool
            except KeyboardInterrupt:
                end_them()
                raise
    finally:
        end_them()
        parent.close()


def _named(cell: ReproductionCell, error: BaseException) -> BaseException:
    if isinstance(error, BrokenProcessPool):
        return TrainingError(
            f"{cell}: a process died (out of memory, or killed); finished cells are kept, run the same command again"
        )
    return error
