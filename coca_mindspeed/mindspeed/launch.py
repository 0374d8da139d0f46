"""Start a run on MindSpeed-RL: one composition, one plan, and every stage with the values that were checked.

Each node runs the same command; that with ``NODE_RANK`` 0 trains, the others work for it.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from coca_mindspeed.config.compose import ComposedConfig
from coca_mindspeed.errors import UsageError
from coca_mindspeed.mindspeed.checkpoints import newest_iteration
from coca_mindspeed.mindspeed.cluster_run import ClusterRun
from coca_mindspeed.mindspeed.doctor import examine_machine
from coca_mindspeed.mindspeed.native import compose_cluster_run, is_native
from coca_mindspeed.mindspeed.plan import ClusterPlan, show_plan_of
from coca_mindspeed.mindspeed.start import driver
from coca_mindspeed.mindspeed.start.run_file import (
    StageFiles,
    mindspeed_values,
    run_file_text,
    stage_marker,
    stages_to_do,
)
from coca_mindspeed.mindspeed.start.verifiers import check_gold_answers
from coca_mindspeed.upstream.claim import claim_output
from coca_mindspeed.upstream.launch import (
    Launch,
    ask_the_doctor,
    ending_by_signals,
    join_cluster,
    open_log,
    python,
    ray_cluster,
    read_layer,
    require_free_port,
    require_nodes,
    require_plain_weight_format,
    run_child,
    say,
    show,
    stopping_by_signals,
)
from coca_mindspeed.upstream.machine import Machine
from coca_mindspeed.upstream.nodes import Nodes, read_nodes
from coca_mindspeed.upstream.trial import check_trial, show_passed
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.directories import MARKER


@ending_by_signals()
def launch(call: Launch) -> int:
    """Train as ``call`` says, and return the exit code.

    Raises UsageError for what was typed or exported wrong, CocaError for a run that cannot work.
    """
    native = is_native(call.run)
    if call.smoke:
        return _smoke(call, native=native)
    nodes = read_nodes(os.environ)
    require_plain_weight_format()
    typed, key = call.overrides, "coca.nodes" if native else "hardware.nodes"
    if call.trial:
        trial = read_layer("launch/trial_native" if native else "launch/trial")
        typed = (*trial.defaults, *typed, *trial.fixed)
    overrides = call.on_nodes(key, nodes, typed)
    composed = compose_cluster_run(call.run, overrides)
    return _start(composed, replace(call, output=call.directory()), nodes, key, overrides)


def _start(composed: ComposedConfig, call: Launch, nodes: Nodes, key: str, overrides: Sequence[str]) -> int:
    plan = show_plan_of(composed)
    require_nodes(key, composed.run.hardware.nodes, nodes)
    # The other nodes may share the directory.
    first = nodes.rank == 0
    claims = first and not call.dry_run
    with claim_output(call.directory(), wait=call.resume) if claims else nullcontext():
        stages = _stages(plan.start, call) if first else []
        if first and not stages:
            say(f"every iteration of {call.directory()} is done")
            return 0
        ask_the_doctor(
            call,
            overrides,
            lambda: examine_machine(Machine(), plan.start.run, output=call.directory(), plan=plan),
            _instead_of_npus(plan, call),
        )
        check_gold_answers(plan.start, os.environ, starts=claims)
        if not call.dry_run:
            open_log(call.directory(), nodes.rank)
        npus, on_host = plan.start.run.hardware.npus_per_node, plan.start.run.hardware.platform == "host"
        of_ray = [f'--resources={{"NPU": {npus}}}', *([f"--num-cpus={driver.HOST_CPUS}"] if on_host else [])]
        return _train(plan.start, stages, call, nodes, of_ray) if first else join_cluster(nodes, of_ray, call)


def _stages(start: ClusterRun, call: Launch) -> list[tuple[StageFiles, dict[str, Any]]]:
    """Files and values of the stages that are still to do."""
    stages = []
    for stage, has_checkpoint in stages_to_do(start, call.directory(), resume=call.resume):
        files = StageFiles(call.directory(), stage)
        stages.append((files, mindspeed_values(start, start.iterations, files, resume=has_checkpoint)))
    return stages


def _instead_of_npus(plan: ClusterPlan, call: Launch) -> str:
    smoke = f"try its rewards and update on the local engine, with a tiny model:  {call.command} --smoke"
    return f"Without NPUs, {'try the method:  coca-mindspeed demo' if plan.start.native else smoke}"


def _train(
    start: ClusterRun,
    stages: list[tuple[StageFiles, dict[str, Any]]],
    call: Launch,
    nodes: Nodes,
    of_ray: Sequence[str],
) -> int:
    """Train the stages in a Ray cluster, whose nodes are started with the options ``of_ray``."""
    training, npus = None, nodes.total * start.run.hardware.npus_per_node
    if not call.dry_run:  # what is wrong is found before Ray starts
        require_free_port(nodes)
        training = driver.prepare(stages[0][1], os.environ, start.files, name_of=start.key)
    with ray_cluster(nodes, of_ray, npus, "NPU", dry_run=call.dry_run):
        for number, (files, values) in enumerate(stages):
            file = files.results / MARKER
            show("write", str(file))
            if training is None:
                print_text(run_file_text(values, call.run))
                show("train", str(file))
                continue
            resumed = newest_iteration(files.checkpoints) is not None
            stage_marker(values, start.prompt).write(files.results, resumed=resumed)
            if number:  # its weights are there since the stage before
                training = driver.prepare(values, os.environ, start.files, before=training)
            show("train", str(file))
            with stopping_by_signals(call):
                driver.train(training)
            if call.trial:
                check_trial(files.results, start.run.rollout.prompts)
    if not call.dry_run:
        say(f"every iteration of {call.directory()} is done")
        if call.trial:
            show_passed(call.run, stages[0][0].results / "metrics.jsonl")
    return 0


def _smoke(call: Launch, *, native: bool) -> int:
    """Two steps of the tiny model on the local engine, in a process of their own."""
    if native:
        raise UsageError(
            "--smoke runs the local engine, which has none of MindSpeed-RL's keys: try the method by "
            f"`coca-mindspeed demo`, and this file by `{call.command} --trial`"
        )
    layer = read_layer("launch/smoke")
    call.refuse_overrides(layer.fixed)
    for override in call.overrides:
        key, _, value = override.lstrip("+").partition("=")
        if value == "host" and (key == "hardware" or key.endswith(".platform")):
            raise UsageError(
                "--smoke runs the local engine: to run MindSpeed-RL without an NPU, leave it out and set "
                f"trainer.steps=2 with {override} (docs/port.md, Without an NPU)"
            )
    command = [python(), "-m", "coca_mindspeed.cli", "train", call.run, *layer.fixed, *layer.defaults]
    command += [*call.overrides, "--output", str(call.directory()), "--quiet"]  # what is typed wins over the sizes
    code = run_child(command, dry_run=call.dry_run)
    if code == 0 and not call.dry_run:
        print_text(
            "smoke passed on the local engine: configuration, rewards, update, export; MindSpeed-RL, the layout and "
            "your data were not run"
        )
    return code
