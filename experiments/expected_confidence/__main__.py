"""``python -m experiments.expected_confidence``: how well the expectation of a model's confidence ranks questions.

A stated confidence is one draw from the policy's distribution.  This computes the distribution itself, for every
question, and compares one draw, the mean of several, and the expectation.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from coca_mindspeed.cli.options import at_least, place
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.utils.files import write_json_lines
from coca_mindspeed.utils.markdown import print_markdown

if TYPE_CHECKING:
    from coca_mindspeed.local.policy import Policy

_STATED = re.compile(r"(\s*<confidence>\s*)\d[\d.]*\s*</confidence>")
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


def usual_form(responses: Iterable[str]) -> str:
    """The most frequent text before the number in responses that begin with a confidence.

    Raises:
        DataError: none does.
    """
    found = Counter(match[1] for response in responses if (match := _STATED.match(response)))
    if not found:
        raise DataError("no response begins with <confidence> NUMBER </confidence>; train the format first")
    return found.most_common(1)[0][0]


def distribution(policy: "Policy", prompt: Sequence[int], texts: Sequence[str]) -> Floats:
    """The policy's probabilities ``[N]`` of beginning its response with each text, normalised over the texts.

    The prompt and the texts' beginnings, which are few, are run once.

    Raises:
        DataError: the tokenizer does not reproduce a text from its tokens.
    """
    import torch
    from transformers import DynamicCache

    rows = [policy.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    for text, row in zip(texts, rows, strict=True):
        if policy.tokenizer.decode(row) != text:
            raise DataError(f"the tokenizer decodes {row} to {policy.tokenizer.decode(row)!r}, expected {text!r}")
    parents = list(dict.fromkeys(tuple(row[:-1]) for row in rows))
    width = max(map(len, parents))
    tokens = torch.tensor([[prompt[-1], *parent, *[0] * (width - len(parent))] for parent in parents])
    with torch.no_grad(), policy.autocast():
        cache, head = DynamicCache(config=policy.model.config), policy.lm_head
        head.hidden_states(input_ids=torch.tensor([prompt[:-1]], device=policy.device), cache=cache, use_cache=True)
        cache.batch_repeat_interleave(len(parents))
        logits = head.logits(head.hidden_states(input_ids=tokens.to(policy.device), cache=cache, use_cache=True))
    log_probs = policy.logits_of_policy(logits, 1.0).log_softmax(-1).double().cpu()
    totals = []
    for row in rows:
        at = parents.index(tuple(row[:-1]))
        totals.append(sum(float(log_probs[at, place, token]) for place, token in enumerate(row)))
    weights = np.exp(np.array(totals) - max(totals))
    result: Floats = weights / weights.sum()
    return result


def _measure(
    records: Sequence[Record], values: Floats, arguments: argparse.Namespace
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    from coca_mindspeed.grading.registry import build_grader
    from coca_mindspeed.local.experience import predict
    from coca_mindspeed.local.policy import choose_device, load_policy
    from coca_mindspeed.local.progress import StepProgress
    from coca_mindspeed.local.schedule import generator
    from coca_mindspeed.local.validation import LengthLimits, check_prompts

    data = f"data.train={arguments.records}"
    given: list[Any] = [f"model.path={arguments.model}", data, f"method.confidence_decimals={arguments.decimals}"]
    config = compose_run("local", [*given, *arguments.overrides]).run
    prompt = config.method.training_method.system_prompt
    limits = LengthLimits(config.rollout.max_prompt_tokens, config.rollout.max_new_tokens)
    check_prompts(Path(arguments.model), config.model, records, prompt, limits)
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
    prompts = policy.encode_prompts(records, prompt)
    before = usual_form(prediction.response for prediction in found)
    texts = [f"{before}{value:.{arguments.decimals}f}" for value in values]
    rows = []
    with StepProgress(len(records), True, title="confidences") as bar:
        for tokens in prompts:
            rows.append(distribution(policy, tokens, texts))
            bar.show(len(rows))
    return np.stack(rows), np.array([prediction.correct for prediction in found], dtype=bool)


if __name__ == "__main__":
    from experiments.__main__ import main

    sys.exit(main(["expected_confidence", *sys.argv[1:]]))
