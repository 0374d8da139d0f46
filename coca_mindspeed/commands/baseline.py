"""``coca-mindspeed baseline``: what CoCA is compared with, on any causal LM directory."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from coca_mindspeed.algorithm.rewards import METHODS, training_method
from coca_mindspeed.baselines.parts import claim_directory
from coca_mindspeed.baselines.run import BASELINES, NEEDS_TRAINING, BaselineOptions, run_baseline
from coca_mindspeed.baselines.subject import Subject
from coca_mindspeed.config.schema import MethodConfig, ModelConfig, RolloutConfig
from coca_mindspeed.data.records import read_records
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.predictions import read_predictions
from coca_mindspeed.evaluation.summary import metrics_table, summary_metrics
from coca_mindspeed.grading.registry import GRADER_NAMES, build_grader
from coca_mindspeed.local.policy import Policy, choose_device, load_policy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    path: dict[str, Any] = {"type": Path, "metavar": "PATH"}
    parser.add_argument("name", choices=BASELINES, metavar="NAME", help=", ".join(BASELINES))
    parser.add_argument("--model", **path, required=True, help="Hugging Face directory of the model under test")
    parser.add_argument("--data", **path, required=True, help="records to evaluate on (JSON Lines)")
    parser.add_argument("--output", **path, required=True, help="results; run again to go on with a stopped run")
    parser.add_argument("--train", **path, help="records that a probe or an assessor is trained on")
    parser.add_argument("--trained", **path, help="directory of a probe or assessor trained before")
    parser.add_argument(
        "--assessor-model", **path, help="what becomes the assessor; the paper takes Qwen2.5-1.5B-Instruct"
    )
    parser.add_argument("--answers", **path, help="predictions of the model, to take its answers from")
    parser.add_argument("--samples", type=int, default=16, metavar="K", help="of majority voting (default: 16)")
    parser.add_argument("--layer", type=int, default=-1, help="whose hidden states the probe reads (default: the last)")
    parser.add_argument("--probe-width", type=int, default=128, help="hidden units of the probe (default: 128)")
    parser.add_argument("--assessor-lr", type=float, default=1e-5, help="default: 1e-5")
    parser.add_argument("--assessor-epochs", type=int, default=3, help="at most (default: 3)")
    parser.add_argument(
        "--method", choices=tuple(METHODS), default="coca", help="whose prompt and format to use (default: coca)"
    )
    parser.add_argument("--label", help="method name in the predictions (default: the baseline's)")
    parser.add_argument("--grader", choices=GRADER_NAMES, default="auto", help="default: by record")
    parser.add_argument("--batch", type=int, default=64, help="questions at once, and in a part (default: 64)")
    parser.add_argument("--max-prompt-tokens", type=int, default=2048, help="default: 2048")
    parser.add_argument("--max-new-tokens", type=int, default=4096, help="default: 4096")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N, npu or npu:N")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="compute (default: bf16)")
    parser.add_argument("--seed", type=int, default=0, help="draws samples, splits and weights (default: 0)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def run(arguments: argparse.Namespace) -> int:
    for name in ("samples", "batch", "max_prompt_tokens", "max_new_tokens"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: should be at least 1, found {getattr(arguments, name)}")
    if arguments.name in NEEDS_TRAINING and arguments.train is None and arguments.trained is None:
        raise ConfigError(f"the {arguments.name} needs --train (records to train on) or --trained (one trained before)")
    # Where to go on is the user's choice of directory; how much is shown changes no result.
    settings = {k: _plain(v) for k, v in vars(arguments).items() if k not in ("output", "quiet", "run", "command")}
    claim_directory(arguments.output, settings)

    device = choose_device(arguments.device, where="--device")
    model = ModelConfig(compute_dtype=arguments.dtype)
    policy = load_policy(arguments.model, model, device, where="--model")
    rollout = RolloutConfig(max_prompt_tokens=arguments.max_prompt_tokens, max_new_tokens=arguments.max_new_tokens)
    grader = build_grader(arguments.grader)
    subject = Subject(policy, grader, training_method(arguments.method), MethodConfig(), rollout, arguments.seed)
    try:
        predictions = run_baseline(
            arguments.name,
            subject,
            list(read_records(arguments.data)),
            arguments.output,
            _options(arguments),
            training_records=list(read_records(arguments.train)) if arguments.train else (),
            open_assessor=_assessor_opener(arguments, model, device),
            answers=read_predictions(arguments.answers) if arguments.answers else None,
        )
    finally:
        grader.close()
    console = Console()
    console.print(metrics_table({arguments.name: summary_metrics(predictions)}))
    console.print(f"predictions: {arguments.output / 'predictions.jsonl'}")
    return 0


def _options(arguments: argparse.Namespace) -> BaselineOptions:
    defaults = BaselineOptions()
    fit = replace(defaults.assessor.fit, lr=arguments.assessor_lr, epochs=arguments.assessor_epochs)
    return BaselineOptions(
        batch=arguments.batch,
        samples=arguments.samples,
        label=arguments.label,
        probe=replace(defaults.probe, layer=arguments.layer, width=arguments.probe_width),
        assessor=replace(defaults.assessor, max_prompt_tokens=arguments.max_prompt_tokens, fit=fit),
        trained=arguments.trained,
        show_progress=not arguments.quiet,
    )


def _assessor_opener(arguments: argparse.Namespace, model: ModelConfig, device: torch.device) -> Any:
    def open_assessor(directory: Path | None) -> Policy:
        path = directory or arguments.assessor_model
        if path is None:
            raise ConfigError("the assessor needs --assessor-model, a Hugging Face directory of a causal LM to train")
        return load_policy(path, model, device, where="--assessor-model")

    return open_assessor


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
