"""The end of a run: summary.json, report.md with its pictures, and the table of metrics before and after."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coca_mindspeed.data.records import repetition
from coca_mindspeed.evaluation.metrics import HEADLINE
from coca_mindspeed.evaluation.predictions import Prediction, outcomes
from coca_mindspeed.evaluation.report import (
    column_title,
    inline_code,
    print_metrics,
    shown_value,
    summary_metrics,
    write_page,
)
from coca_mindspeed.local.run import LocalRun
from coca_mindspeed.scoring.metrics import (
    FIRST_SIGHT,
    HELD_OUT,
    NO_SIGNAL_STEPS,
    REPEATED,
    TIMES_ASKED,
    Z95,
    Gap,
    gap_problem,
    values,
)
from coca_mindspeed.scoring.responses import held_out_gap
from coca_mindspeed.utils.console import markdown_table, print_text
from coca_mindspeed.utils.json_files import read_json_lines, write_json
from coca_mindspeed.utils.packages import missing_package

_FEW_VALID = 0.5
_IGNORED = "see docs/training.md, the model ignores the format"
_LONGEST_TEXT = 300  # characters of a question or response in the report


def write_run_report(
    run: LocalRun, before: Sequence[Prediction], after: Sequence[Prediction], introduction: str, notes: str = ""
) -> dict[str, Any]:
    """Write the report of a run, print its table, and return the content of ``summary.json``.

    ``before`` and ``after`` are answers to the held-out questions; the first may be missing.  ``introduction`` is a
    paragraph below the title, ``notes`` are lines below the table of responses.
    """
    groups = {"before": before[: len(after)], "after": after} if before else {"after": after}
    scores = {name: summary_metrics(predictions) for name, predictions in groups.items()}
    summary: dict[str, Any] = {
        "seed": run.config.seed,
        "method": run.config.method.label,
        **scores,
        "questions": asdict(run.inputs.questions),
        "seconds": run.seconds(),
    }
    write_json(run.output / "summary.json", summary)
    rows = [[name, *(shown_value(key, found[key]) for key in HEADLINE)] for name, found in scores.items()]
    results = markdown_table(["", *map(column_title, HEADLINE)], rows, numbers=range(1, len(HEADLINE) + 1))
    missing = left_out(scores)
    gaps, problem = _gaps(run, after)
    plots, pictures = _plots(run.output, groups)
    text = f"""# Confidence before answering, by `{summary["method"]}`, seed {summary["seed"]}

{introduction}

{results}
{missing}SR: share of responses with a valid confidence. TTC: tokens until the confidence is complete.
--: undefined.

{gaps}
{plots}
## Responses after training

{_sample_table(after)}
{notes}Training took {summary["seconds"]["train"]:.0f} s of {summary["seconds"]["total"]:.0f} s in all.
"""
    page, _ = write_page(run.output / "report.md", text, pictures)
    print_metrics(scores)
    if missing:
        print_text(f"warning: {missing.strip()}", sys.stderr)
    if (valid := scores["after"]["success_rate"]) < _FEW_VALID:
        print_text(f"warning: only {valid:.0%} of the responses state a valid confidence; {_IGNORED}", sys.stderr)
    if problem:
        print_text(f"warning: {problem} (see docs/training.md)", sys.stderr)
    print(f"{summary['seconds']['total']:.0f} s; pictures and samples: {page}")
    return summary


def _gaps(run: LocalRun, after: Sequence[Prediction]) -> tuple[str, str]:
    """A section on new questions against those of the training, and the warning about them (may be empty)."""
    evaluated = values(held_out_gap(after))
    rows = [row for _, row in read_json_lines(run.output / "metrics.jsonl")][-NO_SIGNAL_STEPS:]
    rows[-1] = {**rows[-1], **evaluated}
    titles = {FIRST_SIGHT: "rollout, at first sight", REPEATED: "rollout, asked before", HELD_OUT: "held out"}
    lines = [
        (title, f"{gap.accuracy:.3f}", f"{gap.confidence:.3f}", f"{gap.difference:+.3f} ± {Z95 * gap.error:.3f}")
        for name, title in titles.items()
        if (gap := Gap.of(rows[-1:] if name == HELD_OUT else rows, name)) is not None
    ]
    table = markdown_table(("questions", "right", "stated", "stated minus right"), lines, numbers=(1, 2, 3))
    problem = gap_problem(rows).get("held_out_gap", "")
    times = rows[-1].get(TIMES_ASKED)  # earlier releases did not log it
    asked = "" if times is None else f"The run asked a question {times:.1f} times on average. "
    counts = run.inputs.questions
    text = f"""## New questions against those of the training

Rollouts of the last {len(rows)} steps, and the held-out questions after training; ±: 95%, by question.
{asked}Training set: {repetition(run.inputs.train)}. {counts.shared:,} of the {counts.held_out:,} different held-out
questions are also in it{", so that their results do not show what holds on new questions" if counts.shared else ""}.

{table}
{problem and f"**Warning**: {problem}."}
"""
    return text, problem


def left_out(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """A paragraph on the answers that could not be graded, if there are any."""
    parts = [
        f"{found['ungradable']:,} of {found['ungradable'] + found['n']:,} answers {when} the training"
        for when, found in scores.items()
        if found["ungradable"]
    ]
    return f"{' and '.join(parts)} could not be graded and are left out.\n\n" if parts else ""


def _plots(output: Path, groups: Mapping[str, Sequence[Prediction]]) -> tuple[str, dict[str, bytes]]:
    """Sections with plots, and these by name; without matplotlib, the command that installs it."""
    try:
        from coca_mindspeed.evaluation.plots import gap_curves, png_bytes, reliability_diagram, training_curves
    except ModuleNotFoundError as error:
        text = f"no plots: {missing_package(error)}"
        print_text(text, sys.stderr)
        return f"{text}\n", {}
    metrics = [row for _, row in read_json_lines(output / "metrics.jsonl")]
    figures = {
        "reliability.png": reliability_diagram({name: outcomes(rows) for name, rows in groups.items()}),
        "training_curves.png": training_curves({"": metrics}),
        "gap.png": gap_curves(metrics),
    }
    text = f"""## Calibration

![Reliability {" and ".join(groups)}: accuracy against stated confidence, with the number of answers](reliability.png)

## Training

![Confidence reward, answer reward, ECE and response length over the training steps](training_curves.png)

![Right, stated and their difference over the training steps: at first sight, asked before, held out](gap.png)
"""
    return text, {name: png_bytes(figure) for name, figure in figures.items()}


def _sample_table(predictions: Sequence[Prediction], count: int = 8) -> str:
    """Table of some responses, from the most to the least confident; invalid responses if there are no others."""
    valid = [p for p in predictions if p.confidence is not None]
    ranked = sorted(valid, key=lambda p: -(p.confidence or 0.0)) or predictions
    chosen = [ranked[i * (len(ranked) - 1) // max(1, count - 1)] for i in range(min(count, len(ranked)))]
    rows = [
        (_short(p.question), _short(p.response), "--" if p.confidence is None else f"{p.confidence:.2f}", p.outcome)
        for p in chosen
    ]
    return markdown_table(("question", "response", "confidence", "answer"), rows, numbers=(2,))


def _short(text: str) -> str:
    """Text as inline code, shortened."""
    return inline_code(text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}...")
