"""``coca-mindspeed train``: the local engine on any causal LM directory."""

import argparse
import shlex
from pathlib import Path

from coca_mindspeed.cli.config import add_run_arguments, compose_typed
from coca_mindspeed.cli.options import place
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.evaluation.metrics import METRIC_SPECS
from coca_mindspeed.local.run_directory import BEST_MODEL
from coca_mindspeed.local.start import open_run
from coca_mindspeed.utils.json_files import read_json_lines, read_object


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--output", type=place, required=True, metavar="DIR", help="directory of the run")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in DIR")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def run(arguments: argparse.Namespace) -> int:
    composed = compose_typed(arguments.run_name, arguments.overrides)
    output: Path = arguments.output
    with open_run(composed, output, resume=arguments.resume, show_progress=not arguments.quiet) as run:
        policy = run.start()
        run.preflight(policy)
        before = run.evaluate_before(policy)
        run.train(policy, before)
        after = run.evaluate_after(policy)
    # print instead of rich: a wrapped path cannot be copied.
    if after:
        from coca_mindspeed.local.report import write_run_report  # it imports torch

        write_run_report(run, before, after, _introduction(run.config))
    if (metric := composed.run.checkpoint.best) is not None:
        print(f"best model: {_best(output, metric)}")
    print(f"model: {output / 'model'} (a Hugging Face directory)\nmetrics: {output / 'metrics.jsonl'}")
    print(f"next: {shlex.join(['coca-mindspeed', 'report', str(output), '--output', str(output / 'report')])}")
    print(f"      {shlex.join(['coca-router', 'serve', '--model', str(output / 'model')])}")
    return 0


def _best(output: Path, metric: str) -> str:
    """Directory, value and step of the best model, and the value before the training, which does not take part."""
    best = read_object(output / BEST_MODEL / "best.json")
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


def _introduction(config: RunConfig) -> str:
    model = "The built-in tiny model" if config.model.path is None else f"`{config.model.path}`"
    when = "the training" if config.warm_up.records is None else "the RL training, with the warm-up already done"
    samples = config.evaluation.samples
    return (
        f"{model} was trained for {config.trainer.steps} steps per stage. Each held-out question is answered "
        f'{"once" if samples == 1 else f"{samples} times"} at temperature 1.\n"before" is before {when}.'
    )
