"""The report of a local run, made from the files of its directory, and the table of metrics before and after."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coca_mindspeed.algorithm.methods import METHODS
from coca_mindspeed.evaluation.metrics import HEADLINE, BinsClosed
from coca_mindspeed.evaluation.predictions import Prediction, outcomes, read_predictions
from coca_mindspeed.evaluation.report import (
    Opening,
    column_title,
    inline_code,
    print_metrics,
    reliability_caption,
    shown_value,
    summary_metrics,
    write_report,
)
from coca_mindspeed.evaluation.scoreboard import Run
from coca_mindspeed.scoring.health import NO_SIGNAL_STEPS, Z95, Gap, gap_problem, rewards_confidence
from coca_mindspeed.scoring.metrics import CONFIDENCE_REWARD, FIRST_SIGHT, HELD_OUT, REPEATED, TIMES_ASKED, values
from coca_mindspeed.scoring.responses import held_out_gap
from coca_mindspeed.utils.console import markdown_table, print_note
from coca_mindspeed.utils.json_files import read_json_lines, read_object, write_json
from coca_mindspeed.utils.packages import missing_package
from coca_mindspeed.utils.text_formats import read_yaml

if TYPE_CHECKING:
    from coca_mindspeed.local.run import LocalRun

_FEW_VALID = 0.5
_IGNORED = "see docs/troubleshooting.md, the model ignores the format"
_LONGEST_TEXT = 300  # characters of a question or response in the report
_SUMMARY, _BEFORE, _AFTER = "summary.json", "predictions_before.jsonl", "predictions_after.jsonl"


def finish_run(run: "LocalRun", before: Sequence[Prediction], after: Sequence[Prediction]) -> None:
    """Write ``summary.json`` and the report of a run whose answers to the held-out questions are given.

    Also print the table of metrics and what is wrong with them.  There may be no answers from before the training.
    """
    groups = {"before": before[: len(after)], "after": after} if before else {"after": after}
    scores = {name: summary_metrics(predictions) for name, predictions in groups.items()}
    seconds = run.seconds()
    summary = {
        "seed": run.config.seed,
        "method": run.config.method.label,
        **scores,
        "questions": asdict(run.inputs.questions.counts),
        "seconds": seconds,
    }
    write_json(run.output / _SUMMARY, summary)
    page, _ = write_run_report(run.output, run.output)
    print_metrics(scores)
    if missing := left_out(scores):
        print_note(f"warning: {missing.strip()}")
    if (valid := scores["after"]["success_rate"]) < _FEW_VALID:
        print_note(f"warning: only {valid:.0%} of the responses state a valid confidence; {_IGNORED}")
    if problem := _problem(_last_steps(run.output, after)):
        print_note(f"warning: {problem} (see docs/troubleshooting.md)")
    print(f"{seconds['total']:.0f} s; report with pictures: {page}")


def is_finished(directory: Path) -> bool:
    """Whether the directory holds what :func:`write_run_report` reads; earlier releases did not count questions."""
    files = all((directory / name).is_file() for name in (_SUMMARY, _AFTER, "config.yaml", "metrics.jsonl"))
    return files and "questions" in read_object(directory / _SUMMARY)


def write_run_report(directory: Path, output: Path, *, closed: BinsClosed = "right") -> tuple[Path, Path]:
    """Write the report of the finished run in ``directory`` to ``output``; see :func:`.write_report`.

    The same files give the same bytes.  Without matplotlib there are no plots, but the command that installs it.
    """
    summary = read_object(directory / _SUMMARY, seed=int, method=str, after=dict, questions=dict, seconds=dict)
    after = read_predictions(directory / _AFTER)
    groups = {"after": after}
    if "before" in summary:
        groups = {"before": read_predictions(directory / _BEFORE)[: len(after)], "after": after}
    scores = {name: summary[name] for name in groups}
    rows = [[name, *(shown_value(key, found[key]) for key in HEADLINE)] for name, found in scores.items()]
    results = markdown_table(["", *map(column_title, HEADLINE)], rows, numbers=range(1, len(HEADLINE) + 1))
    config = read_yaml(directory / "config.yaml")
    plots, pictures = draw_plots(directory, groups, closed, rewards_confidence(METHODS.get(summary["method"])))
    text = f"""# Confidence before answering, by `{summary["method"]}`, seed {summary["seed"]}

{_introduction(config)}

{results}
{left_out(scores)}SR: share of responses with a valid confidence. TTC: tokens until the confidence is complete.
--: undefined.

{_gaps(_last_steps(directory, after), summary["questions"])}
{plots}
## Responses after training

{_sample_table(after)}
{_DIGITS if config["data"]["name"] == "arithmetic" else ""}Training took {summary["seconds"]["train"]:.0f} s of \
{summary["seconds"]["total"]:.0f} s in all.
"""
    runs = [Run(name, predictions) for name, predictions in groups.items()]
    return write_report(runs, output, closed=closed, opening=Opening(text, pictures))


_DIGITS = "Numbers are written units first: 12 + 34 = 46 is `2100+4300` and `64`.\n"


def _introduction(config: Mapping[str, Any]) -> str:
    steps, samples = config["trainer"]["steps"], config["evaluation"].get("samples", 1)
    if (path := config["model"]["path"]) is None:
        trained = (
            "The built-in tiny model was warmed up to answer arithmetic with a confidence that means nothing, and then "
            f"trained for {steps} steps per stage"
        )
        when = "the training, with the warm-up already done"
    else:
        trained = f"{inline_code(path)} was trained for {steps} steps per stage"
        warmed_up = config["warm_up"]["records"] is not None
        when = "the RL training, with the warm-up already done" if warmed_up else "the training"
    times = "once" if samples == 1 else f"{samples} times"
    return f'{trained}. Each held-out question is answered {times} at temperature 1.\n"before" is before {when}.'


def _last_steps(directory: Path, after: Sequence[Prediction]) -> list[dict[str, Any]]:
    """The last rows of metrics.jsonl, and in the very last one the gap of the answers after the training."""
    rows = [row for _, row in read_json_lines(directory / "metrics.jsonl")][-NO_SIGNAL_STEPS:]
    rows[-1] = {**rows[-1], **values(held_out_gap(after))}
    return rows


def _problem(rows: Sequence[Mapping[str, Any]]) -> str:
    return gap_problem(rows).get("held_out_gap", "")


def _gaps(rows: Sequence[Mapping[str, Any]], counts: Mapping[str, Any]) -> str:
    """A section on new questions against those of the training, with the warning about them if there is one."""
    titles = {FIRST_SIGHT: "rollout, at first sight", REPEATED: "rollout, asked before", HELD_OUT: "held out"}
    lines = [
        (title, f"{gap.accuracy:.3f}", f"{gap.confidence:.3f}", f"{gap.difference:+.3f} ± {Z95 * gap.error:.3f}")
        for name, title in titles.items()
        if (gap := Gap.of(rows[-1:] if name == HELD_OUT else rows, name)) is not None
    ]
    table = markdown_table(("questions", "right", "stated", "stated minus right"), lines, numbers=(1, 2, 3))
    problem, shared = _problem(rows), counts["shared"]
    times = rows[-1].get(TIMES_ASKED)  # earlier releases did not log it
    asked = "" if times is None else f"The run asked a question {times:.1f} times on average. "
    return f"""## New questions against those of the training

Rollouts of the last {len(rows)} steps, and the held-out questions after training; ±: 95%, by question.
{asked}Training set: {counts["train"]:,} different questions in {counts["records"]:,} records. {shared:,} of the \
{counts["held_out"]:,} different held-out
questions are also in it{", so that their results do not show what holds on new questions" if shared else ""}.

{table}
{problem and f"**Warning**: {problem}."}
"""


def left_out(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """A paragraph on the answers that could not be graded, if there are any."""
    parts = [
        f"{found['ungradable']:,} of {found['ungradable'] + found['n']:,} answers {when} the training"
        for when, found in scores.items()
        if found["ungradable"]
    ]
    return f"{' and '.join(parts)} could not be graded and are left out.\n\n" if parts else ""


def draw_plots(
    directory: Path, groups: Mapping[str, Sequence[Prediction]], closed: BinsClosed, has_confidence_reward: bool = True
) -> tuple[str, dict[str, bytes]]:
    """Sections with plots, and these by name; without matplotlib, the command that installs it."""
    try:
        from coca_mindspeed.evaluation import plots
    except ModuleNotFoundError as error:
        text = f"no plots: {missing_package(error)}"
        print_note(text)
        return f"{text}\n", {}
    metrics = [row for _, row in read_json_lines(directory / "metrics.jsonl")]
    if not has_confidence_reward:
        metrics = [{name: value for name, value in row.items() if name != CONFIDENCE_REWARD} for row in metrics]
    with_last = [*metrics[:-1], *({**row, **values(held_out_gap(groups["after"]))} for row in metrics[-1:])]
    figures = {
        "reliability.png": plots.reliability_diagram({n: outcomes(rows) for n, rows in groups.items()}, closed),
        "training_curves.png": plots.training_curves({"": metrics}),
        "gap.png": plots.gap_curves(with_last),
    }
    text = f"""## Calibration

![Reliability {" and ".join(groups)}: accuracy against stated confidence, with the number of answers](reliability.png)

{reliability_caption(closed)}

## Training

![Confidence reward, answer reward, ECE and response length over the training steps](training_curves.png)

Of the rollouts of each step.

![Right, stated and their difference over the training steps: at first sight, asked before, held out](gap.png)

Share of right answers, mean stated confidence, and their difference. *At first sight*: the first time that the
training asks a question.
"""
    return text, {name: plots.png_bytes(figure) for name, figure in figures.items()}


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
