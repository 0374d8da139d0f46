"""``coca-mindspeed check``: the plan of a run, or why it cannot run; needs no accelerator."""

import argparse
from pathlib import Path

from rich.table import Table

from coca_mindspeed.cli.check_verl import check_verl
from coca_mindspeed.cli.config import add_run_arguments
from coca_mindspeed.cli.options import at_least, place
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.model_size import Part, model_parameters
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError, UsageError
from coca_mindspeed.mindspeed.plan.cluster_plan import Plan, make_plan
from coca_mindspeed.mindspeed.plan.memory import checkpoint_bytes
from coca_mindspeed.mindspeed.plan.refusals import refusals
from coca_mindspeed.mindspeed.plan.upstream_keys import keys_where_there_is_a_checkout
from coca_mindspeed.mindspeed.start.cluster import wanted_cpus
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values, stages_to_do, write_run_file
from coca_mindspeed.utils.console import PlainConsole, print_text
from coca_mindspeed.utils.files import write_atomically
from coca_mindspeed.verl.configuration import find_verl_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="write MindSpeed-RL's configuration there, in a directory that exists",
    )
    parser.add_argument("--output", type=place, metavar="DIR", help="where the run goes (default: runs/RUN)")
    parser.add_argument(
        "--stage", type=at_least(0), default=0, metavar="N", help="stage of the method (sequential has 0 and 1)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in DIR")
    parser.add_argument(
        "--for-script",
        type=Path,
        metavar="FILE",
        help="write what the launch scripts ask: platform, NPUs, CPUs, each stage still to do as fresh or resume",
    )
    parser.add_argument("--quiet", action="store_true", help="no table")


def run(arguments: argparse.Namespace) -> int:
    if (on_verl := find_verl_run(arguments.run_name)) is not None:
        return check_verl(on_verl, arguments)
    composed = compose_run(arguments.run_name, arguments.overrides)
    if composed.run.hardware.platform == "local":
        _refuse_options_for_clusters(arguments)
        from coca_mindspeed.cli.check_local import check_local  # torch and transformers, seconds for the others

        check_local(composed.run, composed.name, quiet=arguments.quiet)
        return 0
    plan = make_plan(composed.run)
    if not arguments.quiet:
        _print_plan(plan, composed.run, composed.name)
    keys = keys_where_there_is_a_checkout()
    unknown = [] if keys is None else [f"mindspeed_rl.{line}" for line in keys.unknown(composed.run.mindspeed_rl)]
    if problems := [*refusals(composed.run, plan), *unknown]:
        reasons = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(f"{composed.name} cannot run:\n{reasons}")
    output = arguments.output or Path("runs") / Path(composed.name).stem
    if arguments.for_script is not None:
        hardware = composed.run.hardware
        cpus = wanted_cpus(composed.run.mindspeed_rl["rl_config"], hardware.nodes)
        lines = [f"platform {hardware.platform}", f"npus_per_node {hardware.npus_per_node}"]
        lines += [f"cpus_per_npu {cpus.per_npu}", f"other_cpus {cpus.others}"]
        for stage, has_checkpoint in stages_to_do(composed.run, plan, output, resume=arguments.resume):
            lines.append(f"stage {stage} {'resume' if has_checkpoint else 'fresh'}")
            mindspeed_values(composed.run, plan, StageFiles(output, stage), resume=has_checkpoint)
        write_atomically(arguments.for_script, "\n".join(lines) + "\n")
        return 0
    files = StageFiles(output, arguments.stage)
    values = mindspeed_values(composed.run, plan, files, resume=arguments.resume)
    if arguments.write is not None:
        if not arguments.write.parent.is_dir():
            raise ConfigError(f"--write {arguments.write}: {arguments.write.parent} is no directory; make it first")
        if arguments.write.is_dir():
            raise ConfigError(f"--write {arguments.write}: is a directory; name a file in it")
        write_run_file(arguments.write, values, composed.name)
        print_text(f"written: {arguments.write}")
    return 0


def _refuse_options_for_clusters(arguments: argparse.Namespace) -> None:
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("write", "output", "stage", "resume", "for_script")
        if getattr(arguments, name)
    ]
    if given:
        raise UsageError(f"{given[0]}: is for runs on a cluster; {arguments.run_name} runs on this machine")


def _print_plan(plan: Plan, run: RunConfig, name: str) -> None:
    facts, console = plan.facts, PlainConsole()
    table = Table("", "", title=f"plan of {name}", show_header=False, title_justify="left")
    for label, value in [*_layout_rows(plan), _checkpoints(plan, run)]:
        table.add_row(label, value)
    console.print_table(table)
    if plan.memory is None:
        return
    memory = Table("estimated memory of one NPU", "GiB", "formula", title_justify="left")
    for phase, parts, total in (
        ("training", plan.memory.training, plan.memory.training_gib),
        ("rollout", plan.memory.rollout, plan.memory.rollout_gib),
    ):
        for part in parts:
            memory.add_row(*_memory_row(phase, part))
        memory.add_row(f"{phase}, together", f"{total:.1f}", f"of {plan.memory.limit_gib:.1f}", style="bold")
        memory.add_section()
    console.print_table(memory)
    print_text(
        f"the KV cache of a rollout engine holds {plan.memory.longest_responses:.0f} sequences of "
        f"{facts.max_model_len} tokens; estimates, not measured on an NPU (docs/ascend.md)"
    )


def _layout_rows(plan: Plan) -> list[tuple[str, str]]:
    facts = plan.facts
    whole = facts.npus % facts.model_parallel == 0 and facts.npus % facts.rollout_tp == 0
    rows = [
        ("NPUs", f"{facts.npus} on {facts.nodes} node{'s' * (facts.nodes > 1)}, {facts.memory_gib:g} GiB each"),
        ("model", f"{model_parameters(facts) / 1e9:.2f} billion parameters, {facts.layers} layers"),
        ("training", f"TP {facts.tp} x PP {facts.pp} x CP {facts.cp} x DP {facts.dp if whole else '?'}"),
        ("rollout", f"{facts.rollout_dp if whole else '?'} engines of TP {facts.rollout_tp}"),
        ("slots of an engine", _slots(plan) if whole else "?"),
        ("an iteration", f"{facts.prompts} prompts x {facts.group} responses = {facts.responses}"),
        (
            "updates an iteration",
            f"{facts.prompts // max(1, facts.mini_batch) * facts.epochs} of {facts.mini_batch} prompts",
        ),
        ("microbatches", _microbatches(plan)),
        (
            "tokens",
            f"{facts.max_prompt} + {facts.max_new} at most; {facts.responses * facts.max_new:,} new ones an iteration",
        ),
    ]
    iterations = "unknown: data.train is not here and data.rows is null"
    if plan.iterations is not None:
        counted = f" ({plan.rows:,} questions by {plan.rows_from})" if plan.rows else ""
        iterations = f"{plan.iterations:,} a stage{counted}"
    return [*rows, ("iterations", iterations)]


def _slots(plan: Plan) -> str:
    facts = plan.facts
    waves = -(-facts.engine_responses // max(1, facts.max_sequences))
    if waves <= 1:
        return f"{facts.max_sequences}, for {facts.engine_responses} responses at once"
    return (
        f"{facts.max_sequences}, for {facts.engine_responses} responses: {waves} waves, and all decoding stops for "
        "every prompt of a later one; raise mindspeed_rl.generate_config.max_num_seqs"
    )


def _checkpoints(plan: Plan, run: RunConfig) -> tuple[str, str]:
    size, keep = checkpoint_bytes(plan.facts) / 1e9, run.checkpoint.keep
    text = f"{size:.1f} GB every {run.checkpoint.interval} iterations; the newest {keep} of a stage are kept"
    return "checkpoints", f"{text}, so up to {(keep + 1) * size:.0f} GB while one is written"


def _microbatches(plan: Plan) -> str:
    facts = plan.facts
    return f"up to {facts.update_tokens} tokens" if facts.dynamic_batch else f"{facts.micro_batch} responses"


def _memory_row(phase: str, part: Part) -> tuple[str, str, str]:
    return f"{phase}: {part.name}", f"{part.gib:.1f}", part.formula
