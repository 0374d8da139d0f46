"""``python -m experiments.gguf_import``: make a Hugging Face directory of a model in a GGUF file."""

import argparse
import sys
from pathlib import Path

from coca_mindspeed.utils.console import print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="GGUF file of the architecture Llama or Qwen2")
    parser.add_argument("directory", type=Path, metavar="DIR", help="the Hugging Face directory to make")
    parser.add_argument("--package", action="store_true", help="FILE is an installed package that contains one")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier import in DIR")


def run(arguments: argparse.Namespace) -> int:
    from experiments.gguf_import.convert import gguf_of_package, import_gguf  # needs the extra gguf

    file = gguf_of_package(arguments.file) if arguments.package else Path(arguments.file)
    model = import_gguf(file, arguments.directory, overwrite=arguments.overwrite)
    print_text(
        f"{model.architecture}, {model.parameters:,} parameters, {model.tokens:,} tokens; "
        f"end of turn: {model.end_of_turn}"
    )
    if not model.has_chat_template:
        print_text("the file has no chat template; training and sampling need one")
    print_text(f"model: {arguments.directory} (a Hugging Face directory)")
    return 0


if __name__ == "__main__":
    from experiments.__main__ import main

    sys.exit(main(["gguf_import", *sys.argv[1:]]))
