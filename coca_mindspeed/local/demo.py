"""The demo: warm up the tiny model to be over-confident, train it, and report before and after."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.metrics.calibration import HEADLINE
from coca_mindspeed.evaluation.predictions import Prediction, read_predictions, write_predictions
from coca_mindspeed.evaluation.reports.plots import reliability_diagram, save_figure, training_curves
from coca_mindspeed.evaluation.reports.tables import column_title, print_metrics, shown_value, summary_metrics
from coca_mindspeed.local.interrupt import interruptible
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.setup import LocalRun
from coca_mindspeed.utils.files import read_json_lines, write_atomically, write_json
from coca_mindspeed.utils.markdown import markdown_table


def run_demo(
    seed: int,
    output: Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Run the demo and write its files to ``output``; print a table.

    Args:
        seed: of weights, data order, warm-up and samples.
        output: a new directory, or an earlier demo's with ``resume`` or ``overwrite``.
        overrides: of the run ``demo``.
        resume: continue a stopped demo.
        overwrite: remove the run that ``output`` holds first; other files stay.
        show_progress: draw progress bars.

    Returns:
        The content of ``summary.json``.

    Raises:
        ConfigError: ``output`` holds other files, or nothing would be evaluated.
    """
    composed = compose_run("demo", [f"seed={seed}", *overrides])
    if composed.run.evaluation.final_questions == 0:
        raise ConfigError("evaluation.final_questions=0: the demo shows answers before and after; at least 1 is needed")
    if composed.run.confidence_start.questions:
        raise ConfigError(
            f"confidence_start.questions={composed.run.confidence_start.questions}: the demo starts from a model whose "
            "confidences mean nothing; train demo ... has such a start"
        )
    seconds: dict[str, float] = {}
    clock = _Clock()
    before_path = output / "predictions_before.jsonl"

    def evaluate_before(policy: Policy) -> Policy:
        seconds["warm_up"] = clock.lap()
        if run.resume_from is None:
            trainer = run.trainer(policy)
            with interruptible("stopped before the training; the warmed-up model is saved; --resume continues"):
                write_predictions(before_path, trainer.evaluate(trainer.final_records, "before", method="instruct"))
        seconds["evaluate"] = clock.lap()
        return policy

    def train(policy: Policy) -> Policy:
        policy = run.train(policy)
        seconds["train"] = clock.lap()
        return policy

    with LocalRun(composed, output, resume=resume, overwrite=overwrite, show_progress=show_progress) as run:
        run.execute(evaluate_before, train, run.evaluate)
    seconds["evaluate"] += clock.lap()
    before, after = read_predictions(before_path), run.predictions
    seconds["total"] = clock.total()

    scores = {"before": summary_metrics(before), "after": summary_metrics(after)}
    summary = {"seed": seed, "method": composed.run.method.name, **scores, "seconds": seconds}
    write_json(output / "summary.json", summary)
    _write_report(output, summary, before, after)
    print_metrics(scores)
    print(f"{seconds['total']:.0f} s; pictures and samples: {output / 'report.md'}")
    return summary


def _write_report(
    output: Path, summary: Mapping[str, Any], before: Sequence[Prediction], after: Sequence[Prediction]
) -> None:
    metrics = [row for _, row in read_json_lines(output / "metrics.jsonl")]
    save_figure(reliability_diagram({"before": before, "after": after}), output / "reliability.png")
    save_figure(training_curves(metrics), output / "training_curves.png")
    rows = [[name, *(shown_value(key, summary[name][key]) for key in HEADLINE)] for name in ("before", "after")]
    results = markdown_table(["", *map(column_title, HEADLINE)], rows, numbers=range(1, len(HEADLINE) + 1))
    text = f"""# Confidence before answering, by `{summary["method"]}`, seed {summary["seed"]}

A tiny model was warmed up to answer arithmetic with a confidence that means nothing, then trained. Each held-out
question is answered once at temperature 1, before and after.

{results}
## Does the confidence mean what it says?

![Reliability before and after: accuracy against stated confidence, with the number of answers](reliability.png)

## How it got there

![Confidence reward, answer reward, ECE and response length over the training steps](training_curves.png)

## What it says now

{_sample_table(after)}
Numbers are written units first: 12 + 34 = 46 is `2100+4300` and `64`.
Training took {summary["seconds"]["train"]:.0f} s of {summary["seconds"]["total"]:.0f} s in all.
"""
    write_atomically(output / "report.md", text)


def _sample_table(predictions: Sequence[Prediction], count: int = 8) -> str:
    """Some responses, from the most to the least confident."""
    ranked = sorted((p for p in predictions if p.confidence is not None), key=lambda p: -(p.confidence or 0.0))
    chosen = [ranked[i * (len(ranked) - 1) // max(1, count - 1)] for i in range(min(count, len(ranked)))]
    rows = [(f"`{p.question}`", f"`{p.response}`", f"{p.confidence:.2f}", p.outcome) for p in chosen]
    return markdown_table(("question", "response", "confidence", "answer"), rows, numbers=(2,))


class _Clock:
    """Wall time since the start and since the last lap, in seconds."""

    def __init__(self) -> None:
        self._start = self._lap = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._lap = now - self._lap, now
        return elapsed

    def total(self) -> float:
        return time.perf_counter() - self._start
