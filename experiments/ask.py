"""Figures of the adapter in ``examples/ask``: ``python -m experiments.ask DIR``.

DIR holds ``predictions.jsonl``, which ``coca-mindspeed evaluate models/ask --data RECORDS --output DIR`` writes, and
``untrained.jsonl``: answers of the untrained model to the same questions, with their instruction and no system prompt,
right if they give the gold answer in a sentence (the grader's ``match: sentence``).  ``--untrained MODEL --data
RECORDS`` asks for these first.  The table goes to DIR/README.md, between its marks.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.config.schema import ModelConfig, RolloutConfig
from coca_mindspeed.data.records import read_records
from coca_mindspeed.evaluation.intervals import Interval
from coca_mindspeed.evaluation.predictions import Prediction, read_predictions, write_predictions
from coca_mindspeed.evaluation.scoreboard import Run, Scoreboard
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.respond import respond
from coca_mindspeed.scoring.responses import ResponseScorer, predictions
from coca_mindspeed.utils.console import markdown_table, print_text
from coca_mindspeed.utils.progress import StepProgress
from experiments.pages import renew, with_interval
from experiments.reproduce.discrimination import bootstrap_weights, statistics

HEADER = ("kinds", "n", "right", "untrained", "difference", "mean confidence", "ECE", "AUROC", "within kinds")
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
_REPLICATES = 2000
_AT_ONCE, _TOKENS = 96, 48  # responses of the untrained model, and the longest of them


def untrained_answers(model: Path, records: Path) -> list[Prediction]:
    """The answers of a model that is asked for no confidence, at temperature 1 and seed 0."""
    asked = list(read_records(records))
    policy = load_policy(model, ModelConfig(compute_dtype="float32"), torch.device("cpu"))
    sampling = RolloutConfig(max_new_tokens=_TOKENS, batch_responses=_AT_ONCE)
    with StepProgress(-(-len(asked) // _AT_ONCE) * _TOKENS, True, title="tokens") as bar:
        rollout = respond(
            policy, asked, None, sampling, torch.Generator().manual_seed(0), 1, progress=lambda tokens: bar.show(tokens)
        )
    with closing(build_grader("auto", {})) as grader:
        return predictions(ResponseScorer(method_settings("rlvr"), policy.text, grader)(rollout, asked))


def table(adapted: Sequence[Prediction], untrained: Sequence[Prediction]) -> str:
    """Markdown: each figure with its 95% interval, of all questions and of each category."""
    return markdown_table(HEADER, _rows(adapted, untrained), numbers=range(1, len(HEADER)))


def _rows(adapted: Sequence[Prediction], untrained: Sequence[Prediction]) -> Iterator[list[object]]:
    for category in (None, *dict.fromkeys(p.category for p in adapted)):
        own = [p for p in adapted if category in (None, p.category)]
        keys = {p.key for p in own}
        runs = [Run("adapted", _pooled(own)), Run("untrained", _pooled(p for p in untrained if p.key in keys))]
        board = Scoreboard(runs)
        (column,) = board.columns
        right, ece, auroc = (
            with_interval(metric, board.interval("adapted", column, metric)) for metric in ("accuracy", "ece", "auroc")
        )
        change = board.difference(runs[1], runs[0], "all").intervals["accuracy"]
        within = statistics(own, bootstrap_weights(own, _REPLICATES))["within"]
        low, high = np.nanquantile(within[1:], [0.025, 0.975])
        yield [
            category or "all",
            board.count("adapted", column),
            right,
            with_interval("accuracy", board.interval("untrained", column, "accuracy")),
            with_interval("accuracy", change, signed=True),
            f"{np.mean([p.confidence for p in own if p.confidence is not None]):.2f}",
            ece,
            auroc,
            with_interval("auroc", Interval(float(within[0]), float(low), float(high))),
        ]


def _pooled(answers: Iterable[Prediction]) -> list[Prediction]:
    """The answers as one data set."""
    return [replace(p, dataset="all", id=f"{p.dataset} {p.id}", category=None, method=None) for p in answers]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.ask", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--untrained", type=Path, metavar="MODEL", help="ask this model first; needs --data")
    parser.add_argument("--data", type=Path, metavar="RECORDS")
    given = parser.parse_args()
    if (given.untrained is None) != (given.data is None):
        parser.error("--untrained and --data: give both, or none")
    files = [given.directory / f"{name}.jsonl" for name in ("predictions", "untrained")]
    if given.untrained is not None:
        write_predictions(files[1], untrained_answers(given.untrained, given.data))
    text = table(*map(read_predictions, files))
    renew(given.directory / "README.md", BEGIN, text, END)
    print_text(text)


if __name__ == "__main__":
    main()
