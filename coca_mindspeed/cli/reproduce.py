"""``coca-mindspeed reproduce``: every method of the paper, over seeds, and its tables with our numbers in them."""

import argparse
import time
from pathlib import Path

from coca_mindspeed.baselines.resumable import check_directory, claim_directory
from coca_mindspeed.cli.options import at_least, place
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.reproduce.cells import ReproductionCell, cells_of
from coca_mindspeed.reproduce.plan import plan_path, read_plan
from coca_mindspeed.utils.console import PlainConsole, print_text
from coca_mindspeed.utils.cpus import usable_cpus
from coca_mindspeed.utils.files import lock_of_process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", default="miniature", metavar="NAME|YAML", help="which runs (default: miniature)")
    parser.add_argument("--seeds", type=at_least(1), default=3, metavar="N", help="seeds 0 to N-1 (default: 3)")
    parser.add_argument(
        "--output", type=place, default=Path("runs/reproduce"), metavar="DIR", help="default: runs/reproduce"
    )
    parser.add_argument("--report", type=Path, metavar="DIR", help="where the tables go (default: OUTPUT/report)")
    parser.add_argument(
        "--jobs", type=at_least(1), default=2, metavar="N", help="cells at a time, a process each (default: 2)"
    )
    parser.add_argument("--report-only", action="store_true", help="run nothing; tables of what is finished")


def run(arguments: argparse.Namespace) -> int:
    # Saved in the cells' configurations, which must mean the same from another directory.
    output: Path = arguments.output.resolve()
    plan = read_plan(plan_path(arguments.plan))
    cells = cells_of(plan, range(arguments.seeds))
    # torch and all that trains: seconds, which --help and a mistake in the plan do not have to wait for.
    from coca_mindspeed.local.interrupt import InterruptedRunError, saying_what_is_saved
    from coca_mindspeed.reproduce.provenance import check_made_from
    from coca_mindspeed.reproduce.questions import check_questions, missing_sets, write_sets
    from coca_mindspeed.reproduce.report import write_report
    from coca_mindspeed.reproduce.results import collect
    from coca_mindspeed.reproduce.work import Workplace
    from coca_mindspeed.reproduce.work_queue import run_cells

    console = PlainConsole()
    # More seeds may be asked for later; another plan would not be the same reproduction.
    settings = {"plan": plan.model_dump(mode="json")}
    check_directory(output, settings)
    if arguments.report_only:
        claim_directory(output, settings)
    else:
        missing = missing_sets(plan, output)
        # Before the directory is claimed: a plan that is refused here has to be changed.
        check_questions(plan, cells, output, missing)
        claim_directory(output, settings)
        lock = lock_of_process(output / ".lock")  # held while this function runs
        if lock is None:
            raise ConfigError(f"--output {output}: another process is at work on this reproduction")
        write_sets(missing, output)
        check_made_from(plan, cells, output)
        waiting = sum(not cell.done(output) for cell in cells)
        console.print(f"{len(cells)} cells, {waiting} to run; run the same command again to go on after a stop")
        started, done = time.perf_counter(), 0

        def report(cell: ReproductionCell, seconds: float) -> None:
            nonlocal done
            done += 1
            elapsed = time.perf_counter() - started
            console.print(f"[{done}/{waiting}] {cell}: {seconds:.0f} s ({elapsed / 60:.1f} min in all)")

        threads = max(1, usable_cpus() // arguments.jobs)
        place = Workplace(plan, output, threads, show_progress=arguments.jobs == 1)
        go_on = f"finished cells are kept in {output}, and the same command goes on with the others"
        with saying_what_is_saved("stopped", go_on):
            try:
                run_cells(place, cells, arguments.jobs, report)
            except InterruptedRunError as error:  # a cell in this process, which has an option --resume in mind
                raise InterruptedRunError(error.saved, go_on) from error
    directory = arguments.report or output / "report"
    shown = f"coca-mindspeed reproduce --plan {arguments.plan} --seeds {arguments.seeds} --jobs {arguments.jobs}"
    tables = write_report(collect(output, cells), plan, directory, shown)
    if tables:
        print_text(tables[0].markdown())
    console.print(f"{len(tables)} tables: {directory / 'README.md'}")
    return 0
