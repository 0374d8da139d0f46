"""Long answers through the proxy: tokens generated and time until the decision, by three routers.

``python -m benchmarks.long_answers --seeds 5 --output runs/long_answers`` trains the tiny model on progressions (answers
of 74 tokens), for each seed by CoCA (confidence first) and by RLCR (answer first), and asks both through the proxy.  Each
router accepts the more confident half of the answers; the other half would go to a larger model.  The threshold comes
from questions that are not measured.  Trained models and results are files; the same command resumes.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch

from benchmarks.routing_experiment import summary
from coca_mindspeed.algorithm.parsing import ANSWER_FIRST_PROMPT, ResponseParser
from coca_mindspeed.baselines.answer_log_prob import mean_answer_log_probs
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.data.embedded.miniature import miniature
from coca_mindspeed.data.records import Record, read_records, write_records
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.evaluation.reports.plots import new_figure, save_figure, tidy
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.checkpoint import list_checkpoints
from coca_mindspeed.local.policy import Policy, load_policy
from coca_mindspeed.local.setup import open_session
from coca_mindspeed.serving.config import ServingConfig
from coca_mindspeed.serving.model_server import ModelServer
from coca_mindspeed.serving.proxy import Proxy
from coca_mindspeed.utils.files import write_json
from tests.serving.background import served_in_background

# The long setting of configs/reproduce/miniature.yaml.
TRAINING = (
    "data=records", "warm_up.steps=700", "warm_up.batch=64", "rollout.prompts=32", "rollout.max_new_tokens=90",
    "trainer.steps=160", "evaluation.interval=0", "checkpoint.keep=1", "logging.tensorboard=false",
)  # fmt: skip
METHODS = ("coca", "rlcr")


class Asked(NamedTuple):
    """One answer.

    Attributes:
        text: as the client received it; an answer-first model's confidence stands in it.
        coca: the proxy's field.
        decided: seconds until the headers, which hold the confidence.
        ended: seconds until the last byte.
    """

    text: str
    coca: dict[str, Any]
    decided: float
    ended: float


def train(output: Path, method: str, seed: int, overrides: Sequence[str]) -> Path:
    """Train one model; returns its directory."""
    run = output / f"seed{seed}" / method
    if not (run / "model").exists():
        data = [f"data.train={output / 'train.jsonl'}", f"data.evaluate={output / 'evaluate.jsonl'}"]
        composed = compose_run("demo", [*TRAINING, *data, f"seed={seed}", f"method={method}", *overrides])
        with closing(open_session(composed, run, resume=(run / "config.yaml").exists(), show_progress=False)) as session:
            session.trainer.run(session.resume_from if list_checkpoints(run / "checkpoints") else None)
    return run / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="default: 5")
    parser.add_argument("--questions", type=int, default=200, help="measured (default: 200)")
    parser.add_argument("--output", type=Path, default=Path("runs/long_answers"), help="default: runs/long_answers")
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("overrides", nargs="*", help="of the run demo, such as trainer.steps=20")
    arguments = parser.parse_args()
    output: Path = arguments.output
    if not (output / "evaluate.jsonl").exists():
        data = miniature("long")
        write_records(output / "train.jsonl", data.train)
        write_records(output / "evaluate.jsonl", data.evaluate)
    for seed in range(arguments.seeds):
        for method in METHODS:
            start = time.time()
            train(output, method, seed, arguments.overrides)
            print(seed, method, time.time() - start, flush=True)


if __name__ == "__main__":
    main()
