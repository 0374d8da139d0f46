"""``coca-mindspeed check``: the plan of a run and its problems; needs no accelerator.

The last line is the verdict: ``OK`` (exit code 0) or the number of problems (1, or 2 if a typed override is at fault).
"""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from coca_mindspeed.cli.config import add_run_arguments
from coca_mindspeed.cli.options import at_least, place
from coca_mindspeed.config.checks import missing_data
from coca_mindspeed.config.compose import ComposedConfig
from coca_mindspeed.config.plan import Plan, question_rows
from coca_mindspeed.errors import CocaError, UsageError, raise_problems
from coca_mindspeed.mindspeed.plan import make_plan, script_facts
from coca_mindspeed.mindspeed.start.records import check_gold_answers
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values, write_run_file
from coca_mindspeed.mindspeed.upstream_layout import compose_any_layout
from coca_mindspeed.utils.console import PlainConsole, print_failure, print_text
from coca_mindspeed.utils.files import write_atomically
from coca_mindspeed.utils.process import GIB
from coca_mindspeed.verl.plan import find_verl_run
from coca_mindspeed.verl.plan import make_plan as plan_on_verl

_CLUSTER_OPTIONS = ("write", "output", "stage", "resume", "for_script", "metrics")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write MindSpeed-RL's configuration to FILE")
    parser.add_argument("--output", type=place, metavar="DIR", help="output directory of the run (default: runs/RUN)")
    stage = "index of the method's stage, from 0"
    parser.add_argument("--stage", type=at_least(0), default=0, metavar="N", help=stage)
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint in DIR")
    script = "write the facts that the launch scripts read: platform, nodes, NPUs, each stage as fresh or resume"
    parser.add_argument("--for-script", type=Path, metavar="FILE", help=script)
    metrics = "metrics.jsonl of an earlier run on NPUs: estimate time by its lengths and its rate"
    parser.add_argument("--metrics", type=Path, metavar="FILE", help=metrics)
    parser.add_argument("--quiet", action="store_true", help="print problems only")


def run(arguments: argparse.Namespace) -> int:
    try:
        start = _check(arguments)
    except CocaError as error:
        code = print_failure(error, error.exit_code)
        count = len(getattr(error, "problems", ())) or 1
        print_text(f"{count} problem{'s' * (count > 1)}", sys.stderr)
        return code
    if not arguments.quiet:
        print_text(f"start it by: {shlex.join(start)}\nOK")
    return 0


def _check(arguments: argparse.Namespace) -> list[str]:
    """Check and print the plan; return the command that starts the run."""
    name, quiet = arguments.run_name, arguments.quiet
    file = find_verl_run(name)
    composed = None if file else compose_any_layout(name, arguments.overrides)
    if composed is not None and composed.run.hardware.platform != "local":
        _check_cluster(composed, arguments)
        own = Path("launch", f"{name}.sh")
        return ["bash", *([str(own)] if own.is_file() else ["launch/run.sh", name]), *arguments.overrides]
    for option in _CLUSTER_OPTIONS:
        if getattr(arguments, option):
            raise UsageError(f"--{option.replace('_', '-')}: is for runs on MindSpeed-RL, unlike {name}")
    if composed is None:
        assert file is not None
        _show(plan_on_verl(file, arguments.overrides), quiet)
        return ["bash", "launch/verl.sh", name, *arguments.overrides]
    _check_local(composed, quiet)
    return ["coca-mindspeed", "train", name, *arguments.overrides, "--output", f"runs/{Path(name).stem}"]


def _check_local(composed: ComposedConfig, quiet: bool) -> None:
    """Check a run of the local engine as its start does, and sample responses of its model."""
    from coca_mindspeed.local.run_directory import RunState
    from coca_mindspeed.local.validation import check_settings, read_inputs

    check_settings(composed.run, heading=f"{composed.name} cannot run:")
    with read_inputs(composed.run, RunState(Path()), show_progress=not quiet) as inputs:
        from coca_mindspeed.local.plan import make_plan  # torch takes seconds to import
        from coca_mindspeed.local.run import LocalRun

        plan = make_plan(inputs.config, composed.name)
        plan = replace(plan, rows=(*plan.rows, *question_rows(inputs.questions)), warnings=inputs.warnings)
        found = None if plan.problems else LocalRun.checked(inputs, plan).trial()
        time = "unknown: measured by sampling, with weights and evaluation.preflight above 0"
        _show(replace(plan, rows=(*plan.rows, ("time", time if found is None else found.time))), quiet)
    if found is None:
        return
    if not quiet:
        print_text(found)
    if composed.run.warm_up.records is None:
        raise_problems(found.problems())
    elif not quiet:
        print_text("the run samples again after its warm-up")


def _check_cluster(composed: ComposedConfig, arguments: argparse.Namespace) -> None:
    run, file, resume = composed.run, arguments.write, arguments.resume
    for problem in missing_data(run):
        if problem.key == "data.train":
            print_text(f"warning: {problem}", sys.stderr)
    plan = make_plan(run, composed.name, arguments.metrics)
    layout = [f"keys of MindSpeed-RL's own layout (docs/port.md), {note}" for note in composed.notes]
    _show(replace(plan, notes=(*plan.notes, *layout)), arguments.quiet)
    check_gold_answers(run)
    output = arguments.output or Path("runs") / Path(composed.name).stem
    if arguments.for_script is not None:
        write_atomically(arguments.for_script, "\n".join([*script_facts(run, plan, output, resume=resume), ""]))
        return
    iterations = plan.iterations
    if file is None and not resume:  # the plan alone needs no number of iterations
        iterations = iterations or 1
    values = mindspeed_values(run, iterations, StageFiles(output, arguments.stage), resume=resume)
    if file is not None:
        write_run_file(file, values, composed.name)
        print_text(f"written: {file}")


def _show(plan: Plan, quiet: bool) -> None:
    """Print a plan, and its warnings also if ``quiet``; raise its problems."""
    if plan.rows and not quiet:
        _print(plan)
    for warning in plan.warnings:
        print_text(f"warning: {warning}", sys.stderr)
    raise_problems(plan.problems, f"{plan.title} cannot run:")


def _print(plan: Plan) -> None:
    console = PlainConsole()
    table = Table("", "", title=f"plan of {plan.title}", show_header=False, title_justify="left")
    for row in plan.rows:
        table.add_row(*row)
    console.print_table(table)
    if plan.memory:
        table = Table("estimated memory of one device", "GiB", "formula", title_justify="left")
        for phase in plan.memory:
            for part in phase.parts:
                table.add_row(f"{phase.name}: {part.name}", f"{part.bytes / GIB:.2f}", part.formula)
            table.add_row(f"{phase.name}, together", f"{phase.gib:.2f}", f"of {phase.limit_gib:.2f}", style="bold")
            table.add_section()
        console.print_table(table)
    for note in plan.notes:
        print_text(note)
