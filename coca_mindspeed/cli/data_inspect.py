"""``coca-mindspeed data inspect``."""

import argparse
from pathlib import Path

from coca_mindspeed.cli.data_prepare import SYSTEM_PROMPTS
from coca_mindspeed.cli.options import at_least
from coca_mindspeed.data.description import Summary, example
from coca_mindspeed.data.prepare.filters import PromptCounter
from coca_mindspeed.data.records import read_records
from coca_mindspeed.data.registry import SOURCES, source_named
from coca_mindspeed.data.sources.reading import read_published
from coca_mindspeed.utils.console import print_text


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``inspect``."""
    parser.description = (
        "Read a file through, which checks every row, and print counts, sources, difficulties, lengths and the first "
        "examples as the model is asked them."
    )
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="prepared records, or with --dataset a publisher's file"
    )
    parser.add_argument("--dataset", choices=sorted(SOURCES), metavar="DATASET", help="the publisher's form it is in")
    parser.add_argument("--tokenizer", type=Path, metavar="DIRECTORY", help="also count prompt tokens")
    parser.add_argument(
        "--prompt",
        choices=sorted(SYSTEM_PROMPTS),
        default="confidence-first",
        help="the system prompt of the examples (default: confidence-first)",
    )
    parser.add_argument("--show", type=at_least(0), default=2, metavar="N", help="number of examples (default: 2)")
    parser.set_defaults(run_action=run_inspect)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print the summary, then the examples."""
    prompt = SYSTEM_PROMPTS[arguments.prompt]
    count = None if arguments.tokenizer is None else PromptCounter(arguments.tokenizer, prompt)
    summary = Summary()
    examples: list[str] = []
    if arguments.dataset is None:
        records = read_records(arguments.path)
    else:
        records = read_published(source_named(arguments.dataset), [arguments.path])
    for record in records:
        summary.add(record, None if count is None else count(record))
        if len(examples) < arguments.show:
            examples.append(example(record, prompt))
    print_text(summary.text())
    for shown in examples:
        print_text(f"\n{shown}")
    return 0
