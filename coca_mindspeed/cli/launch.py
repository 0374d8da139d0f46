"""``coca-mindspeed launch``: train on a cluster, on MindSpeed-RL or verl; the scripts of ``launch/`` call it."""

import argparse
from pathlib import Path

from coca_mindspeed.cli.config import add_run_arguments
from coca_mindspeed.cli.options import place
from coca_mindspeed.config.compose import find_verl_run, ready_made_runs
from coca_mindspeed.errors import UsageError
from coca_mindspeed.upstream.launch import Launch, absolute_run, go_to_the_source_tree, script

_EPILOG = """\
KEY=VALUE, e.g. method=coca_stable (the form whose confidence keeps learning), or method=joint data.epochs=0.5
rollout.prompts=64; of a smoke run everything but its model and its data. On verl, its keys: coca.method=coca_stable,
coca.method.name=joint trainer.n_gpus_per_node=16.

Several nodes: the same command on each, with NNODES, NODE_RANK (0 is the head) and MASTER_ADDR set.

exit codes: that of the training; 2 what was typed wrong, 1 what cannot run; 130 stopped after a step with a checkpoint,
by Ctrl-C, SIGTERM or the file OUTPUT/stop; 128 and the number of a signal that ended it at once (the second, SIGHUP)

environment: NNODES, NODE_RANK, MASTER_ADDR, RAY_PORT, CLUSTER_TIMEOUT, PYTHON; RAY_ADDRESS: a cluster to join;
MINDSPEED_RL_HOME, MEGATRON_HOME, MINDSPEED_HOME, MINDSPEED_LLM_HOME; SKIP_DOCTOR=1 starts without asking
coca-mindspeed doctor
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and every step, start nothing")
    start = parser.add_mutually_exclusive_group()
    smoke = (
        "two steps of the tiny model on this machine, to try configuration, rewards, update and export: on the local "
        "engine for MindSpeed-RL, through verl for a run on verl; neither the layout nor your data are run"
    )
    start.add_argument("--smoke", action="store_true", help=smoke)
    trial = "two steps of this run itself: your model, data, layout and batches, and a checkpoint; no validation"
    start.add_argument("--trial", action="store_true", help=trial)
    start.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in DIR")
    output = "where the run goes (default: runs/RUN; --smoke, --trial: runs/smoke/RUN-TIME, runs/trial/RUN-TIME)"
    parser.add_argument("--output", type=place, metavar="DIR", help=output)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    options = "[--dry-run] [--smoke | --trial | --resume] [--output DIR] [KEY=VALUE ...]"
    parser.usage = f"{_command()} {options}"


def run(arguments: argparse.Namespace) -> int:
    name, output = absolute_run(arguments.run_name), arguments.output
    for override in arguments.overrides:
        if "=" not in override and not override.startswith("~"):
            raise UsageError(f"expected KEY=VALUE, found {override} (--help explains)")
    call = Launch(
        run=name,
        overrides=tuple(arguments.overrides),
        output=None if output is None else output.absolute(),
        dry_run=arguments.dry_run,
        smoke=arguments.smoke,
        trial=arguments.trial,
        resume=arguments.resume,
        command=_command(arguments.run_name),
    )
    go_to_the_source_tree()
    if (file := find_verl_run(name)) is not None:
        from coca_mindspeed.verl.launch import launch as launch_on_verl

        return launch_on_verl(call, file)
    from coca_mindspeed.mindspeed.launch import launch

    return launch(call)


def _command(name: str = "RUN") -> str:
    """Return the command that launches a run; a script may name it."""
    path = script()
    if path is None:
        return f"coca-mindspeed launch {name}"
    return f"bash {path}" if Path(path).stem in ready_made_runs() else f"bash {path} {name}"
