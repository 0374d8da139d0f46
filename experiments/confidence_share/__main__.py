"""``python -m experiments.confidence_share``: reserve questions for the confidence, with the controls of the study."""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from coca_mindspeed.cli.options import at_least, place
from coca_mindspeed.utils.console import print_markdown, print_text
from coca_mindspeed.utils.files import write_atomically
from experiments.confidence_share.arms import STUDIES, run_arm
from experiments.confidence_share.report import report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train every arm of a study over several seeds (resumable), and compare the confidences on new questions: "
        "questions reserved for the confidence, both segments on the other questions alone with a map fitted on the "
        "reserved ones, and others (experiments/README.md)."
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--output", type=place, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=at_least(1), default=5, metavar="N", help="seeds 0 to N - 1 (default: 5)")
    parser.add_argument("--processes", type=at_least(1), default=1, metavar="N", help="arms at a time (default: 1)")
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="some of the arms (default: all)")
    parser.add_argument("--report-only", action="store_true", help="train nothing")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as trainer.device=cuda")


def run(arguments: argparse.Namespace) -> int:
    study, output = arguments.study, arguments.output
    arms = arguments.arms or STUDIES[study].arms
    jobs = [(study, arm, seed, output, arguments.overrides) for seed in range(arguments.seeds) for arm in arms]
    if not arguments.report_only:
        with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
            running = {pool.submit(run_arm, *job): job for job in jobs}
            for done in as_completed(running):
                _, arm, seed, *_ = running[done]
                print_text(f"seed {seed}, {arm}: {done.result():.0f} s")
    text = report(output / study)
    write_atomically(output / study / "README.md", text)
    print_markdown(text)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from experiments.__main__ import main

    sys.exit(main(["confidence_share", *sys.argv[1:]]))
