"""``python -m experiments``: the commands of this directory, each also ``python -m experiments.NAME``."""

import sys
from collections.abc import Sequence
from functools import partial

from coca_mindspeed import cli

COMMANDS = {
    "reproduce": "run every method of the paper over several seeds and make its tables",
    "paper": "compare runs with the paper's figures",
    "real_world": "write questions about places, languages and sums, without a download",
    "expected_confidence": "compare a stated confidence, the mean of several, and the expectation",
    "gpu": "train SmolLM2's missing runs on one GPU, a few minutes at a time",
    "smollm2": "make a Hugging Face directory of SmolLM2-135M-Instruct",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; exit codes as of :func:`coca_mindspeed.cli.main`."""
    description = "Experiments with coca_mindspeed, run from the root of a source tree."
    parser = partial(
        cli.command_parser,
        prog="python -m experiments",
        description=description,
        commands=COMMANDS,
        module="experiments.{}.__main__",
    )
    return cli.main(argv, parser)


if __name__ == "__main__":
    sys.exit(main())
