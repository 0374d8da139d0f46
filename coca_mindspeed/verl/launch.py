"""Start a run on verl: ``verl.trainer.main_ppo`` as a child, in a Ray cluster of several nodes if there are some."""

import importlib.util
import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

from coca_mindspeed.config.compose import verl_directories
from coca_mindspeed.config.plan import show_plan
from coca_mindspeed.errors import Problem, UsageError, raise_problems
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
    require_plain_weight_format,
    run_child,
    script,
    show,
    stopping_by_signals,
)
from coca_mindspeed.upstream.machine import Machine
from coca_mindspeed.upstream.nodes import read_nodes
from coca_mindspeed.upstream.trial import check_trial, show_passed
from coca_mindspeed.utils.directories import nearby_runs
from coca_mindspeed.verl.doctor import examine_verl_machine
from coca_mindspeed.verl.plan import compose_verl_run, plan_run
from coca_mindspeed.verl.requirements import ROLLOUT
from coca_mindspeed.verl.upstream_keys import SET_BY_LAUNCH, directory_of_verl

_MODEL = "actor_rollout_ref.model"
_NEWEST = Path("checkpoints") / "latest_checkpointed_iteration.txt"
_SMOKE_SETS = (f"{_MODEL}.path", f"{ROLLOUT}.name", "data.train_files", "data.val_files")


@ending_by_signals()
def launch(call: Launch, file: Path) -> int:
    """Train the run of a YAML file as ``call`` says, and return the exit code.

    Raises UsageError for what was typed or exported wrong, CocaError for a run that cannot work.
    """
    call = replace(call, output=call.directory().absolute())
    output = call.directory()
    if call.smoke:
        return _smoke(call, file, output)
    nodes = read_nodes(os.environ)
    require_plain_weight_format()
    trial = read_layer("verl/launch/trial").defaults if call.trial else ()
    call.refuse_overrides(SET_BY_LAUNCH)
    overrides = call.on_nodes("trainer.nnodes", nodes, (*trial, *call.overrides))
    where = _places(output)
    composed = compose_verl_run(file, overrides)
    show_plan(plan_run(composed))
    with ExitStack() as cluster:
        if nodes.rank == 0:  # other nodes need not see its directory
            if not call.dry_run:
                cluster.enter_context(claim_output(output, wait=call.resume))
            _check_output(output, resume=call.resume)
        ask_the_doctor(
            call,
            overrides,
            lambda: examine_verl_machine(Machine(), output=call.directory(), composed=composed),
            f"Without devices, try it by  {call.command} --smoke",
        )
        if not call.dry_run:
            open_log(output, nodes.rank)
        if nodes.rank:
            return join_cluster(nodes, [], call)  # Ray finds the GPUs or NPUs by itself
        if nodes.total > 1:
            if not call.dry_run:
                require_free_port(nodes)
            cluster.enter_context(ray_cluster(nodes, [], nodes.total, dry_run=call.dry_run))
        else:
            # Without an address, Ray would join another one that runs on this machine.
            os.environ["RAY_ADDRESS"] = os.environ.get("RAY_ADDRESS") or "local"
        # verl's own test for NPUs. Graphs that vLLM-Ascend has captured can keep old weights: docs/verl.md, On Ascend.
        on_npus = importlib.util.find_spec("torch_npu") is not None
        eager = [f"{ROLLOUT}.enforce_eager=true"] if on_npus else []
        with nullcontext() if call.dry_run else stopping_by_signals(call):
            code = _main_ppo(call, file, [*where, "trainer.resume_mode=auto", *eager, *overrides])
        if call.trial and code == 0 and not call.dry_run:
            check_trial(output, int(composed.run.value("data.train_batch_size")))
            show_passed(call.run, output / "metrics.jsonl")
        return code


def _check_output(output: Path, *, resume: bool) -> None:
    if (output / _NEWEST).is_file() and not resume:
        raise_problems(
            [Problem("run-exists", "--output", output, "holds checkpoints", "add --resume, or choose another")]
        )
    if resume and not (output / _NEWEST).is_file():
        fix = f"correct it{nearby_runs(output, lambda other: (other / _NEWEST).is_file())}"
        raise_problems([Problem("no-run", "--output", output, "holds no checkpoint to resume from", fix)])


def _places(output: Path) -> list[str]:
    """Overrides for verl's own places below one directory; Ray brings variables to a cluster that is there already."""
    variables = "++ray_kwargs.ray_init.runtime_env.env_vars"
    return [
        _quoted("trainer.default_local_dir", output / "checkpoints"),
        _quoted("trainer.rollout_data_dir", output / "samples"),
        _quoted("trainer.validation_data_dir", output / "validation"),
        _quoted(f"{variables}.VERL_FILE_LOGGER_PATH", output / "metrics.jsonl"),
        _quoted(f"{variables}.TENSORBOARD_DIR", output / "tensorboard"),
    ]


def _quoted(key: str, path: Path) -> str:
    """An override with Hydra's own quotes, so that a path may hold anything but these."""
    if {"'", "\\"} & {*str(path)}:
        raise UsageError(f"{key}: {path} has a quote or a backslash, which Hydra's overrides cannot hold")
    return f"{key}='{path}'"


def _main_ppo(call: Launch, file: Path, overrides: Sequence[str]) -> int:
    command = [python(), "-m", "verl.trainer.main_ppo", "--config-dir", str(file.absolute().parent)]
    ours = ",".join(f"'file://{directory}'" for directory in verl_directories())  # for a file elsewhere
    command += ["--config-name", file.stem, f"hydra.searchpath=[{ours}]"]
    # Hydra would make a directory outputs/ where the command is typed.
    command.append(_quoted("hydra.run.dir", call.directory() / "hydra"))
    return run_child([*command, *overrides], dry_run=call.dry_run, start_new_session=True)


def _smoke(call: Launch, file: Path, output: Path) -> int:
    """Two steps of the same method on the tiny model, through the real verl on this machine's CPU."""
    call.refuse_overrides(_SMOKE_SETS)
    if script() is None:
        raise UsageError(f"--smoke needs the source tree: bash launch/verl.sh {call.run} --smoke, in a clone")
    if not call.dry_run:
        directory_of_verl()
    tiny = output / "tiny"
    files = [
        _quoted(f"{_MODEL}.path", tiny / "model"),
        _quoted("data.train_files", tiny / "train.jsonl"),
        _quoted("data.val_files", tiny / "val.jsonl"),
    ]
    where = _places(output)
    show("mkdir", "-p", str(output))
    if not call.dry_run:
        output.mkdir(parents=True, exist_ok=True)
    make = [python(), "-m", "tests.support.verl_smoke", str(tiny), str(file), *where, *call.overrides]
    if code := run_child(make, dry_run=call.dry_run):
        return code
    layer = read_layer("verl/launch/smoke")
    os.environ |= layer.environment
    # The run's own file, scaled down; what is typed comes last, so that it wins.
    return _main_ppo(call, file, [*files, *layer.defaults, *where, *call.overrides])
