"""``coca-mindspeed train``: the local engine on any causal LM directory."""

import argparse
import time
from pathlib import Path

from coca_mindspeed.cli.config import add_run_arguments
from coca_mindspeed.cli.options import place
from coca_mindspeed.config.checks import CHECKS, find_problems, missing_data, missing_model, refuse
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.evaluation.reports.tables import print_metrics, summary_metrics
from coca_mindspeed.utils.files import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--output", type=place, required=True, metavar="DIR", help="directory of the run")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in DIR")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def run(arguments: argparse.Namespace) -> int:
    composed = compose_run(arguments.run_name, arguments.overrides)
    output: Path = arguments.output
    started = time.perf_counter()
    model = () if arguments.resume else (missing_model,)
    refuse(find_problems(composed.run, CHECKS, (missing_data, *model)))
    from coca_mindspeed.local.setup import LocalRun  # torch and transformers take seconds to import

    with LocalRun(composed, output, resume=arguments.resume, show_progress=not arguments.quiet) as run:
        run.execute(run.train, run.evaluate)
    if run.predictions:
        after = summary_metrics(run.predictions)
        summary = {"seed": composed.run.seed, "method": composed.run.method.name, "after": after}
        write_json(output / "summary.json", {**summary, "seconds": {"total": time.perf_counter() - started}})
        print_metrics({"held-out questions": after})
    # print instead of rich: a wrapped path cannot be copied.
    print(f"model: {output / 'model'} (a Hugging Face directory)\nmetrics: {output / 'metrics.jsonl'}")
    return 0
