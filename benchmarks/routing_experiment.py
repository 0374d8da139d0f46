"""Routing by the stated confidence between two tiny models, trained here and served: calls and cost saved.

The first tier is a small specialist, taught sums; the second is a large generalist, taught sums and small programs run
by hand. Both are asked about both subjects. ``python -m benchmarks.routing_experiment --seeds 5 --output
runs/routing`` trains, for each seed, the small model by CoCA, the large one by RLVR and another small one by RLCR
(answer first), replays them, and asks both tiers through the proxy with an unmodified ``openai`` client.  Every part is
a file; the same command goes on where it was stopped.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.stats import t as student
from transformers import Qwen2ForCausalLM

from benchmarks.router_scores import oracle_curve, score_router, single_curve
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.data.arithmetic import Split, arithmetic_records
from coca_mindspeed.data.records import Record, read_records, write_records
from coca_mindspeed.evaluation.predictions import read_predictions, write_predictions
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.checkpoint import export_model
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.schedule import derived_seed
from coca_mindspeed.local.sft import warm_up
from coca_mindspeed.local.start import open_run
from coca_mindspeed.local.tiny_model import tiny_config, tiny_tokenizer
from coca_mindspeed.utils.json_files import write_json
from coca_mindspeed.utils.tokenization import TokenCounter
from coca_router.config import ServingConfig
from coca_router.replay import join_tiers, threshold_curve
from experiments.miniature import SYMBOLS, digit_records
from tests.router.servers_for_tests import served_in_background

# Hidden size, layers: about 60,000 and 900,000 parameters; a token's price is about in proportion.
SIZES = {"small": (48, 2), "large": (128, 4)}
PRICES = (1.0, 14.0)


class Part(NamedTuple):
    """One model: its size, the subjects of its SFT warm-up, and its training on all questions."""

    size: str
    taught: tuple[str, ...]
    method: str
    steps: int
    overrides: tuple[str, ...] = ()


# The specialist needs a longer SFT warm-up: after the demo's 700 updates, some seeds are worse than the large model at
# sums. The large model's confidence decides nothing, so it is trained by RLVR. The demo's learning rate is too high for
# it: at eight times the size it undoes the warm-up.
SPECIALIST = ("warm_up.steps=2100",)
PARTS = {
    "small": Part("small", ("sums",), "coca", 120, SPECIALIST),
    "large": Part("large", ("sums", "programs"), "rlvr", 40, ("optimizer.lr=1.0e-4",)),
    "answer_first": Part("small", ("sums",), "rlcr", 120, SPECIALIST),
}
TRAINING = ("rollout.prompts=32", "evaluation.interval=0", "checkpoint.interval=40", "logging.tensorboard=false")


def questions_about(subject: str, size: int, split: Split) -> list[Record]:
    """Questions of one subject, ``sums`` or ``programs``, in equal parts of its kinds."""
    if subject == "programs":
        return digit_records(size, split, seed=0)
    kinds = 7  # of arithmetic, four of which are sums
    return [r for r in arithmetic_records(-(-size * kinds // 4), split, seed=0) if "+" in r.metadata["kind"]][:size]


def write_records_of(output: Path, train: int, evaluate: int) -> tuple[str, ...]:
    """Write the training and evaluation records, half on each subject; returns the overrides of a run."""
    overrides = ["data=records"]
    for split, size in (("train", train), ("evaluate", evaluate)):
        mixed = [questions_about(subject, size // 2, split) for subject in ("sums", "programs")]
        path = output / f"{split}.jsonl"
        write_records(path, [record for pair in zip(*mixed, strict=True) for record in pair])
        overrides.append(f"data.{split}={path}")
    return tuple(overrides)


def write_model(directory: Path, size: str, seed: int) -> None:
    """An untrained model of one of the sizes."""
    config = tiny_config(SYMBOLS)
    config.hidden_size, config.num_hidden_layers = SIZES[size]
    config.intermediate_size = 3 * config.hidden_size
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = (
        config.pad_token_id,
        config.eos_token_id,
    )
    model.save_pretrained(directory)
    tiny_tokenizer(SYMBOLS).save_pretrained(directory)


def train_part(output: Path, part: str, seed: int, lessons: int, overrides: Sequence[str]) -> Path:
    """Train one model and answer the held-out questions; returns the run's directory."""
    size, taught, method, steps, own = PARTS[part]
    run = output / f"seed{seed}" / part
    if (run / "predictions.jsonl").exists():
        return run
    seeded = f"seed={derived_seed(seed, part) % 2**31}"
    common = [seeded, f"method={method}", f"trainer.steps={steps}", *TRAINING, *own, *overrides]
    warm = run / "warm"
    composed = compose_run("demo", [*common, f"model.path={warm}"])
    if not warm.exists():
        write_model(run / "untrained", size, derived_seed(seed, part, "weights"))
        policy = load_policy(run / "untrained", composed.run.model, torch.device("cpu"))
        read = [record for subject in taught for record in questions_about(subject, lessons // len(taught), "train")]
        warm_up(policy, read, composed.run.method, composed.run.warm_up, composed.run.seed)
        export_model(policy, warm)
    directory = run / "run"
    resume = (directory / "config.yaml").exists()
    with open_run(composed, directory, resume=resume, show_progress=False) as local:
        policy = local.start()
        if not (directory / "model").exists():
            local.train(policy)
        held_out = local.held_out(policy)
        predictions = held_out.evaluate(held_out.records, "after")
    counter = TokenCounter(directory / "model")
    # The end of a response is a token that was generated too.
    counted = [replace(p, tokens=counter.before(p.response, len(p.response)) + 1, model=part) for p in predictions]
    write_predictions(run / "predictions.jsonl", counted)
    return run


def replayed(runs: dict[str, Path]) -> dict[str, float]:
    """Costs and savings of routing, replayed from the predictions."""
    said = {name: read_predictions(runs[name] / "predictions.jsonl") for name in ("small", "large")}
    first = {**said, "small": read_predictions(runs["answer_first"] / "predictions.jsonl")}
    tiers = join_tiers(said, PRICES)
    curves = {
        "confidence_first": threshold_curve(tiers),
        "same_decisions_answer_first": threshold_curve(tiers, answer_first=True),
        "rlcr_answer_first": threshold_curve(join_tiers(first, PRICES), answer_first=True),
        "random": single_curve(tiers),
        "oracle": oracle_curve(tiers),
    }
    result = {"accuracy_small": float(tiers.correct[0].mean()), "accuracy_large": float(tiers.correct[1].mean())}
    for name, curve in curves.items():
        scores = score_router(tiers, curve)
        for score in ("aiq", "calls_at_0.5", "calls_at_0.8", "cost_at_0.8"):
            result[f"{name}/{score}"] = scores[score]
    # The fewest calls of the large model that lose at most one point of its accuracy.
    curve = curves["confidence_first"]
    enough = curve.correct.mean(axis=1) >= result["accuracy_large"] - 0.01
    calls = float(curve.last.mean(axis=1)[enough].min()) if enough.any() else 1.0
    gap = result["accuracy_large"] - result["accuracy_small"]
    reached = float(curve.correct.mean(axis=1)[enough].min()) if enough.any() else result["accuracy_large"]
    result["calls_within_a_point"] = calls
    result["calls_of_random_at_equal_accuracy"] = (
        min(1.0, (reached - result["accuracy_small"]) / gap) if gap > 0 else 1.0
    )
    # Paired: both numbers of calls come from the same models and questions.
    result["calls_saved_within_a_point"] = result["calls_of_random_at_equal_accuracy"] - calls
    return result


def served(runs: dict[str, Path], threshold: float, records: Sequence[Record]) -> dict[str, float]:
    """Ask both tiers through the proxy, by an unmodified client."""
    import openai

    from coca_router.model_server import ModelServer
    from coca_router.proxy import Proxy

    with ExitStack() as stack:
        urls = {}
        for name in ("small", "large"):
            policy = load_policy(runs[name] / "run" / "model", ModelConfig(), torch.device("cpu"))
            urls[name] = stack.enter_context(served_in_background(ModelServer(policy, name, max_tokens=16).app()))
        bands = [{"at_least": threshold, "action": "answer"}, {"at_least": 0.0, "action": "escalate"}]
        everything = [{"at_least": 0.0, "action": "answer"}]
        config = ServingConfig.model_validate(
            {
                "backends": {n: {"url": url, "model": n, "dialect": "vllm"} for n, url in urls.items()},
                "tiers": [
                    {"name": "small", "backend": "small", "bands": bands},
                    {"name": "large", "backend": "large", "bands": everything, "invalid": "answer"},
                ],
            }
        )
        url = stack.enter_context(served_in_background(Proxy(config, {}).app()))
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        answers, tokens = [], {"small": 0, "large": 0}
        for record in records:
            messages: Any = [{"role": "user", "content": record.question}]
            answer = client.chat.completions.create(model="coca", messages=messages)
            answers.append(answer.choices[0].message.content or "")
            for name, count in (answer.model_extra or {})["coca"]["tokens"].items():
                tokens[name] += count
    grader = build_grader("auto")
    try:
        correct = [verdict.correct for verdict in grader.grade(records, answers)]
    finally:
        grader.close()
    return {
        "served_accuracy": statistics.mean(correct),
        "served_tokens_small": tokens["small"] / len(records),
        "served_tokens_large": tokens["large"] / len(records),
    }


def summary(rows: Sequence[dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """Mean of each figure over seeds, with its 95% interval by Student's t."""
    result: dict[str, dict[str, float | None]] = {}
    for name in rows[0]:
        values = [row[name] for row in rows if not math.isnan(row[name])]
        if not values:
            result[name] = {"mean": None, "half_width": None, "seeds": 0}
            continue
        half = None
        if len(values) > 1:
            half = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
        result[name] = {"mean": statistics.mean(values), "half_width": half, "seeds": len(values)}
    return result


def run_experiment(
    output: Path,
    seeds: int,
    overrides: Sequence[str],
    *,
    questions: int = 500,
    threshold: float = 0.8,
    train: int = 40_000,
    evaluate: int = 2000,
) -> dict[str, dict[str, float | None]]:
    """Run the parts that are missing, and summarize.

    Args:
        output: directory of all parts.
        seeds: 0 to so many less one.
        overrides: of the run ``demo``.
        questions: asked through the proxy.
        threshold: of its policy.
        train: questions that the models are trained on, and read before.
        evaluate: held-out questions.
    """
    data = write_records_of(output, train, evaluate)
    asked = list(read_records(output / "evaluate.jsonl"))[:questions]
    rows = []
    for seed in range(seeds):
        runs = {part: train_part(output, part, seed, train, [*data, *overrides]) for part in PARTS}
        result = output / f"seed{seed}" / "result.json"
        if not result.exists():
            row = replayed(runs) | (served(runs, threshold, asked) if asked else {})
            write_json(result, {name: None if math.isnan(value) else value for name, value in row.items()})
        stored = json.loads(result.read_text(encoding="utf-8"))
        rows.append({name: math.nan if value is None else value for name, value in stored.items()})
    found = summary(rows)
    write_json(output / "summary.json", found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="default: 5")
    parser.add_argument("--questions", type=int, default=500, help="asked through the proxy; 0: none (default: 500)")
    parser.add_argument("--threshold", type=float, default=0.8, help="of the proxy's policy (default: 0.8)")
    parser.add_argument("--output", type=Path, default=Path("runs/routing"), help="default: runs/routing")
    parser.add_argument("overrides", nargs="*", help="of the run demo, such as trainer.steps=600")
    arguments = parser.parse_args()
    found = run_experiment(
        arguments.output,
        arguments.seeds,
        arguments.overrides,
        questions=arguments.questions,
        threshold=arguments.threshold,
    )
    for name, cell in found.items():
        half = "" if cell["half_width"] is None else f" +- {cell['half_width']:.3f}"
        print(f"{name:45s} {'--' if cell['mean'] is None else format(cell['mean'], '.3f')}{half}")


if __name__ == "__main__":
    main()
