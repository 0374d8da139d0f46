"""``python -m experiments.smollm2``: make a Hugging Face directory of SmolLM2-135M-Instruct."""

import argparse
import sys
from pathlib import Path

from coca_mindspeed.utils.console import print_text
from experiments.smollm2 import write_smollm2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="the Hugging Face directory to make")
    merged = "merge the adapter in DIR (experiments.smollm2.adapter) into the weights"
    parser.add_argument("--adapter", type=Path, metavar="DIR", help=merged)
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier one in DIR")


def run(arguments: argparse.Namespace) -> int:
    model = write_smollm2(arguments.directory, adapter=arguments.adapter, overwrite=arguments.overwrite)
    print_text(f"{arguments.directory}: {sum(p.numel() for p in model.parameters()):,} parameters")
    return 0


if __name__ == "__main__":
    from experiments.__main__ import main

    sys.exit(main(["smollm2", *sys.argv[1:]]))
