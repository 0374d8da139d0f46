"""Long answers through the proxy: tokens generated and time until the decision, by router.

``python -m benchmarks.long_answers --seeds 5 --output runs/long_answers`` trains the tiny model on progressions
(answers of 74 tokens), by CoCA (confidence first) and by RLCR (answer first) for each seed, and asks them through the
proxy. Each router accepts the more confident half of the answers, by a threshold from other questions; a larger model
would be asked about the rest. Models and results are files; the same command resumes.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import numpy.typing as npt
import torch

from benchmarks.routing_experiment import summary
from coca_mindspeed.algorithm.parsing import (
    CLOSE_TAG,
    OPEN_TAG,
    SYSTEM_PROMPTS,
    ResponseParser,
)
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.data.records import Record, read_records, write_records
from coca_mindspeed.evaluation.metrics import calibration_metrics
from coca_mindspeed.evaluation.plots import new_figure, save_figure, tidy
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.run import warm_start
from coca_mindspeed.local.start import open_run
from coca_mindspeed.utils.json_files import write_json
from coca_router.config import ServingConfig
from coca_router.model_server import ModelServer
from coca_router.proxy import Proxy
from experiments.miniature import miniature
from experiments.reproduce.plan import plan_path, read_plan
from tests.router.servers_for_tests import served_in_background

Floats = npt.NDArray[np.float64]

METHODS = ("coca", "rlcr")
TRAINING = ("data=records", *read_plan(plan_path("miniature")).settings["long"].overrides)
# Router -> the model, and the keys of its tier; the last two decide when the whole answer is there.
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "confidence first": ("coca", {}),
    "answer first (RLCR)": ("rlcr", {"states_confidence": False}),
    "log-prob of the answer": ("coca", {}),
}
CONFIDENCE_FIRST, ANSWER_FIRST, LOG_PROB = ROUTERS


class Answer(NamedTuple):
    """One answer through the proxy."""

    text: str
    stated: float | None
    decided_s: float  # until the headers, which hold the confidence
    ended_s: float  # until the last byte
    tokens: float  # that the engine generated


def train(output: Path, method: str, seed: int, overrides: Sequence[str]) -> Path:
    """Train one model; returns its directory."""
    run = output / f"seed{seed}" / method
    if not (run / "model").exists():
        data = [f"data.{part}={output / part}.jsonl" for part in ("train", "evaluate")]
        given = [*TRAINING, *data, f"seed={seed}", f"method={method}", *overrides]
        warm_up, device = list(read_records(output / "warm_up.jsonl")), torch.device("cpu")
        start = warm_start(compose_run("demo", given).run, run.with_name(f"{method}_start"), warm_up, device, False)
        composed = compose_run("demo", [*given, f"model.path={start}"])
        resume = (run / "config.yaml").exists()
        with open_run(composed, run, resume=resume, show_progress=False) as training:
            training.train(training.start())
    return run / "model"


def ask(url: str, engine: ModelServer, question: str) -> Answer:
    """Ask one question by a stream, and wait until the engine has stopped."""
    before, start = engine.generated, time.perf_counter()
    messages = [{"role": "system", "content": SYSTEM_PROMPTS["last"]}] if engine.name == "rlcr" else []
    body = {"model": "coca", "messages": [*messages, {"role": "user", "content": question}], "stream": True}
    with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=120) as response:
        decided = time.perf_counter() - start
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    ended = time.perf_counter() - start
    while engine.running:
        time.sleep(0.001)
    chunks = [json.loads(line) for line in lines]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    return Answer(text, chunks[0]["coca"]["stated_confidence"], decided, ended, engine.generated - before)


def served(stack: ExitStack, engine: ModelServer, url: str, tier: dict[str, Any], threshold: float | None) -> str:
    """The address of a proxy that refuses answers below the threshold; None: it gives all of them."""
    bands = [{"at_least": 0.0, "action": "refuse" if threshold else "answer"}]
    if threshold:
        bands.insert(0, {"at_least": threshold, "action": "answer"})
    if tier.get("states_confidence", True):
        tier = {**tier, "bands": bands, "invalid": "refuse" if threshold else "answer"}
    values = {
        "backends": {"e": {"url": url, "model": engine.name, "dialect": "vllm"}},
        "tiers": [{"name": "small", "backend": "e", **tier}],
    }
    return stack.enter_context(served_in_background(Proxy(ServingConfig.model_validate(values), {}).app()))


def half_threshold(confidences: Floats) -> float:
    """The positive threshold that accepts the share nearest to one half."""
    values = np.unique(np.maximum(confidences, 1e-6))
    return float(min(values, key=lambda value: abs(float(np.mean(confidences >= value)) - 0.5)))


def measure(models: dict[str, Path], tuning: Sequence[Record], records: Sequence[Record]) -> dict[str, float | None]:
    """Figures of each router on ``records``, with thresholds from ``tuning``."""
    policies = {name: load_policy(path, ModelConfig(), torch.device("cpu")) for name, path in models.items()}
    with closing(build_grader("auto")) as grader, ExitStack() as stack:
        engines = {}
        for router, (model, _) in ROUTERS.items():  # an engine each, so that tokens are counted apart
            server = ModelServer(policies[model], model, max_tokens=90)
            engines[router] = server, stack.enter_context(served_in_background(server.app()))

        def answers_of(thresholds: dict[str, float | None], asked: Sequence[Record]) -> dict[str, list[Answer]]:
            """The routers take turns, so that other work on the machine slows all of them down."""
            urls = {r: served(stack, *engines[r], ROUTERS[r][1], t) for r, t in thresholds.items()}
            rows = [{r: ask(url, engines[r][0], record.question) for r, url in urls.items()} for record in asked]
            return {r: [row[r] for row in rows] for r in urls}

        def judged(asked: Sequence[Record], answers: Sequence[Answer], router: str) -> tuple[Floats, Floats]:
            """The router's confidence in each whole answer (-1 if invalid), and whether the answer is right."""
            texts = [answer.text for answer in answers]
            confidences = [answer.stated for answer in answers]
            if router == ANSWER_FIRST:
                parsed = [ResponseParser("last")(text) for text in texts]
                texts, confidences = [p.answer for p in parsed], [p.confidence for p in parsed]
            correct = np.array([float(bool(verdict.correct)) for verdict in grader.grade(asked, texts)])
            if router == LOG_PROB:
                opened = ["" if c is None else f"{OPEN_TAG}{c:.2f}{CLOSE_TAG}" for c in confidences]
                said = [
                    Prediction(r.id, r.dataset, r.question, opening + text, c, True, None)
                    for r, opening, text, c in zip(asked, opened, texts, confidences, strict=True)
                ]
                return np.exp(mean_answer_log_probs(policies["coca"], said)), correct
            return np.array([-1.0 if c is None else c for c in confidences]), correct

        tuned = answers_of({ANSWER_FIRST: None, LOG_PROB: None}, tuning)
        tuned[CONFIDENCE_FIRST] = tuned[LOG_PROB]  # the same answers; the confidence stands in front of them
        thresholds = {r: half_threshold(judged(tuning, tuned[r], r)[0]) for r in ROUTERS}
        found = answers_of({r: thresholds[r] if r == CONFIDENCE_FIRST else None for r in ROUTERS}, records)
        result: dict[str, float | None] = {}
        for router, answers in found.items():
            whole = found[LOG_PROB] if router == CONFIDENCE_FIRST else answers
            confidence, correct = judged(records, whole, router)
            metrics = calibration_metrics(np.where(confidence < 0, np.nan, confidence), correct.astype(bool))
            accepted = confidence >= thresholds[router]
            if router == CONFIDENCE_FIRST:
                accepted = np.array([-1.0 if a.stated is None else a.stated for a in answers]) >= thresholds[router]
                correct = judged(records, answers, router)[1]
            tokens = np.array([answer.tokens for answer in answers])
            decided = np.array(
                [answer.decided_s if router == CONFIDENCE_FIRST else answer.ended_s for answer in answers]
            )
            row = {
                "tokens a question": tokens.mean(),
                "tokens, accepted": _mean(tokens[accepted]),
                "tokens, not accepted": _mean(tokens[~accepted]),
                "ms to the decision": 1000 * np.median(decided),
                "accepted": accepted.mean(),
                "right, of the accepted": _mean(correct[accepted]),
                "AUROC": metrics.values["auroc"],
            }
            result |= {f"{router}/{name}": None if np.isnan(value) else float(value) for name, value in row.items()}
    return result


def mean_answer_log_probs(policy: Policy, predictions: Sequence[Prediction]) -> list[float]:
    """Mean log-prob (nats) of each prediction's answer tokens, given the prompt and the stated confidence.

    Confidence and answer are tokenized separately.  Returns -inf for an answer without tokens.
    """
    tokenizer, parser, result = policy.tokenizer, ResponseParser(), []
    with torch.inference_mode(), policy.autocast():
        for prediction in predictions:
            messages = [
                {"role": "system", "content": SYSTEM_PROMPTS["first"]},
                {"role": "user", "content": prediction.question},
            ]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            answer = parser(prediction.response).answer
            opening = prediction.response[: len(prediction.response) - len(answer)]
            parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt + opening, answer)]
            if not parts[1]:
                result.append(float("-inf"))
                continue
            ids = torch.tensor([parts[0] + parts[1]], device=policy.device)
            logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(parts[0]) - 1 : -1]
            log_probs = policy.sampling_logits(logits, 1.0).log_softmax(dim=-1)
            result.append(float(log_probs.gather(1, ids[0, len(parts[0]) :, None]).mean()))
    return result


def _mean(values: np.ndarray) -> float:
    """The mean; NaN of nothing."""
    return float(values.mean()) if len(values) else math.nan


def figure_of(found: dict[str, dict[str, float | None]], path: Path) -> None:
    """Draw tokens and time until the decision by router."""
    figure, [axes] = new_figure(1, 2, (9.0, 3.2))
    for axis, name in zip(axes, ("tokens, not accepted", "ms to the decision"), strict=True):
        cells = [found[f"{router}/{name}"] for router in ROUTERS]
        axis.barh(range(len(cells)), [c["mean"] or 0.0 for c in cells], xerr=[c["half_width"] or 0.0 for c in cells])
        axis.set_yticks(range(len(cells)), list(ROUTERS) if axis is axes[0] else [""] * len(cells))
        axis.invert_yaxis()
        tidy(axis, xlabel=name.replace("tokens, not accepted", "tokens for an answer that is not used"), ylabel="")
    save_figure(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="default: 5")
    parser.add_argument("--questions", type=int, default=200, help="measured (default: 200)")
    parser.add_argument("--tuning", type=int, default=100, help="questions for the thresholds (default: 100)")
    parser.add_argument("--output", type=Path, default=Path("runs/long_answers"), help="default: runs/long_answers")
    parser.add_argument("--train-only", action="store_true", help="stop when the models are trained")
    parser.add_argument("overrides", nargs="*", help="of the run demo, such as trainer.steps=20")
    arguments = parser.parse_args(argv)
    output: Path = arguments.output
    if not (output / "evaluate.jsonl").exists():
        data = miniature("long")
        write_records(output / "warm_up.jsonl", data.warm_up)
        write_records(output / "train.jsonl", data.train)
        write_records(output / "evaluate.jsonl", data.evaluate)
    asked = list(read_records(output / "evaluate.jsonl"))[: arguments.tuning + arguments.questions]
    rows = []
    for seed in range(arguments.seeds):
        models = {method: train(output, method, seed, arguments.overrides) for method in METHODS}
        result = output / f"seed{seed}" / "result.json"
        if not result.exists() and not arguments.train_only:
            write_json(result, measure(models, asked[: arguments.tuning], asked[arguments.tuning :]))
        rows += [json.loads(result.read_text(encoding="utf-8"))] if result.exists() else []
    if not rows:
        return
    found = summary([{name: np.nan if value is None else value for name, value in row.items()} for row in rows])
    write_json(output / "summary.json", found)
    figure_of(found, output / "long_answers.png")
    for name, cell in found.items():
        half = "" if cell["half_width"] is None else f" +- {cell['half_width']:.3f}"
        print(f"{name:65s} {'--' if cell['mean'] is None else format(cell['mean'], '.3f')}{half}")


if __name__ == "__main__":
    main()
