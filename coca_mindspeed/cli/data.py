"""``coca-mindspeed data``: prepare data sets, look into them, export them for verl."""

import argparse

from coca_mindspeed.cli.data_export import add_export_arguments
from coca_mindspeed.cli.data_inspect import add_inspect_arguments
from coca_mindspeed.cli.data_prepare import add_prepare_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``prepare``, ``inspect`` and ``export``; each sets the function that runs it."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add_prepare_arguments(
        actions.add_parser(
            "prepare",
            help="turn a publisher's files into records: filtered, checked, deduplicated, split",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    add_inspect_arguments(
        actions.add_parser("inspect", help="show what a file holds: counts, lengths, examples as the model sees them")
    )
    add_export_arguments(actions.add_parser("export", help="write prepared records in the form of another program"))


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen action."""
    return int(arguments.run_action(arguments))
