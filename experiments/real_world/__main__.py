"""``python -m experiments.real_world``: write questions about places, languages and sums."""

import argparse
import sys

from coca_mindspeed.cli.options import at_least, place, within
from coca_mindspeed.utils.console import print_text
from experiments.real_world.families import Sizes, write_real_world


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write records for the SFT warm-up, for training and for evaluation. Evaluation also has families that are "
        "never trained on, and no entity that it asks about is in the other files (experiments/README.md)."
    )
    sizes = Sizes()
    parser.add_argument("--output", type=place, required=True, metavar="DIR", help="the directory to make")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier output")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of the questions (default: 0)")
    for part in ("train", "evaluate", "warm_up"):
        option, default = f"--{part.replace('_', '-')}", getattr(sizes, part)
        text = f"the most questions of a family; for sums half, for families not trained on 40%% (default: {default})"
        parser.add_argument(option, type=at_least(1), default=default, metavar="N", help=text)
    parser.add_argument(
        "--hardest",
        type=within(0.1, 1.0),
        default=sizes.hardest,
        metavar="D",
        help="the greatest difficulty of trained capitals, language codes and sums, from 0.1 to 1 (default: 1): groups "
        "without a right answer teach little",
    )


def run(arguments: argparse.Namespace) -> int:
    sizes = Sizes(arguments.train, arguments.evaluate, arguments.warm_up, arguments.hardest)
    for name, records in write_real_world(
        arguments.output, sizes, arguments.seed, overwrite=arguments.overwrite
    ).items():
        print_text(f"{arguments.output / name}: {records} records")
    return 0


if __name__ == "__main__":
    from experiments.__main__ import main

    sys.exit(main(["real_world", *sys.argv[1:]]))
