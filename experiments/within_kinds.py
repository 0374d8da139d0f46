"""Measure what a confidence knows within a kind of question: ``python -m experiments.within_kinds RUN ...``.

The command answers held-out questions 32 times each with the tiny model of each run directory. For each kind of
question it prints the AUROC of the stated confidence, of its expectation, of a probe (trained on eight answers each to
training questions, from the hidden state at the prompt's last token), and of the question's other answers, which is
about the most that could be known.
"""

import argparse
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers.utils.logging import disable_progress_bar

from coca_mindspeed.baselines.predictors import ProbeConfig, TargetModel, prompt_states, train_probe
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.evaluation.metrics import calibration_metrics
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.respond import predict
from coca_mindspeed.utils.console import markdown_table, print_text
from experiments.readings import with_readings
from experiments.reproduce.plan import saved_config

Floats = npt.NDArray[np.float64]
HEADER = ("run", "kind", "questions", "right", "stated", "AUROC: stated", "expectation", "probe", "other answers")
_PROMPTS = 250  # at once, for their hidden states
_PROBE_ANSWERS = 8  # to each training question


def numbers(values: Iterable[float | None], samples: int) -> Floats:
    """The values of all answers as ``[questions, samples]``; NaN where it is None."""
    return np.array(list(values), float).reshape(-1, samples)


def auroc(confidence: Floats, correct: Floats) -> float:
    """AUROC of confidences for answers of the same shape; NaN if undefined."""
    known = np.isfinite(confidence)
    return calibration_metrics(confidence[known], correct[known].astype(bool)).values["auroc"]


def rows_of(run: Path, questions: int, probe_questions: int, samples: int) -> list[list[str]]:
    """A table's row for each kind of question of one run."""
    config = saved_config(run)
    assert config.data.train is not None
    assert config.data.evaluate is not None
    held_out = list(read_records(Path(config.data.evaluate)))[:questions]
    training = list(read_records(Path(config.data.train)))[:probe_questions]
    with closing(build_grader(config.data.grader, config.data.grader_options)) as grader:
        policy = load_policy(run / "model", config.model, torch.device("cpu"))
        target = TargetModel(policy, grader, config.method, config.rollout, config.seed)

        def answers(records: list[Record], each: int, purpose: str) -> list[Prediction]:
            settings = (grader, config.method, config.rollout, target.generator(purpose))
            return predict(policy, records, *settings, samples=each)

        found = with_readings(policy, held_out, answers(held_out, samples, "within kinds"), config)
        known = answers(training, _PROBE_ANSWERS, "probe")
    correct, stated = numbers((p.correct for p in found), samples), numbers((p.confidence for p in found), samples)
    expected = numbers((None if p.reading is None else p.reading.expected_confidence for p in found), samples)
    labels = torch.tensor(numbers((p.correct for p in known), _PROBE_ANSWERS).ravel().astype(bool))
    layer = ProbeConfig().layer
    states = prompt_states(target, training, layer, _PROMPTS).repeat_interleave(_PROBE_ANSWERS, dim=0)
    probe, _ = train_probe(states, labels, ProbeConfig(), config.seed)
    probed = probe.confidence(prompt_states(target, held_out, layer, _PROMPTS)).numpy()
    probed = np.repeat(probed[:, None], samples, axis=1).astype(float)
    others = (correct.sum(axis=1, keepdims=True) - correct) / (samples - 1)
    kinds = np.array([record.metadata["kind"] for record in held_out])
    rows = []
    for kind in sorted(set(kinds)):
        of_kind = kinds == kind
        readings = [auroc(reading[of_kind], correct[of_kind]) for reading in (stated, expected, probed, others)]
        means = [correct[of_kind].mean(), np.nanmean(stated[of_kind])]
        rows.append([str(run), f"`{kind}`", str(of_kind.sum()), *(f"{value:.3f}" for value in (*means, *readings))])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory with config.yaml and model/")
    parser.add_argument("--questions", type=int, default=500, help="held out (default: 500)")
    parser.add_argument("--probe-questions", type=int, default=2000, help="from the training set (default: 2000)")
    parser.add_argument("--samples", type=int, default=32, help="answers to each held-out question (default: 32)")
    arguments = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    rows = []
    for run in arguments.runs:
        rows += rows_of(run, arguments.questions, arguments.probe_questions, arguments.samples)
        print_text(f"{run}: done")
    print_text(markdown_table(HEADER, rows))


if __name__ == "__main__":
    main()
