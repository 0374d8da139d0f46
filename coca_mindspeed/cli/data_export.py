"""``coca-mindspeed data export``: records for verl."""

import argparse
from pathlib import Path

from coca_mindspeed.cli.data_prepare import SYSTEM_PROMPTS
from coca_mindspeed.cli.options import place
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.verl.records import export_for_verl


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write prepared records in the form of another program."
    targets = parser.add_subparsers(dest="target", metavar="TARGET", required=True)
    verl = targets.add_parser("verl", help="for verl's data.train_files and data.val_files")
    verl.description = "Write the records as verl's JSON Lines, each with its chat and its whole record."
    option = verl.add_argument
    option("--input", type=Path, required=True, metavar="FILE", help="prepared records (train.jsonl)")
    option("--output", type=place, required=True, metavar="FILE", help="to write")
    option("--overwrite", action="store_true", help="replace an earlier export")
    option(
        "--prompt",
        choices=sorted(SYSTEM_PROMPTS),
        default="confidence-first",
        help="the method's system prompt; answer-first is for rlcr (default: %(default)s)",
    )
    verl.set_defaults(run_action=run_verl_export)


def run_verl_export(arguments: argparse.Namespace) -> int:
    rows = export_for_verl(arguments.input, arguments.output, SYSTEM_PROMPTS[arguments.prompt], arguments.overwrite)
    print_text(f"{rows} records written to {arguments.output}")
    return 0
