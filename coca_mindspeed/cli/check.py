"""``coca-mindspeed check``: the plan of a run and its problems; needs no accelerator.

The last line is the verdict: ``OK`` (exit code 0) or the number of problems (1, or 2 if a typed override is at fault).
"""

import argparse
import sys
from contextlib import closing
from pathlib import Path

from rich.table import Table

from coca_mindspeed.cli.config import add_run_arguments
from coca_mindspeed.cli.options import at_least, place
from coca_mindspeed.config.checks import CHECKS, missing_data, missing_model, or_on_the_hub
from coca_mindspeed.config.compose import ComposedConfig
from coca_mindspeed.config.plan import Phase, Plan, evaluations
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import CocaError, ConfigError, UsageError, find_problems, raise_problems
from coca_mindspeed.mindspeed.plan import (
    ClusterPlan,
    Rates,
    checkpoint_bytes,
    host_gib,
    iteration_seconds,
    make_plan,
    model_parameters,
    most_checkpoints,
    published_rates,
    read_rates,
    run_days,
)
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values, stages_to_do, write_run_file
from coca_mindspeed.mindspeed.upstream_layout import compose_any_layout
from coca_mindspeed.utils.console import PlainConsole, print_failure, print_text
from coca_mindspeed.utils.files import write_atomically
from coca_mindspeed.utils.process import GIB
from coca_mindspeed.verl import plan as verl_plan
from coca_mindspeed.verl.configuration import find_verl_run

_CLUSTER_OPTIONS = ("write", "output", "stage", "resume", "for_script", "metrics")
_GRAPH_MODE = (
    "graph mode (enforce_eager=false), not tried on an NPU: the run sets TASK_QUEUE_ENABLE=1; every wake-up of vLLM "
    "repeats the capture, and may replay graphs with addresses of freed weights: rollout/log_prob_gap must stay as in "
    "eager mode (docs/ascend.md, graph mode)"
)


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
        _check(arguments)
    except CocaError as error:
        code = print_failure(error, error.exit_code)
        count = len(getattr(error, "problems", ())) or 1
        print_text(f"{count} problem{'s' * (count > 1)}", sys.stderr)
        return code
    if not arguments.quiet:
        print_text("OK")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    verl_file = find_verl_run(arguments.run_name)
    composed = None if verl_file else compose_any_layout(arguments.run_name, arguments.overrides)
    if composed is None or composed.run.hardware.platform == "local":
        for option in _CLUSTER_OPTIONS:
            if getattr(arguments, option):
                name = f"--{option.replace('_', '-')}"
                raise UsageError(f"{name}: is for runs on MindSpeed-RL, unlike {arguments.run_name}")
    if verl_file is not None:
        _check_verl(verl_file, arguments)
    elif composed is not None and composed.run.hardware.platform == "local":
        _check_local(composed, arguments.quiet)
    elif composed is not None:
        _check_cluster(composed, arguments)


def _check_verl(file: Path, arguments: argparse.Namespace) -> None:
    plan = verl_plan.make_plan(file, arguments.overrides)
    raise_problems(plan.problems, f"{file.name} cannot run:")
    if not arguments.quiet:
        _print(plan)


def _check_local(composed: ComposedConfig, quiet: bool) -> None:
    """Check a run of the local engine as its start does, print its plan, and sample responses of its model."""
    from coca_mindspeed.local.run_directory import RunState
    from coca_mindspeed.local.validation import checked_grader, read_inputs

    config, name = composed.run, composed.name
    checks = (*CHECKS, *map(or_on_the_hub, (missing_data, missing_model)))
    raise_problems(find_problems(config, checks), f"{name} cannot run:")
    inputs = read_inputs(config, RunState(Path("runs")), show_progress=not quiet)
    with closing(checked_grader(inputs)) as grader:
        from coca_mindspeed.local.plan import make_plan, sample_responses  # torch takes seconds to import

        plan = make_plan(inputs.config, name)
        if not quiet:
            _print(plan)
        raise_problems(plan.problems, f"{name} cannot run:")
        found = sample_responses(composed, inputs, grader, show_progress=not quiet)
    if found is None:
        return
    if not quiet:
        print_text(found)
    if config.warm_up.records is None:
        raise_problems(found.problems())
    elif not quiet:
        print_text("the run samples again after its warm-up")


def _check_cluster(composed: ComposedConfig, arguments: argparse.Namespace) -> None:
    config = composed.run
    for problem in missing_data(config):
        if problem.key == "data.train":
            print_text(f"warning: {problem}", sys.stderr)
    if composed.notes and not arguments.quiet:
        print_text(f"{composed.name} has MindSpeed-RL's own layout (docs/port.md); of its keys are")
        for note in composed.notes:
            print_text(f"    {note}")
    plan = make_plan(config)
    rates = published_rates(plan.resolved) if arguments.metrics is None else read_rates(arguments.metrics)
    if not arguments.quiet:
        memory: tuple[Phase, ...] = ()
        notes: list[str] = []
        if (need := plan.memory) is not None:
            limit = need.limit_gib
            memory = (Phase("training", need.training, limit), Phase("rollout", need.rollout, limit))
            held = f"{need.longest_responses:.0f} sequences of {plan.resolved.max_model_len} tokens"
            notes = [f"KV cache per rollout engine: {held}; estimates, not measured on an NPU (docs/ascend.md)"]
        if not plan.resolved.enforce_eager:
            notes.append(_GRAPH_MODE)
        _print(Plan(composed.name, tuple(_cluster_rows(plan, config, rates)), memory, tuple(notes)))
    raise_problems(plan.problems, f"{composed.name} cannot run:")
    output = arguments.output or Path("runs") / Path(composed.name).stem
    if arguments.for_script is not None:
        _write_for_script(config, plan, output, arguments)
        return
    iterations = plan.iterations
    if arguments.write is None and not arguments.resume:  # a plan needs no number of iterations
        iterations = iterations or 1
    values = mindspeed_values(config, iterations, StageFiles(output, arguments.stage), resume=arguments.resume)
    if (file := arguments.write) is not None:
        if not file.parent.is_dir():
            raise ConfigError(f"--write {file}: {file.parent} is not a directory; create it first")
        if file.is_dir():
            raise ConfigError(f"--write {file}: is a directory; name a file in it")
        write_run_file(file, values, composed.name)
        print_text(f"written: {file}")


def _write_for_script(config: RunConfig, plan: ClusterPlan, output: Path, arguments: argparse.Namespace) -> None:
    hardware = config.hardware
    lines = [f"platform {hardware.platform}", f"nodes {hardware.nodes}", f"npus_per_node {hardware.npus_per_node}"]
    for stage, has_checkpoint in stages_to_do(config, plan.iterations, output, resume=arguments.resume):
        lines.append(f"stage {stage} {'resume' if has_checkpoint else 'fresh'}")
        mindspeed_values(config, plan.iterations, StageFiles(output, stage), resume=has_checkpoint)
    write_atomically(arguments.for_script, "\n".join(lines) + "\n")


def _cluster_rows(plan: ClusterPlan, config: RunConfig, rates: Rates | None) -> list[tuple[str, str]]:
    """Rows of a plan, from the values of MindSpeed-RL's keys that the run file has."""
    r = plan.resolved
    dp, engines, slots = (r.dp, r.rollout_dp, _slots(plan)) if r.fills_npus else ("?", "?", "?")
    host = f"{host_gib(r):.0f}" if r.fills_npus else "?"
    iterations = "unknown: data.train does not exist; data.rows=N plans without it"
    if plan.iterations is not None:
        rows = f" ({plan.rows:,} questions by {plan.rows_from})" if plan.rows else ""
        iterations = f"{plan.iterations:,} a stage{rows}"
    size, most = (
        checkpoint_bytes(r) / 1e9,
        most_checkpoints(r, plan.iterations, len(config.method.training_method.stages)),
    )
    kept = "all" if r.keep_checkpoints is None else f"the newest {r.keep_checkpoints}"
    checkpoints = f"{size:.1f} GB every {r.save_interval} iterations, {kept} of a stage are kept"
    updates = r.prompts // max(1, r.mini_batch) * r.epochs
    tokens = f"{r.max_prompt} + {r.max_new} at most; {r.responses * r.max_new:,} new ones per iteration"
    return [
        ("method", str(r.method)),
        ("learning rate", f"{r.lr:g}"),
        *((key, f"{path}{' (MISSING)' * (not Path(path).exists())}") for key, path in r.files.items() if path),
        ("NPUs", f"{r.npus} on {r.nodes} node{'s' * (r.nodes > 1)}, {r.memory_gib:g} GiB each"),
        ("model", f"{model_parameters(r) / 1e9:.2f} billion parameters, {r.layers} layers"),
        ("training", f"TP {r.tp} x PP {r.pp} x CP {r.cp} x DP {dp}"),
        ("rollout", f"{engines} engines of TP {r.rollout_tp}"),
        ("slots per engine", slots),
        ("iteration", f"{r.prompts} prompts x {r.group} responses = {r.responses}"),
        ("updates per iteration", f"{updates} of {r.mini_batch} prompts"),
        ("microbatches", f"up to {r.update_tokens} tokens" if r.dynamic_batch else f"{r.micro_batch} responses"),
        ("tokens", tokens),
        ("iterations", iterations),
        ("time", _time(plan, config, rates) if r.npus > 0 else "?"),
        ("host memory", f"about {host} GiB a node, without Ray's object store and the data"),
        ("validation", evaluations(config, "iterations")),
        ("checkpoints", f"{checkpoints}, at most {most * size:.0f} GB at once"),
    ]


def _time(plan: ClusterPlan, config: RunConfig, rates: Rates | None) -> str:
    if rates is None:
        return "unknown: no rate is published for this model; measure one by --trial, and plan with --metrics FILE"
    stages, whole = len(config.method.training_method.stages), ""
    if plan.iterations is not None:
        days = run_days(plan.resolved, plan.iterations * stages, rates)
        whole = f", {days:.1f} days" if days >= 1 else f", {24 * days:.2g} hours"
    assumed = f"{rates.tokens_per_response:.0f} tokens a response and {rates.tokens_per_second:.0f} tokens/s per NPU"
    return f"about {iteration_seconds(plan.resolved, rates):.0f} s an iteration{whole}; at {assumed}"


def _slots(plan: ClusterPlan) -> str:
    r = plan.resolved
    waves = -(-r.engine_responses // max(1, r.max_sequences))
    if waves <= 1:
        return f"{r.max_sequences} for {r.engine_responses} responses"
    raise_it = "raise mindspeed_rl.generate_config.max_num_seqs to avoid waiting between waves"
    return f"{r.max_sequences} for {r.engine_responses} responses: {waves} waves; {raise_it}"


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
