"""``coca-mindspeed config``: what can be configured, and what a run resolves to."""

import argparse
import sys

from coca_mindspeed.config.compose import compose_run, ready_made_runs
from coca_mindspeed.config.reference import reference_markdown


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The two arguments by which every command names a run."""
    parser.add_argument("run_name", metavar="RUN", help="a ready-made run (coca-mindspeed config list) or a YAML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="override a key (rollout.prompts=64) or choose from a group (method=joint)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print a run's resolved YAML", description="Print a run's resolved YAML.")
    add_run_arguments(show)
    actions.add_parser("list", help="list the ready-made runs")
    actions.add_parser("keys", help="list every key with its type, range, default and meaning")


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "show":
        sys.stdout.write(compose_run(arguments.run_name, arguments.overrides).to_yaml())
    elif arguments.action == "list":
        print("\n".join(ready_made_runs()))
    else:
        print(reference_markdown())
    return 0
