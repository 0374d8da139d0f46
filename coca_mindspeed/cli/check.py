"""``coca-mindspeed check``: the plan of a run and its problems; needs no accelerator.

The last line is the verdict: ``OK`` (exit code 0) or the number of problems (1, or 2 if a typed override is at fault).
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from coca_mindspeed.cli.config import add_run_arguments, compose_engine_run
from coca_mindspeed.cli.options import place
from coca_mindspeed.config.compose import ComposedConfig, find_verl_run
from coca_mindspeed.config.plan import Plan, show_plan
from coca_mindspeed.errors import CocaError, UsageError, raise_problems
from coca_mindspeed.utils.console import print_failure, print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write MindSpeed-RL's configuration to FILE")
    parser.add_argument("--output", type=place, metavar="DIR", help="output directory of the run (default: runs/RUN)")
    metrics = "metrics.jsonl of an earlier run on NPUs or on verl: estimate time by its rate"
    parser.add_argument("--metrics", type=Path, metavar="FILE", help=metrics)
    parser.add_argument("--quiet", action="store_true", help="print problems only")


def run(arguments: argparse.Namespace) -> int:
    try:
        start, missing = _check(arguments)
    except CocaError as error:
        code = print_failure(error, error.exit_code)
        count = len(getattr(error, "problems", ())) or 1
        print_text(f"{count} problem{'s' * (count > 1)}", sys.stderr)
        return code
    if not arguments.quiet:
        if missing:
            print_text(f"not here yet, and needed to start: {', '.join(missing)}")
        print_text(f"start it by: {start}\nOK")
    return 0


def _check(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """Check and print the plan; return the command that starts the run, and the keys whose files are missing."""
    name, quiet = arguments.run_name, arguments.quiet
    file = find_verl_run(name)
    composed = None if file else compose_engine_run(name, arguments.overrides)
    if composed is not None and composed.run.hardware.platform != "local":
        plan, begun = _check_cluster(composed, arguments)
        options = ["--output", str(arguments.output)] if arguments.output else []
        return _launch_command(composed, arguments.overrides, [*options, *["--resume"] * begun]), plan.missing
    for option in ("write", "output" if file else "metrics"):
        if getattr(arguments, option):
            raise UsageError(f"--{option}: does not apply to {name}")
    if composed is None:
        from coca_mindspeed.verl.plan import make_plan

        assert file is not None
        verl_plan = make_plan(file, arguments.overrides, arguments.metrics)
        show_plan(verl_plan, quiet=quiet)
        return shlex.join(["bash", "launch/verl.sh", name, *arguments.overrides]), verl_plan.missing
    _check_local(composed, quiet)
    output = str(arguments.output or Path("runs", Path(name).stem))
    return shlex.join(["coca-mindspeed", "train", name, *arguments.overrides, "--output", output]), []


def _launch_command(composed: ComposedConfig, overrides: Sequence[str], options: Sequence[str]) -> str:
    """The command of the first node; the launch scripts take the number of nodes from the environment."""
    own, nodes = Path("launch", f"{composed.name}.sh"), composed.run.hardware.nodes
    rest = [each for each in overrides if not each.lstrip("+").startswith(("hardware.nodes=", "coca.nodes="))]
    script = [str(own)] if own.is_file() else ["launch/run.sh", composed.name]
    command = shlex.join(["bash", *script, *rest, *options])
    if nodes == 1:
        return command
    return f"NNODES={nodes} NODE_RANK=0 MASTER_ADDR=ADDRESS {command}   (on each node, with its NODE_RANK)"


def _check_local(composed: ComposedConfig, quiet: bool) -> None:
    """Check a run of the local engine as its start does, and sample responses of its model."""
    from coca_mindspeed.local.start import open_run

    with open_run(composed, None, show_progress=not quiet, print_plan=not quiet) as run:
        found = run.trial()
    unknown = "time: unknown: measured by sampling, with weights and evaluation.preflight above 0"
    if not quiet:
        print_text(unknown if found is None else f"{found}\ntime: {found.time}")
    if found is None:
        return
    if composed.run.warm_up.records is None:
        raise_problems(found.problems())
    elif not quiet:
        print_text("the run samples again after its warm-up")


def _check_cluster(composed: ComposedConfig, arguments: argparse.Namespace) -> tuple[Plan, bool]:
    """Check a run on MindSpeed-RL; return its plan, and whether its output directory holds checkpoints to resume."""
    from coca_mindspeed.mindspeed.plan import show_plan_of
    from coca_mindspeed.mindspeed.start.run_file import StageFiles, check_begun_run, mindspeed_values, write_run_file
    from coca_mindspeed.mindspeed.start.verifiers import check_gold_answers

    file: Path | None = arguments.write
    plan = show_plan_of(composed, arguments.metrics, quiet=arguments.quiet)
    check_gold_answers(plan.start, os.environ)
    output = arguments.output or Path("runs") / Path(composed.name).stem
    # The plan alone needs no number of iterations.
    values = mindspeed_values(plan.start, plan.iterations or (None if file else 1), StageFiles(output))
    if file is not None:
        write_run_file(file, values, composed.name)
        print_text(f"written: {file}")
    # By the metrics of one run, another may be planned.
    planned = arguments.metrics is not None and arguments.output is None
    begun = not planned and plan.iterations is not None and check_begun_run(plan.start, output)
    return plan, begun
