"""``coca-router``: one module of :mod:`coca_router` for each command."""

import argparse
import sys
from collections.abc import Sequence

from coca_mindspeed import cli

PROGRAM = "coca-router"
COMMANDS = {
    "serve": "answer by tiers of models behind the OpenAI API, or serve one model",
    "route": "replay tiers from their predictions: cost against quality, compared with other routers",
    "calibrate": "recalibrate confidences from labels, and certify an error bound",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, with the exit codes of ``coca-mindspeed``."""
    return cli.main(sys.argv[1:] if argv is None else argv, parser, PROGRAM)


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    description = "Answer, refuse or escalate by the confidence that a model states before its answer."
    return cli.command_parser(arguments, PROGRAM, description, COMMANDS, "coca_router.{}")
