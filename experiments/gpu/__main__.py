"""``python -m experiments.gpu``: train what needs a GPU, a few minutes at a time; the same command continues."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from coca_mindspeed.cli.options import at_least, place
from coca_mindspeed.errors import UsageError
from coca_mindspeed.utils.console import PlainConsole
from experiments.reproduce.plan import Plan, jobs_of, plan_path, read_plan, run_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    output = Path("runs/gpu")
    parser.add_argument("--plan", default="smollm2_forms", metavar="NAME|YAML", help="default: smollm2_forms")
    parser.add_argument("--output", type=place, default=output, metavar="DIR", help=f"default: {output}")
    parser.add_argument("--minutes", type=at_least(1), default=9, metavar="N", help="length of a slice (default: 9)")
    parser.add_argument("--prepare", action="store_true", help="write questions and check the model; trains nothing")


def run(arguments: argparse.Namespace) -> int:
    output: Path = arguments.output.resolve()
    plan = read_plan(plan_path(arguments.plan))
    seeds = plan.seeds_to_run(2)
    _check_models(plan)
    jobs = jobs_of(plan, seeds)
    # torch is imported after the checks above.
    from coca_mindspeed.utils.process import InterruptedRunError, interruptible
    from experiments.gpu.profile import write_profile
    from experiments.reproduce.__main__ import claim_and_run
    from experiments.reproduce.report import write_report
    from experiments.reproduce.results import collect

    console = PlainConsole()
    if arguments.prepare:
        claim_and_run(plan, [], output, 1, console)
        console.print(f"{output}: questions are written; {len(jobs)} jobs wait for python -m experiments.gpu")
        return 0
    with _slice(arguments.minutes) as ended:
        try:
            with interruptible("stopped between two jobs"):
                claim_and_run(plan, jobs, output, 1, console)
                profiled = next(job for job in jobs if job.kind == "trained")
                write_profile(profiled.directory(output) / "run", output / "profile.json")
        except InterruptedRunError as error:
            if not ended:
                raise
            console.print(f"{error.saved}\nend of the slice of {arguments.minutes} minutes; run the same command again")
            return 0
    write_report(collect(output, jobs), plan, output / "report", "python -m experiments.gpu")
    console.print(f"complete: {output / 'report' / 'README.md'}, {output / 'profile.json'}")
    return 0


def _check_models(plan: Plan) -> None:
    for name, setting in plan.settings.items():
        path = run_config(setting, [], 0).model.path
        if path is not None and not (Path(path) / "config.json").is_file():
            raise UsageError(f"setting {name!r}: model.path={path} is no Hugging Face directory; run `make real`")


@contextmanager
def _slice(minutes: int) -> Iterator[list[str]]:
    """Stop as SIGTERM does, between two steps, after these minutes; the list says whether that happened."""
    ended: list[str] = []

    def end(number: int, frame: FrameType | None) -> None:
        ended.append("time")
        signal.raise_signal(signal.SIGTERM)

    previous = signal.signal(signal.SIGALRM, end)
    signal.alarm(60 * minutes)
    try:
        yield ended
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


if __name__ == "__main__":
    from experiments.__main__ import main

    sys.exit(main(["gpu", *sys.argv[1:]]))
