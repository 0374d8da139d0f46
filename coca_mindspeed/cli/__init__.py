"""``coca-mindspeed``: one command, with a module of :mod:`coca_mindspeed.cli` for each subcommand.

A command module has ``add_arguments(parser)`` and ``run(arguments) -> exit code``.  Only the chosen one is imported,
so ``--help`` is quick and an optional dependency is asked for only by the command that needs it.

Exit codes: 0, 1 for what failed, 2 for what was typed wrong, 130 for an interrupt, 141 where nobody reads the output.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from coca_mindspeed import __version__
from coca_mindspeed.errors import CocaError

COMMANDS: dict[str, str] = {
    "demo": "train the tiny model by CoCA in about two minutes and show what it learned",
    "train": "train a causal language model on this machine's CPU or GPU",
    "check": "print the plan of a run and what memory it needs, or why it cannot run; needs no accelerator",
    "doctor": "look at an Ascend machine: what is found, what is wanted, how to fix it",
    "patches": "compare a MindSpeed-RL checkout with the releases that the hooks support",
    "baseline": "confidence by question probability, probe, assessor, majority vote or the prompt alone",
    "reproduce": "run every method of the paper over several seeds and make its tables",
    "config": "list the ready-made runs and keys, or print a run's resolved YAML",
    "evaluate": "metrics with intervals of prediction files",
    "report": "compare runs on one HTML page, and with the paper",
    "calibrate": "recalibrate confidences from labels, and certify the error of what is accepted",
    "route": "replay tiers from their predictions: cost against quality, beside the routers to beat",
    "serve": "answer by tiers of models behind the OpenAI API, or serve one model itself",
    "watch": "follow a running training in the terminal",
    "data": "prepare, inspect and export data sets",
    "import-gguf": "make a Hugging Face directory of a model in a GGUF file",
}
_EXTRAS = ("wandb", "swanlab", "datasets", "gguf")  # of setup.py, named like their packages


class _Parser(argparse.ArgumentParser):
    """Refuses unknown arguments with the usage of the subcommand that got them, and takes overrides from anywhere.

    argparse itself takes positional arguments from one place only, and leaves the refusal to the top level.
    """

    _has_subcommands = False

    def add_subparsers(self, **options: Any) -> Any:
        """See :class:`argparse.ArgumentParser`."""
        self._has_subcommands = True
        return super().add_subparsers(**options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """See :class:`argparse.ArgumentParser`; nothing is left over by a parser without subcommands."""
        parsed, rest = super().parse_known_args(args, namespace)
        if not rest or self._has_subcommands:
            return parsed, rest
        if not hasattr(parsed, "overrides") or any(text.startswith("-") or "=" not in text for text in rest):
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        parsed.overrides = [*parsed.overrides, *rest]
        return parsed, []


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; errors that are meant for the user are printed without a traceback."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    _escape_what_cannot_be_encoded()
    try:
        parsed = _parser(arguments).parse_args(arguments)
        code = int(parsed.run(parsed))
        sys.stdout.flush()
    except CocaError as error:
        return _end(error, error.exit_code)
    except KeyboardInterrupt:
        return _end("interrupted", 130)
    except BrokenPipeError:  # the reader of our output (head, less) has seen enough
        _leave_output_unread()
        return 141
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "coca_mindspeed"):
            raise
        what = f".[{package}]" if package in _EXTRAS else package
        return _end(f"the package {package!r} is not installed; pip install '{what}'", 1)
    except OSError as error:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return _end(f"{where}{error.strerror or error}", 1)
    return code


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command line, complete for the one command that ``arguments`` name."""
    parser = _Parser(
        prog="coca-mindspeed",
        description="Confidence before answering (CoCA): train, evaluate and inspect language models that say how "
        "sure they are before they answer.",
    )
    parser.add_argument("--version", action="version", version=f"coca-mindspeed {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if arguments[:1] == [name]:
            module = importlib.import_module(f"coca_mindspeed.cli.{name.replace('-', '_')}")
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def _end(message: object, code: int) -> int:
    from coca_mindspeed.utils.console import print_failure  # --help needs no rich

    return print_failure(message, code)


def _escape_what_cannot_be_encoded() -> None:
    """Let a path that is not UTF-8, or a locale that is not, cost an escape and not the command."""
    for stream in (sys.stdout, sys.stderr):
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(errors="backslashreplace")


def _leave_output_unread() -> None:
    """Let the interpreter's own flush at the end succeed."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:  # not a file of the system
        sys.stdout = None
