"""Run jobs in processes, each as soon as the jobs that it needs are done."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from coca_mindspeed.errors import TrainingError
from coca_sandbox.inside import process as watchdog
from experiments.reproduce.job import Workplace, run_job
from experiments.reproduce.plan import Job
from experiments.reproduce.worker_process import end_with_parent


def run_jobs(
    place: Workplace,
    jobs: Sequence[Job],
    processes: int,
    report: Callable[[Job, float], None],
    run: Callable[[Workplace, Job], float] = run_job,
) -> None:
    """Run every unfinished job.

    Args:
        place: output and plan.
        jobs: in a valid order.
        processes: at a time; 1 runs all jobs in this process.
        report: called with each finished job and its seconds.
        run: runs one job; must be picklable.

    Raises:
        CocaError: a job failed; the jobs that run beside it are finished first, and no other is started.
    """
    pending = [job for job in jobs if not job.done(place.output)]
    if processes == 1:
        for job in pending:
            report(job, run(place, job))
        return
    with _processes(processes) as pool:
        running: dict[Future[float], Job] = {}
        failure: BaseException | None = None
        while running or (pending and failure is None):
            if failure is None:
                ready = [job for job in pending if all(job.other(name).done(place.output) for name in job.needs)]
                for job in ready[: processes - len(running)]:
                    pending.remove(job)
                    running[pool.submit(run, place, job)] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                error = future.exception()
                if error is None:
                    report(job, future.result())
                elif isinstance(error, BrokenProcessPool):
                    failure = failure or TrainingError(
                        f"{job}: a process died (out of memory, or killed); finished jobs are kept, run the same "
                        "command again"
                    )
                else:
                    failure = failure or error
        if failure is not None:
            raise failure


@contextmanager
def _processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes that end with this process, also if it is killed, and at an interrupt."""
    # Spawned, because a process that has used PyTorch's threads must not be forked.
    context = multiprocessing.get_context("spawn")
    parent, alive = context.Pipe(duplex=False)
    watchdog.hold(alive)

    def end_them() -> None:
        if not alive.closed:
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
