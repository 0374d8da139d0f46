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
from coca_mindspeed.evaluation.metrics import show, show_range
from coca_mindspeed.evaluation.predictions import Prediction, read_predictions, write_predictions
from coca_mindspeed.evaluation.scoreboard import Run, Scoreboard
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.respond import respond
from coca_mindspeed.scoring.responses import ResponseScorer, predictions
from coca_mindspeed.utils.console import markdown_table, print_text
from coca_mindspeed.utils.files import write_atomically
from coca_mindspeed.utils.progress import StepProgress
from experiments.reproduce.discrimination import bootstrap_weights, statistics

HEADER = ("kinds", "n", "right", "untrained", "difference", "mean confidence", "ECE", "AUROC", "within kinds")
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
_REPLICATES = 2000


def untrained_answers(model: Path, records: Path, *, max_new_tokens: int = 48) -> list[Prediction]:
    """The answers of a model that is asked for no confidence, at temperature 1 and seed 0."""
    asked = list(read_records(records))
    policy = load_policy(model, ModelConfig(compute_dtype="float32"), torch.device("cpu"))
    sampling = RolloutConfig(max_new_tokens=max_new_tokens, batch_responses=96)
    with StepProgress(-(-len(asked) // 96) * max_new_tokens, True, title="tokens") as bar:
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
        figures = {name: _with_interval(board, "adapted", name) for name in ("accuracy", "ece", "auroc")}
        change = board.difference(runs[1], runs[0], "all").intervals["accuracy"]
        bounds = show_range("accuracy", change.low, change.high, signed=True)
        within = statistics(own, bootstrap_weights(own, _REPLICATES))["within"]
        low, high = np.nanquantile(within[1:], [0.025, 0.975])
        yield [
            category or "all",
            board.count("adapted", column),
            figures["accuracy"],
            _with_interval(board, "untrained", "accuracy"),
            f"{show('accuracy', change.estimate, signed=True)} ({bounds})",
            f"{np.mean([p.confidence for p in own if p.confidence is not None]):.2f}",
            figures["ece"],
            figures["auroc"],
            _shown(show("auroc", within[0]), show_range("auroc", low, high)),
        ]


def _pooled(answers: Iterable[Prediction]) -> list[Prediction]:
    """The answers as one data set."""
    return [replace(p, dataset="all", id=f"{p.dataset} {p.id}", category=None, method=None) for p in answers]


def _with_interval(board: Scoreboard, run: str, metric: str) -> str:
    interval = board.interval(run, board.columns[0], metric)
    return _shown(show(metric, interval.estimate), show_range(metric, interval.low, interval.high))


def _shown(figure: str, bounds: str) -> str:
    """A figure with its bounds, which one that is undefined has not."""
    return f"{figure} ({bounds})" if bounds else figure


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
    page = given.directory / "README.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN) if page.exists() else ("", "", "")
    write_atomically(page, f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2] if begin else ''}")
    print_text(text)


if __name__ == "__main__":
    main()
