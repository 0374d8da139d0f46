"""The verdict on a trial: two steps of a run on a cluster, by their metrics and responses."""

from pathlib import Path
from typing import Any

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.scoring.health import LARGEST_LOG_PROB_GAP, judge_trial
from coca_mindspeed.scoring.metrics import LOG_PROB_GAP
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.json_files import read_json_lines, read_steps

_SHOWN, _WIDTH = 3, 600  # responses that a trial shows, and characters of each


def sample_rows(results: Path) -> list[dict[str, Any]]:
    """The responses that the steps have dumped, the first of each prompt (of verl: of each question)."""
    files = sorted((results / "samples").glob("*.jsonl"))
    rows = [row for file in files for _, row in read_json_lines(file)]
    return list({row.get("prompt", row.get("question")): row for row in reversed(rows)}.values())[::-1]


def check_trial(results: Path, prompts: int) -> None:
    """Show three responses of a trial, and judge its steps, each of ``prompts`` groups, by their metrics.

    ``results`` holds ``metrics.jsonl`` and ``samples``.  The gap of log-probs is not measured at some settings.  Raises
    TrainingError for each reason of :func:`.judge_trial`, and if no step is logged.
    """
    metrics = results / "metrics.jsonl"
    logged = read_steps(metrics) if metrics.is_file() else []
    rows = [{**row, **row.get("data", {})} for row in logged]  # verl nests them
    for row in sample_rows(results)[:_SHOWN]:
        graded = {True: "right", False: "wrong"}.get(row["correct"], "not graded")
        confidence = "invalid" if row["confidence"] is None else row["confidence"]
        print(f"coca-mindspeed: {graded}, confidence {confidence}: {row['response']!r:.{_WIDTH}}", flush=True)
    # A format warm-up belongs to the local engine: a cluster run with one is refused.
    verdict = judge_trial(rows, prompts * len(rows))
    if not rows:
        verdict.failures["no_steps"] = "no step is logged"
    for code, text in verdict.warnings.items():
        print(f"coca-mindspeed: warning: {text} [{code}]", flush=True)
    if verdict.failures:
        lines = [f"{text} [{code}]" for code, text in verdict.failures.items()]
        hint = "; see docs/ascend.md (5. Trial)"
        raise TrainingError("\n".join([f"{metrics}: the trial failed:", *lines]) + hint)
    gaps = [row[LOG_PROB_GAP] for row in rows if LOG_PROB_GAP in row]
    largest = f"{max(gaps):.2g}, at most {LARGEST_LOG_PROB_GAP}" if gaps else "not measured"
    print(f"coca-mindspeed: {LOG_PROB_GAP}: {largest}", flush=True)


def show_passed(run: str, metrics: Path) -> None:
    """Print that the trial of ``run`` passed, and the command that estimates the time by its ``metrics``."""
    print_text(
        "trial passed; the time of a run at the speed that was measured:\n"
        f"    coca-mindspeed check {run} --metrics {metrics}"
    )
