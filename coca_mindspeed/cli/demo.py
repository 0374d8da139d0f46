"""``coca-mindspeed demo``: warm up the tiny model to be over-confident, train it, and report before and after."""

import argparse
import re
import shlex
import shutil
from pathlib import Path

from coca_mindspeed.cli.ask import ask
from coca_mindspeed.cli.options import at_least, place
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError, UsageError
from coca_mindspeed.local.start import open_run
from coca_mindspeed.utils.console import one_line, print_text
from coca_mindspeed.utils.directories import is_ours, lock_run

_SHOWN_KINDS = ("1+2", "2+2", "3+3", "2*1", "2*2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="random seed (default: 0)")
    parser.add_argument("--output", type=place, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    went = parser.add_mutually_exclusive_group()
    went.add_argument("--resume", action="store_true", help="continue the stopped demo in DIR")
    went.add_argument("--again", action="store_true", help="remove an earlier demo of the same settings in DIR first")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="change the run: method=joint, trainer.steps=100"
    )


def _remove_earlier(output: Path, config: RunConfig) -> None:
    """Remove the demo of the same settings in ``output``; ConfigError if it holds anything else."""
    if not output.exists() or not any(output.iterdir()):
        return
    stored, same = output / "config.yaml", False
    if is_ours(output, "run") and stored.is_file():
        runs = (compose_run(str(stored)).run, config)
        earlier, now = (run.model_dump(mode="json", exclude={"model"}) for run in runs)
        same = earlier == now
    if not same:
        reason = "holds a run of other settings" if is_ours(output, "run") else "holds files that are not of a demo"
        raise ConfigError(f"--output {output}: {reason}, which is not removed; move it, or choose another --output")
    with lock_run(output):  # no process trains it
        pass
    shutil.rmtree(output)


def run(arguments: argparse.Namespace) -> int:
    if any(re.match(r"\+{0,2}seed=", override) for override in arguments.overrides):
        raise UsageError("demo: set the seed by --seed N, not by seed=")
    composed = compose_run("demo", [f"seed={arguments.seed}", *arguments.overrides])
    for needed, key in (
        (composed.run.evaluation.final_questions != 0, "evaluation.final_questions=0"),
        (composed.run.data.has_held_out, "data.evaluate=null"),
    ):
        if not needed:
            raise ConfigError(f"{key}: the demo shows answers before and after; at least 1 question is needed")
    if arguments.again:
        _remove_earlier(arguments.output, composed.run)
    with open_run(composed, arguments.output, resume=arguments.resume, show_progress=not arguments.quiet) as local:
        policy = local.start()
        before = local.evaluate_before(policy)
        local.train(policy)
        after = local.evaluate_after(policy)
        held_out = local.inputs.evaluate
        by_kind = (next((r for r in held_out if r.metadata.get("kind") == kind), None) for kind in _SHOWN_KINDS)
        asked = [record for record in by_kind if record is not None] or held_out[: len(_SHOWN_KINDS)]
        system_prompt = local.config.method.system_prompt
        replies = ask(policy, local.config, asked, system_prompt, 1)
        verdicts = local.inputs.grader.grade(asked, [reply.answer for reply in replies])
    from coca_mindspeed.local.report import finish_run  # it imports torch

    finish_run(local, before, after)
    order = ", from easy to hard" if composed.run.data.name == "arithmetic" else ""
    print_text(f"\nHeld-out questions{order} (confidence, question, answer):")
    for record, reply, verdict in zip(asked, replies, verdicts, strict=True):
        print_text(f"  {reply.line}  [{'right' if verdict.correct_or_none else f'{one_line(record.answer)} is right'}]")
    print_text(f"Ask it more: {shlex.join(['coca-mindspeed', 'ask', str(arguments.output), asked[0].question])}")
    return 0
