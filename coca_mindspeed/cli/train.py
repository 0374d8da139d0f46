"""``coca-mindspeed train``: the local engine on any causal LM directory."""

import argparse
import shlex
from pathlib import Path

from coca_mindspeed.cli.config import add_run_arguments, compose_typed
from coca_mindspeed.cli.options import place
from coca_mindspeed.errors import UsageError
from coca_mindspeed.evaluation.metrics import METRIC_SPECS
from coca_mindspeed.local.run_directory import BEST_MODEL
from coca_mindspeed.local.start import open_run
from coca_mindspeed.utils.json_files import read_json_lines, read_object


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, required=False)
    parser.add_argument("--output", type=place, required=True, metavar="DIR", help="directory of the run")
    parser.add_argument("--resume", action="store_true", help="continue the run in DIR; RUN defaults to its own keys")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def run(arguments: argparse.Namespace) -> int:
    output: Path = arguments.output
    name, overrides = _run_and_overrides(arguments, output / "config.yaml")
    composed = compose_typed(name, overrides)
    with open_run(composed, output, resume=arguments.resume, show_progress=not arguments.quiet) as run:
        policy = run.start()
        run.preflight(policy)
        before = run.evaluate_before(policy)
        run.train(policy, before)
        after = run.evaluate_after(policy)
    # print instead of rich: a wrapped path cannot be copied.
    if after:
        from coca_mindspeed.local.report import finish_run  # it imports torch

        finish_run(run, before, after)
    if (metric := composed.run.checkpoint.best) is not None:
        print(f"best model: {_best(output, metric)}")
    print(f"model: {output / 'model'} (a Hugging Face directory)\nmetrics: {output / 'metrics.jsonl'}")
    if not after:
        print(f"training curves: {shlex.join(['coca-mindspeed', 'report', str(output)])}")
    print(f"next: {shlex.join(['coca-router', 'serve', '--model', str(output / 'model')])}")
    return 0


def _run_and_overrides(arguments: argparse.Namespace, stored: Path) -> tuple[str, list[str]]:
    """The run and its overrides; with ``--resume`` and without a RUN, the keys that the run was started with.

    Raises UsageError without a RUN to train, or to resume.
    """
    name, overrides = arguments.run_name, list(arguments.overrides)
    if arguments.resume and name is not None and ("=" in name or name.startswith("~")):
        name, overrides = None, [name, *overrides]
    if name is not None:
        return name, overrides
    if not arguments.resume:
        raise UsageError("the following arguments are required: RUN (coca-mindspeed config list)")
    if not stored.is_file():
        raise UsageError(f"--resume: {stored} is not there; name the RUN, or correct --output")
    return str(stored), overrides


def _best(output: Path, metric: str) -> str:
    """Directory, value and step of the best model, and the value before the training, which does not take part."""
    best = read_object(output / BEST_MODEL / "best.json", value=int | float, step=int)
    if not best:
        return f"none saved: {metric} was never computed or is undefined"
    text = (
        f"{output / BEST_MODEL} ({metric}={best['value']:.4g} at step {best['step']}, of other samples than the table"
    )
    rows = (row for _, row in read_json_lines(output / "metrics.jsonl") if row["step"] == 0)
    if (before := next(rows, {}).get(metric)) is None:
        return f"{text})"
    better = METRIC_SPECS[metric.removeprefix("eval/")].better
    worse = better * before > better * best["value"]
    return f"{text}; before the training {before:.4g}{', which no step reached' if worse else ''})"
