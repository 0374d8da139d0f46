"""``python -m experiments.reproduce``: run every method of the paper over several seeds and make its tables."""

import argparse
import sys
import time
from pathlib import Path

from coca_mindspeed.cli.options import at_least, place
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.utils.console import PlainConsole, markdown_table, print_text
from coca_mindspeed.utils.directories import check_directory, claim_directory, lock_of_process
from coca_mindspeed.utils.process import usable_cpus
from experiments.reproduce.plan import Job, Plan, jobs_of, plan_path, read_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    output = Path("runs/reproduce")
    parser.add_argument("--plan", default="miniature", metavar="NAME|YAML", help="which runs (default: miniature)")
    parser.add_argument(
        "--seeds", type=at_least(1), default=3, metavar="N", help="seeds, from the plan's first (default: 3)"
    )
    parser.add_argument("--output", type=place, default=output, metavar="DIR", help=f"default: {output}")
    parser.add_argument("--report", type=Path, metavar="DIR", help="for the tables (default: OUTPUT/report)")
    parser.add_argument("--jobs", type=at_least(1), default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument("--report-only", action="store_true", help="run nothing; make tables of the finished jobs")


def run(arguments: argparse.Namespace) -> int:
    # Absolute, because it is saved in the jobs' configurations.
    output: Path = arguments.output.resolve()
    plan = read_plan(plan_path(arguments.plan))
    jobs = jobs_of(plan, plan.seeds_to_run(arguments.seeds))
    # torch is imported after the checks above.
    from experiments.reproduce.report import write_report
    from experiments.reproduce.results import collect

    console = PlainConsole()
    if arguments.report_only:
        claim_directory(output, _settings(plan))
    else:
        claim_and_run(plan, jobs, output, arguments.jobs, console)
    directory = arguments.report or output / "report"
    command = f"python -m experiments.reproduce --plan {arguments.plan} --seeds {arguments.seeds}"
    tables = write_report(collect(output, jobs), plan, directory, command)
    if tables:
        print_text(markdown_table(tables[0].header, tables[0].rows))
    console.print(f"{len(tables)} tables: {directory / 'README.md'}")
    return 0


def _settings(plan: Plan) -> dict[str, object]:
    return {"plan": plan.model_dump(mode="json", exclude={"seeds"})}  # more seeds can be added


def claim_and_run(plan: Plan, jobs: list[Job], output: Path, processes: int, console: PlainConsole) -> None:
    """Claim the directory, write the plan's questions and run the unfinished jobs.

    Raises:
        ConfigError: the directory is another plan's or in use, or a job's setting is wrong.
        InterruptedRunError: SIGINT or SIGTERM; finished jobs and the checkpoint of the unfinished one are kept.
    """
    from coca_mindspeed.utils.process import InterruptedRunError, interruptible
    from experiments.reproduce.job import Workplace
    from experiments.reproduce.provenance import check_made_from
    from experiments.reproduce.questions import check_questions, missing_sets, write_sets
    from experiments.reproduce.scheduler import run_jobs

    settings = _settings(plan)
    check_directory(output, settings)
    missing = missing_sets(plan, output)
    check_questions(plan, jobs, output, missing)  # before the directory is claimed for this plan
    claim_directory(output, settings)
    lock = lock_of_process(output / ".lock")  # held until this function returns
    if lock is None:
        raise ConfigError(f"--output {output}: another process uses this directory")
    write_sets(missing, output)
    check_made_from(plan, jobs, output)
    waiting = sum(not job.done(output) for job in jobs)
    console.print(f"{len(jobs)} jobs, {waiting} to run; the same command continues a stopped reproduction")
    started, done = time.perf_counter(), 0

    def report(job: Job, seconds: float) -> None:
        nonlocal done
        done += 1
        minutes = (time.perf_counter() - started) / 60
        console.print(f"[{done}/{waiting}] {job}: {seconds:.0f} s ({minutes:.1f} min in all)")

    workplace = Workplace(plan, output, max(1, usable_cpus() // processes), show_progress=processes == 1)
    message = f"finished jobs are kept in {output}, and the same command continues"
    with interruptible("stopped", message):
        try:
            run_jobs(workplace, jobs, processes, report)
        except InterruptedRunError as error:  # of a job in this process; its message names the option --resume
            raise InterruptedRunError(error.saved, message) from error


if __name__ == "__main__":
    from experiments.__main__ import main

    sys.exit(main(["reproduce", *sys.argv[1:]]))
