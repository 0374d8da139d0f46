"""``coca-mindspeed demo``: warm up the tiny model to be over-confident, train it, and report before and after."""

import argparse
import re
from pathlib import Path

from coca_mindspeed.cli.ask import ask
from coca_mindspeed.cli.options import at_least, place
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import ConfigError, UsageError
from coca_mindspeed.local.start import open_run
from coca_mindspeed.utils.console import print_text

_SHOWN_KINDS = ("1+2", "2+2", "3+3", "2*1", "2*2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="random seed (default: 0)")
    parser.add_argument("--output", type=place, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    parser.add_argument("--resume", action="store_true", help="continue the stopped demo in DIR")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="change the run: method=joint, trainer.steps=100"
    )


def run(arguments: argparse.Namespace) -> int:
    if any(re.match(r"\+{0,2}seed=", override) for override in arguments.overrides):
        raise UsageError("demo: set the seed by --seed N, not by seed=")
    composed = compose_run("demo", [f"seed={arguments.seed}", *arguments.overrides])
    if composed.run.evaluation.final_questions == 0:
        raise ConfigError("evaluation.final_questions=0: the demo shows answers before and after; at least 1 is needed")
    with open_run(composed, arguments.output, resume=arguments.resume, show_progress=not arguments.quiet) as local:
        policy = local.start()
        before = local.evaluate_before(policy)
        local.train(policy)
        after = local.evaluate_after(policy)
    from coca_mindspeed.local.report import finish_run  # it imports torch

    finish_run(local, before, after)
    shown = [next((r for r in local.inputs.evaluate if r.metadata.get("kind") == kind), None) for kind in _SHOWN_KINDS]
    asked = [record for record in shown if record is not None]
    print_text("\nFive held-out questions, from easy to hard (confidence, question, answer):")
    for record, reply in zip(asked, ask(policy, local.config, asked, 1), strict=True):
        print_text(f"  {reply.line}  [{'right' if reply.answer == record.answer else f'{record.answer} is right'}]")
    print_text(f"Ask it more: coca-mindspeed ask {arguments.output} '{asked[0].question}'")
    return 0
