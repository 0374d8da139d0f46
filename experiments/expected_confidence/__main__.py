"""``python -m experiments.expected_confidence``: how well the expectation of a model's confidence ranks questions.

A stated confidence is one draw from the policy's distribution.  This computes the distribution itself, for every
question, and compares one draw, the mean of several, and the expectation.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coca_mindspeed.cli.options import at_least, place
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.metrics import calibration_metrics
from coca_mindspeed.utils.console import print_markdown
from coca_mindspeed.utils.json_files import write_json_lines

DRAWS = (1, 4, 8, 16)
_REPETITIONS = 50  # of the draws, whose metrics are averaged
Floats = npt.NDArray[np.float64]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sample one graded response per record at temperature 1, compute the probability of every confidence, and "
        "print AUROC and ECE of one stated confidence, of the mean of several, and of the expectation."
    )
    parser.add_argument("model", metavar="DIR", help="a Hugging Face directory, such as a run's model/")
    parser.add_argument("records", type=Path, metavar="FILE", help="records (JSON Lines)")
    parser.add_argument("--output", type=place, metavar="FILE", help="write a JSON line per question")
    parser.add_argument("--decimals", type=at_least(1), default=2, metavar="N", help="of a confidence (default: 2)")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of the responses (default: 0)")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="configuration keys, such as rollout.max_new_tokens=24"
    )


def run(arguments: argparse.Namespace) -> int:
    records = list(read_records(arguments.records))
    values = np.arange(10**arguments.decimals + 1) / 10**arguments.decimals
    probabilities, correct = _measure(records, values, arguments)
    rows = [
        {"id": record.id, "dataset": record.dataset, "correct": bool(right), "expectation": float(p @ values)}
        for record, p, right in zip(records, probabilities, correct, strict=True)
    ]
    if arguments.output:
        write_json_lines(arguments.output, rows)
    print_markdown(table(values, probabilities, correct))
    return 0


def table(values: Floats, probabilities: Floats, correct: npt.NDArray[np.bool_]) -> str:
    """Markdown: accuracy, mean confidence, AUROC and ECE by the number of draws, and of the expectation.

    Args:
        values: ``[N]`` confidences.
        probabilities: ``[Q, N]`` of each at each question; rows sum to 1.
        correct: ``[Q]`` verdicts of the responses.
    """
    generator = np.random.default_rng(0)
    cumulated = probabilities.cumsum(axis=1) / probabilities.sum(axis=1, keepdims=True)
    lines = ["| confidence | mean | AUROC | ECE |", "| --- | ---: | ---: | ---: |"]

    def add(name: str, confidences: Sequence[Floats]) -> None:
        metrics = [calibration_metrics(confidence, correct) for confidence in confidences]
        auroc, ece = (float(np.mean([m.values[key] for m in metrics])) for key in ("auroc", "ece"))
        lines.append(f"| {name} | {np.mean(confidences):.3f} | {auroc:.3f} | {ece:.3f} |")

    for count in DRAWS:
        draws = generator.random((_REPETITIONS, count, len(correct)))
        index = (draws[..., None] > cumulated[:, :-1]).sum(axis=-1)  # [repetitions, count, Q]
        add("one draw" if count == 1 else f"mean of {count}", list(values[index].mean(axis=1)))
    add("expectation", [probabilities @ values])
    title = f"{len(correct)} questions, accuracy {np.mean(correct):.3f}"
    return "\n".join([title, "", *lines])


def _measure(
    records: Sequence[Record], values: Floats, arguments: argparse.Namespace
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    from coca_mindspeed.grading.registry import build_grader
    from coca_mindspeed.local.load import load_policy
    from coca_mindspeed.local.model_files import load_model_tokenizer
    from coca_mindspeed.local.policy import choose_device
    from coca_mindspeed.local.prompt_checks import LengthLimits, check_prompts
    from coca_mindspeed.local.respond import predict
    from coca_mindspeed.local.schedule import generator
    from coca_mindspeed.utils.progress import StepProgress
    from experiments.readings import Numbers

    data = f"data.train={arguments.records}"
    given: list[Any] = [f"model.path={arguments.model}", data, f"method.confidence_decimals={arguments.decimals}"]
    config = compose_run("local", [*given, *arguments.overrides]).run
    prompt = config.method.system_prompt
    limits = LengthLimits(config.rollout.max_prompt_tokens, config.rollout.max_new_tokens)
    model = Path(arguments.model)
    check_prompts(load_model_tokenizer(model, config.model), model, config.model, records, prompt, limits)
    policy = load_policy(Path(arguments.model), config.model, choose_device(config.trainer.device))
    grader = build_grader(config.data.grader, config.data.grader_options)
    try:
        with StepProgress(len(records), True, title="answering") as bar:
            draw = generator(policy.device, arguments.seed, "expected confidence")
            found = predict(policy, records, grader, config.method, config.rollout, draw, lambda done: bar.show(done))
    finally:
        grader.close()
    if missing := sum(prediction.correct is None for prediction in found):
        raise DataError(f"{arguments.records}: {missing} answers could not be graded")
    numbers = Numbers.of(policy, (prediction.response for prediction in found), arguments.decimals)
    if numbers is None:
        raise DataError("no response begins with <confidence> NUMBER </confidence>; train the format first")
    rows = []
    with StepProgress(len(records), True, title="confidences") as bar:
        for tokens in policy.encode_prompts(records, prompt):
            rows.append(numbers.log_probs(policy, [tokens])[0][0].softmax(0).numpy())
            bar.show(len(rows))
    return np.stack(rows), np.array([prediction.correct for prediction in found], dtype=bool)


if __name__ == "__main__":
    from experiments.__main__ import main

    sys.exit(main(["expected_confidence", *sys.argv[1:]]))
