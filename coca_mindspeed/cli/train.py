"""``coca-mindspeed train``: the local engine on any causal LM directory."""

import argparse
import time
from contextlib import closing
from pathlib import Path

from coca_mindspeed.cli.config import add_run_arguments
from coca_mindspeed.cli.options import place
from coca_mindspeed.config.checks import CHECKS, find_problems, missing_data, missing_model, refuse
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.evaluation.reports.tables import print_metrics, summary_metrics
from coca_mindspeed.utils.files import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--output", type=place, required=True, metavar="DIR", help="where the run goes")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in DIR")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def run(arguments: argparse.Namespace) -> int:
    composed = compose_run(arguments.run_name, arguments.overrides)
    output: Path = arguments.output
    started = time.perf_counter()
    model = () if arguments.resume else (missing_model,)
    refuse(find_problems(composed.run, CHECKS, (missing_data, *model)))
    from coca_mindspeed.local.setup import open_session  # torch and transformers take seconds to import

    session = open_session(composed, output, resume=arguments.resume, show_progress=not arguments.quiet)
    with closing(session):
        trainer = session.trainer
        trainer.run(session.resume_from)
        if after := trainer.final_evaluation():
            summary = {"seed": composed.run.seed, "method": composed.run.method.name, "after": summary_metrics(after)}
            write_json(output / "summary.json", {**summary, "seconds": {"total": time.perf_counter() - started}})
            print_metrics({"held-out questions": summary_metrics(after)})
    # Not through rich: a path that is broken over lines cannot be copied.
    print(f"model: {output / 'model'} (a Hugging Face directory)\nmetrics: {output / 'metrics.jsonl'}")
    return 0
