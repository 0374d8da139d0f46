import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import GradingError
from coca_mindspeed.grading.code.extraction import MAX_ANSWER_CHARACTERS, Job, build_job, check_asserts, time_limit
from coca_mindspeed.grading.code.inside.process import Report
from coca_mindspeed.grading.code.sandbox import Limits, Sandbox
from coca_mindspeed.grading.verdict import Outcome, TalliedGrader, Verdict
from coca_mindspeed.utils.process import usable_cpus

_MAX_WORKERS = 64
_MOST_WORKERS_BY_DEFAULT = 32
_MAX_PROGRAM_CHARACTERS = 200_000


class CodeGrader(TalliedGrader):
    """Right if and only if the program passes all of its tests. Raises ``GradingError`` without a sandbox.

    Args:
        seconds: limit for one run of a program (one case, or one set of asserts) if the record sets none: wall time
            without waiting for a processor, and never less than processor time.
        total_seconds: limit for all cases of one program together.
        workers: number of sandboxes at one time; None for one per core, at most 32.
        memory_mib: for each process, and for all processes of a program together.
        processes: processes and threads of a program at one time.
        allow_unsandboxed: see :class:`~coca_mindspeed.grading.code.sandbox.Sandbox`.
    """

    def __init__(
        self,
        seconds: float = 10.0,
        total_seconds: float = 60.0,
        workers: int | None = None,
        memory_mib: int = 1024,
        processes: int = 32,
        allow_unsandboxed: bool = False,
    ) -> None:
        count = min(_MOST_WORKERS_BY_DEFAULT, usable_cpus()) if workers is None else workers
        if not 1 <= count <= _MAX_WORKERS:
            raise GradingError(f"the number of sandboxes should be between 1 and {_MAX_WORKERS}, found {count}")
        if seconds <= 0 or total_seconds < seconds:
            raise GradingError(f"expected 0 < seconds <= total_seconds, found {seconds:g} and {total_seconds:g}")
        super().__init__()
        self._seconds, self._total_seconds = seconds, total_seconds
        self._sandbox = Sandbox(Limits(memory_bytes=memory_mib << 20, processes=processes), allow_unsandboxed)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="sandbox")

    @staticmethod
    def check(records: Sequence[Record]) -> None:
        for record in records:
            build_job(record, "")
            check_asserts(record)
            time_limit(record, default=1.0)

    def _grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        """Run no program if a record's tests are malformed (``RecordError``)."""
        jobs = [self._job(record, answer) for record, answer in zip(records, answers, strict=True)]
        reports = list(self._reports(jobs))
        self._counts["timeouts"] += sum(report.timed_out for report, _ in reports)
        return [Verdict(Outcome(report.outcome), report.reason, seconds) for report, seconds in reports]

    def outputs(self, jobs: Sequence[Job]) -> list[tuple[str | None, ...]]:
        """Digests of each program's result on each input; ``GradingError`` if a program could not be run."""
        found = []
        for report, _ in self._reports([{**job, "seconds": self._seconds} for job in jobs]):
            if report.outcome == Outcome.UNGRADABLE.value:
                raise GradingError(f"a program could not be run on the inputs of its tests: {report.reason}")
            found.append(report.outputs or (None,))
        return found

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _job(self, record: Record, answer: str) -> Job:
        too_long = ""
        if len(answer) > MAX_ANSWER_CHARACTERS:
            answer, too_long = "", f"the answer is over {MAX_ANSWER_CHARACTERS} characters"
        job = build_job(record, answer)
        if len(job["source"]) > _MAX_PROGRAM_CHARACTERS:
            too_long = f"the program is over {_MAX_PROGRAM_CHARACTERS} characters"
        return {**job, "seconds": time_limit(record, self._seconds), "too_long": too_long}

    def _reports(self, jobs: Sequence[Job]) -> Iterator[tuple[Report, float]]:
        """The report and seconds of each job, in order; ending the iteration early ends all jobs."""
        stop = threading.Event()
        try:
            yield from self._threads.map(lambda job: self._run(job, stop), jobs)
        finally:
            stop.set()

    def _run(self, job: Job, stop: threading.Event) -> tuple[Report, float]:
        started = time.perf_counter()
        if job.get("too_long"):
            return Report(Outcome.WRONG.value, job["too_long"]), 0.0
        total = job["seconds"] if job["kind"] == "asserts" else max(self._total_seconds, job["seconds"])
        report = self._sandbox.run(job, total, stop)
        return report, time.perf_counter() - started
