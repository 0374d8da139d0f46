"""``coca-mindspeed data export``: records for MindSpeed-RL's own preprocessing, and for verl."""

import argparse
from pathlib import Path

from coca_mindspeed.cli.data_prepare import SYSTEM_PROMPTS
from coca_mindspeed.cli.options import at_least, place
from coca_mindspeed.mindspeed.export import LAYOUTS, MindSpeedExport, export
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.verl.records import export_for_verl


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """The target program and its options."""
    parser.description = "Write prepared records in the form of another program."
    targets = parser.add_subparsers(dest="target", metavar="TARGET", required=True)
    target = targets.add_parser("mindspeed-rl", help="for MindSpeed-RL's cli/preprocess_data.py")
    target.description = (
        "Write the questions, the prompt template and the data set configuration from which MindSpeed-RL's own "
        "cli/preprocess_data.py makes packed data. Where the tokenizer directory is at hand, every prompt is compared "
        "with its chat template, token for token."
    )
    target.add_argument("--input", type=Path, required=True, metavar="FILE", help="prepared records (train.jsonl)")
    target.add_argument("--output", type=place, required=True, metavar="DIRECTORY", help="the directory to make")
    target.add_argument("--overwrite", action="store_true", help="replace an earlier export, packed data included")
    target.add_argument("--template", choices=sorted(LAYOUTS), required=True, help="the model family's chat layout")
    target.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        metavar="DIRECTORY",
        help="tokenizer directory, also written to the YAML",
    )
    target.add_argument(
        "--prompt",
        choices=sorted(SYSTEM_PROMPTS),
        default="confidence-first",
        help="the method's system prompt; answer-first is for rlcr (default: confidence-first)",
    )
    target.add_argument(
        "--workers", type=at_least(1), default=8, metavar="N", help="processes of preprocess_data.py (default: 8)"
    )
    target.set_defaults(run_action=run_export)
    verl = targets.add_parser("verl", help="for verl's data.train_files and data.val_files")
    verl.description = "Write the records as verl's JSON Lines, each with its chat and its whole record."
    verl.add_argument("--input", type=Path, required=True, metavar="FILE", help="prepared records (train.jsonl)")
    verl.add_argument("--output", type=place, required=True, metavar="FILE", help="the file to write (.jsonl)")
    verl.add_argument("--overwrite", action="store_true", help="replace an earlier file")
    verl.add_argument(
        "--prompt",
        choices=sorted(SYSTEM_PROMPTS),
        default="confidence-first",
        help="the method's system prompt; answer-first is for rlcr (default: confidence-first)",
    )
    verl.set_defaults(run_action=run_verl_export)


def run_verl_export(arguments: argparse.Namespace) -> int:
    """Write the file."""
    rows = export_for_verl(arguments.input, arguments.output, SYSTEM_PROMPTS[arguments.prompt], arguments.overwrite)
    print_text(f"{rows} records written to {arguments.output}")
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    """Export, and say what to run next."""
    what = MindSpeedExport(
        records=arguments.input,
        system_prompt=SYSTEM_PROMPTS[arguments.prompt],
        layout=LAYOUTS[arguments.template],
        tokenizer=arguments.tokenizer,
        workers=arguments.workers,
    )
    report = export(what, arguments.output, arguments.overwrite)
    print_text(f"{report['records']} records exported to {arguments.output}")
    if report["prompts_equal_to_chat_template"]:
        compared = report["prompts_equal_to_chat_template"]
        print_text(f"all {compared} prompts equal the tokenizer's chat template, token for token")
    else:
        print_text(f"{arguments.tokenizer} is not on this machine: prompts were not compared with its chat template")
    print_text("next, in MindSpeed-RL's repository:")
    print_text(f"  python cli/preprocess_data.py dataset --config-dir {arguments.output.resolve()}")
    print_text("and in the training configuration:")
    for key, value in report["training"].items():
        print_text(f"  {key}: {value}")
    return 0
