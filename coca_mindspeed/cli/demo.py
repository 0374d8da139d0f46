"""``coca-mindspeed demo``."""

import argparse
import re
from pathlib import Path

from coca_mindspeed.cli.options import at_least, place
from coca_mindspeed.errors import UsageError
from coca_mindspeed.local.demo import run_demo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="draws everything (default: 0)")
    parser.add_argument("--output", type=place, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="continue the stopped demo in DIR")
    start.add_argument("--overwrite", action="store_true", help="replace an earlier demo in DIR")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="change the run: method=joint, trainer.steps=100"
    )


def run(arguments: argparse.Namespace) -> int:
    if any(re.match(r"\+{0,2}seed=", override) for override in arguments.overrides):
        raise UsageError("demo: set the seed by --seed N, not by seed=")
    run_demo(
        arguments.seed,
        arguments.output,
        arguments.overrides,
        resume=arguments.resume,
        overwrite=arguments.overwrite,
        show_progress=not arguments.quiet,
    )
    return 0
