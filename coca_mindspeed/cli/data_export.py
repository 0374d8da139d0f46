"""``coca-mindspeed data export``: records for MindSpeed-RL's own preprocessing, and for verl."""

import argparse
from collections.abc import Callable
from pathlib import Path

from coca_mindspeed.cli.data_prepare import SYSTEM_PROMPTS
from coca_mindspeed.cli.options import at_least, place
from coca_mindspeed.mindspeed.export import LAYOUTS, MindSpeedExport, export
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.verl.records import export_for_verl


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write prepared records in the form of another program."
    targets = parser.add_subparsers(dest="target", metavar="TARGET", required=True)
    mindspeed = targets.add_parser("mindspeed-rl", help="for MindSpeed-RL's cli/preprocess_data.py")
    mindspeed.description = (
        "Write the questions, the prompt template and the data set configuration from which MindSpeed-RL's own "
        "cli/preprocess_data.py makes packed data. If the tokenizer directory exists, every prompt is compared with "
        "its chat template, token by token."
    )
    _add_common(mindspeed, "DIRECTORY", run_export)
    option = mindspeed.add_argument
    option("--template", choices=sorted(LAYOUTS), required=True, help="the model family's chat layout")
    option("--tokenizer", type=Path, required=True, metavar="DIRECTORY", help="tokenizer, also written to the YAML")
    option("--workers", type=at_least(1), default=8, metavar="N", help="of preprocess_data.py (default: %(default)s)")
    verl = targets.add_parser("verl", help="for verl's data.train_files and data.val_files")
    verl.description = "Write the records as verl's JSON Lines, each with its chat and its whole record."
    _add_common(verl, "FILE", run_verl_export)


def _add_common(parser: argparse.ArgumentParser, output: str, run: Callable[[argparse.Namespace], int]) -> None:
    option = parser.add_argument
    option("--input", type=Path, required=True, metavar="FILE", help="prepared records (train.jsonl)")
    option("--output", type=place, required=True, metavar=output, help="to write")
    option("--overwrite", action="store_true", help="replace an earlier export")
    option(
        "--prompt",
        choices=sorted(SYSTEM_PROMPTS),
        default="confidence-first",
        help="the method's system prompt; answer-first is for rlcr (default: %(default)s)",
    )
    parser.set_defaults(run_action=run)


def run_verl_export(arguments: argparse.Namespace) -> int:
    rows = export_for_verl(arguments.input, arguments.output, SYSTEM_PROMPTS[arguments.prompt], arguments.overwrite)
    print_text(f"{rows} records written to {arguments.output}")
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    """Export, and print the next steps."""
    what = MindSpeedExport(
        records=arguments.input,
        system_prompt=SYSTEM_PROMPTS[arguments.prompt],
        layout=LAYOUTS[arguments.template],
        tokenizer=arguments.tokenizer,
        workers=arguments.workers,
    )
    report = export(what, arguments.output, arguments.overwrite)
    print_text(f"{report['records']} records exported to {arguments.output}")
    if compared := report["prompts_equal_to_chat_template"]:
        print_text(f"all {compared} prompts equal the tokenizer's chat template, token by token")
    else:
        print_text(f"{arguments.tokenizer} does not exist here: prompts were not compared with its chat template")
    print_text("next, in MindSpeed-RL's repository:")
    print_text(f"  python cli/preprocess_data.py dataset --config-dir {arguments.output.resolve()}")
    print_text("and in the training configuration:")
    for key, value in report["training"].items():
        print_text(f"  {key}: {value}")
    return 0
