"""``coca-mindspeed``: one command, with a module of :mod:`coca_mindspeed.commands` for each subcommand.

A command module has ``add_arguments(parser)`` and ``run(arguments) -> exit code``.  Only the chosen one is imported,
so ``--help`` is quick and an optional dependency is asked for only by the command that needs it.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from coca_mindspeed import __version__
from coca_mindspeed.errors import CocaError

COMMANDS: dict[str, str] = {
    "demo": "train the tiny model by CoCA in about two minutes and show what it learned",
    "train": "train a causal language model on this machine's CPU or GPU",
    "check": "print the plan of a run for Ascend, or why it cannot run; needs no accelerator",
    "doctor": "look at an Ascend machine: what is found, what is wanted, how to fix it",
    "patches": "compare a MindSpeed-RL checkout with the releases that the hooks support",
    "baseline": "confidence by question probability, probe, assessor, majority vote or the prompt alone",
    "reproduce": "run every method of the paper over several seeds and make its tables",
    "config": "list the ready-made runs and keys, or print a run's resolved YAML",
    "evaluate": "metrics with intervals of prediction files",
    "report": "compare runs on one HTML page, and with the paper",
    "watch": "follow a running training in the terminal",
    "data": "prepare, inspect and export data sets",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; errors that are meant for the user are printed without a traceback."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="coca-mindspeed",
        description="Confidence before answering (CoCA): train, evaluate and inspect language models that say how "
        "sure they are before they answer.",
    )
    parser.add_argument("--version", action="version", version=f"coca-mindspeed {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if arguments[:1] == [name]:
            module = importlib.import_module(f"coca_mindspeed.commands.{name}")
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    try:
        parsed, rest = parser.parse_known_args(arguments)
        # argparse takes positional arguments from one place only; overrides may also follow the options.
        if rest and (not hasattr(parsed, "overrides") or any(text.startswith("-") or "=" not in text for text in rest)):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        if rest:
            parsed.overrides = [*parsed.overrides, *rest]
        return int(parsed.run(parsed))
    except CocaError as error:
        print(f"coca-mindspeed: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("coca-mindspeed: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) has seen enough
        sys.stderr.close()
        return 141


if __name__ == "__main__":
    sys.exit(main())
