"""``coca-mindspeed``: one module of :mod:`coca_mindspeed.cli` for each subcommand.

A command module has ``add_arguments(parser)`` and ``run(arguments) -> exit code``.  Only the chosen one is imported,
so that ``--help`` is quick and optional dependencies are imported only by the commands that need them.

Exit codes: 0, 1 for failures, 2 for usage errors, 130 for an interrupt, 141 for a closed output.
"""

import argparse
import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from coca_mindspeed import __version__
from coca_mindspeed.errors import CocaError, UsageError, did_you_mean
from coca_mindspeed.utils.interrupts import quiet_imports
from coca_mindspeed.utils.packages import missing_package
from coca_mindspeed.utils.process import limit_spinning

COMMANDS: dict[str, str] = {
    "demo": "train the tiny model by CoCA in about three minutes and compare it before and after",
    "train": "train a causal language model on this machine's CPU or GPU",
    "check": "print the plan of a run and the memory it needs, or why it cannot run; needs no accelerator",
    "launch": "train on a cluster of NPUs or GPUs, on MindSpeed-RL or verl; launch/*.sh call it",
    "doctor": "check an Ascend machine: what is found, what is expected, how to fix it",
    "patches": "compare a MindSpeed-RL checkout with the releases that the hooks support",
    "baseline": "confidence by question probability, probe, assessor, votes or the prompt alone",
    "config": "list the ready-made runs and keys, print a run's resolved YAML, or convert MindSpeed-RL's own YAML",
    "collect": "ask a model behind an OpenAI-compatible API for responses, which evaluate grades",
    "ask": "print a model's confidence and answer for questions",
    "evaluate": "compute metrics with intervals of predictions, or of responses that it grades",
    "report": "the page of a run, or one that compares runs",
    "watch": "follow a running training in the terminal",
    "data": "prepare and export data sets",
    "export": "copy the trained model of a local run, with a model card",
}
_ROUTER = ("serve", "route", "calibrate")  # commands of coca-router
# Commands of the source tree that are not installed, by their module.
_EXPERIMENTS = {"reproduce": "reproduce", "data real-world": "real_world"}


class _Parser(argparse.ArgumentParser):
    """Reports unknown arguments with the subcommand's usage, suggests similar choices, and takes overrides anywhere."""

    _has_subcommands = False
    _typed: Sequence[str] = ()

    def add_subparsers(self, **options: Any) -> Any:
        self._has_subcommands = True
        return super().add_subparsers(**options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self._typed = sys.argv[1:] if args is None else list(args)
        if any(action.dest == "overrides" for action in self._actions):
            self._refuse_split_values(self._typed)
        parsed, rest = super().parse_known_args(args, namespace)
        if not rest or self._has_subcommands:
            return parsed, rest
        if not hasattr(parsed, "overrides") or any(
            text.startswith("-") or ("=" not in text and text[:1] != "~") for text in rest
        ):
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._similar_option(rest[0])}")
        parsed.overrides = [*parsed.overrides, *rest]
        return parsed, []

    def _refuse_split_values(self, typed: Sequence[str]) -> None:
        """End with the usage if a shell has split ``KEY={...}`` at its spaces, because the quotes are forgotten."""
        for place, text in enumerate(typed):
            match = re.match(r"[~+]*[\w./@-]+=(?P<open>[{\[])", text)
            if match is not None and not text.rstrip().endswith(end := {"{": "}", "[": "]"}[match["open"]]):
                last = next((n for n, part in enumerate(typed[place:], 1) if part.endswith(end)), 1)
                whole = " ".join(typed[place : place + last])
                self.error(
                    f"{text}: its {match['open']!r} is not closed; quote a value with spaces: {shlex.quote(whole)}"
                )

    def error(self, message: str) -> NoReturn:
        """End with the usage; where an argument is missing, also say which option may be it, misspelled.

        ``argparse`` looks for missing arguments before it names those that it does not know.
        """
        options = self._option_string_actions
        typed = (text.partition("=")[0] for text in self._typed)
        unknown = (name for name in typed if not any(option.startswith(name) for option in options))
        if "are required" in message and (misspelled := next(filter(self._similar_option, unknown), None)):
            message += f"; found {misspelled}{self._similar_option(misspelled)}"
        super().error(message)

    def _similar_option(self, text: str) -> str:
        return did_you_mean(text.partition("=")[0], self._option_string_actions) if text.startswith("-") else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        if choices and str(value) not in choices:
            text = f"unknown value {value!r}{did_you_mean(str(value), choices)} (choose from {', '.join(choices)})"
            raise argparse.ArgumentError(action, text)


def main(
    argv: Sequence[str] | None = None,
    parser: Callable[[Sequence[str]], argparse.ArgumentParser] | None = None,
    program: str = "coca-mindspeed",
) -> int:
    """Run the command line of ``coca-mindspeed``, or of another ``program`` with its ``parser``.

    Errors for the user are printed without a traceback.
    """
    with quiet_imports(program):
        return _run(sys.argv[1:] if argv is None else list(argv), parser or parser_of, program)


def _run(arguments: list[str], parser: Callable[[Sequence[str]], argparse.ArgumentParser], program: str) -> int:
    limit_spinning()
    for stream in (sys.stdout, sys.stderr):  # a character that the locale cannot encode becomes an escape
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(errors="backslashreplace")
    try:
        chosen = parser(arguments)
        if not arguments:
            chosen.print_help()
            return 0
        parsed = chosen.parse_args(arguments)
        code = int(parsed.run(parsed))
        sys.stdout.flush()
    except CocaError as error:
        return _end(error, error.exit_code, program)
    except KeyboardInterrupt:
        return _end("interrupted", 130, program)
    except BrokenPipeError:  # the reader of the output (head, less) has closed it
        _discard_output()
        return 141
    except ModuleNotFoundError as error:
        if (text := missing_package(error)) is None:
            raise
        sys.stderr.write(f"{program}: {text}\n")  # without the console, whose packages may be missing
        return 1
    except OSError as error:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return _end(f"{where}{error.strerror or error}", 1, program)
    return code


def parser_of(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of ``coca-mindspeed``, complete for the command that ``arguments`` name."""
    if arguments and arguments[0] in _ROUTER:
        raise UsageError(f"{arguments[0]} is a command of coca-router: coca-router {arguments[0]} ...")
    for command, name in _EXPERIMENTS.items():
        if list(arguments[: len(command.split())]) == command.split():
            raise UsageError(
                f"{command} is not in the installed package; in a source tree: python -m experiments.{name}"
            )
    description = (
        "Confidence before answering (CoCA): train, evaluate and inspect language models that say how sure they are "
        "before they answer."
    )
    return command_parser(arguments, "coca-mindspeed", description, COMMANDS, "coca_mindspeed.cli.{}")


def command_parser(
    arguments: Sequence[str], prog: str, description: str, commands: Mapping[str, str], module: str
) -> argparse.ArgumentParser:
    """Parser of a command line, complete for the one command that ``arguments`` name.

    ``commands`` is name -> summary, ``module`` a command's module with ``{}`` for its name.
    """
    parser = _Parser(prog=prog, description=description)
    parser.add_argument("--version", action="version", version=f"{prog} {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in commands.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if arguments[:1] == [name]:
            command = importlib.import_module(module.format(name.replace("-", "_")))
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
    return parser


def _end(message: object, code: int, program: str) -> int:
    from coca_mindspeed.utils.console import print_failure  # --help needs no rich

    return print_failure(message, code, program)


def _discard_output() -> None:
    """Let the interpreter's own flush at exit succeed."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:  # not a file of the system
        sys.stdout = None
