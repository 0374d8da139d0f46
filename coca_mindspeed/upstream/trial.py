"""The verdict on a trial: two steps of a run on a cluster, by their metrics and responses."""

from pathlib import Path
from typing import Any

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.scoring.health import LARGEST_LOG_PROB_GAP, judge_trial
from coca_mindspeed.scoring.metrics import LOG_PROB_GAP
from coca_mindspeed.utils.json_files import read_json_lines, read_steps

_SHOWN, _WIDTH = 3, 600  # responses that a trial shows, and characters of each


def sample_rows(results: Path) -> list[dict[str, Any]]:
    """The responses that the iterations of a stage have dumped, the first of each prompt."""
    files = sorted((results / "samples").glob("*.jsonl"))
    rows = [row for file in files for _, row in read_json_lines(file)]
    return list({row["prompt"]: row for row in reversed(rows)}.values())[::-1]


def check_trial(results: Path, prompts: int) -> None:
    """Show three responses of a trial in ``results`` (``stageN``), and judge its iterations of ``prompts`` groups.

    The gap of log-probs is not measured at temperatures other than 1, nor without ``coca.rollout_log_probs``.  Raises
    TrainingError for each reason of :func:`.judge_trial`.
    """
    metrics = results / "metrics.jsonl"
    rows = read_steps(metrics) if metrics.is_file() else []
    for row in sample_rows(results)[:_SHOWN]:
        graded = {True: "right", False: "wrong"}.get(row["correct"], "not graded")
        confidence = "invalid" if row["confidence"] is None else row["confidence"]
        print(f"coca-mindspeed: {graded}, confidence {confidence}: {row['response']!r:.{_WIDTH}}", flush=True)
    # A format warm-up belongs to the local engine: a cluster run with one is refused.
    verdict = judge_trial(rows, prompts * len(rows))
    for code, text in verdict.warnings.items():
        print(f"coca-mindspeed: warning: {text} [{code}]", flush=True)
    if verdict.failures:
        lines = [f"{text} [{code}]" for code, text in verdict.failures.items()]
        hint = "; see docs/ascend.md (5. Trial)"
        raise TrainingError("\n".join([f"{metrics}: the trial failed:", *lines]) + hint)
    gaps = [row[LOG_PROB_GAP] for row in rows if LOG_PROB_GAP in row]
    largest = f"{max(gaps):.2g}, at most {LARGEST_LOG_PROB_GAP}" if gaps else "not measured at this temperature"
    print(f"coca-mindspeed: {LOG_PROB_GAP}: {largest}", flush=True)
