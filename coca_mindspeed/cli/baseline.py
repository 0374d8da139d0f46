"""``coca-mindspeed baseline``: run a baseline of CoCA on any causal LM directory."""

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coca_mindspeed.algorithm.methods import METHODS, training_method
from coca_mindspeed.baselines import ASSESSOR_PROMPT, BASELINES, NEEDS_TRAINING, VOTES, answers_in_order, bare_questions
from coca_mindspeed.cli.options import (
    above,
    at_least,
    day,
    device_name,
    grader_option,
    json_object,
    place,
    template_variables,
)
from coca_mindspeed.config.schema import MethodConfig, ModelConfig, RolloutConfig
from coca_mindspeed.data.prompts import TemplateKeys
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import ConfigError, DataError, UsageError
from coca_mindspeed.evaluation.predictions import Prediction, read_predictions
from coca_mindspeed.evaluation.tables import print_metrics, summary_metrics
from coca_mindspeed.grading.label_check import check_records
from coca_mindspeed.grading.registry import build_grader, grader_name
from coca_mindspeed.grading.verdict import MeasuredGrader
from coca_mindspeed.local import run_directory
from coca_mindspeed.local.validation import LengthLimits, check_prompts

if TYPE_CHECKING:
    import torch

    from coca_mindspeed.baselines.run import BaselineOptions
    from coca_mindspeed.local.policy import Policy

_SLICE = 2**20  # bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    path: dict[str, Any] = {"type": place, "metavar": "PATH"}
    option("name", choices=BASELINES, metavar="NAME", help=", ".join(BASELINES))
    option("--model", **path, required=True, help="Hugging Face directory of the model under test")
    option("--data", **path, required=True, help="records to evaluate on (JSON Lines)")
    option("--output", **path, required=True, help="results; the same command resumes a stopped run")
    option("--train", **path, help="records that a probe or an assessor is trained on")
    option("--trained", **path, help="directory of a probe or assessor trained before")
    option("--assessor-model", **path, help="model to fine-tune as assessor (the paper: Qwen2.5-1.5B-Instruct)")
    option("--answers", **path, help="predictions of the model, to take its answers from")
    option("--samples", type=at_least(1), default=16, metavar="K", help="samples of a vote (default: 16)")
    option("--layer", type=int, default=-1, help="layer whose hidden states the probe reads (default: the last)")
    option("--probe-width", type=at_least(1), default=128, help="hidden units of the probe (default: 128)")
    option("--assessor-lr", type=above(0), default=1e-5, help="learning rate of the assessor (default: 1e-5)")
    option("--assessor-epochs", type=at_least(1), default=3, help="most epochs of the assessor (default: 3)")
    option("--method", choices=tuple(METHODS), default="coca", help="method of prompt and format (default: coca)")
    option("--label", help="method name in the predictions (default: the baseline's)")
    named = "a name of docs/grading.md, or your own: ./file.py:name or package.module:name (default: by record)"
    option("--grader", type=grader_option, default="auto", metavar="NAME", help=named)
    option("--grader-options", type=json_object, metavar="JSON", help="options of the grader (docs/grading.md)")
    option("--batch", type=at_least(1), default=64, help="questions at once (default: 64)")
    option("--max-prompt-tokens", type=at_least(1), default=2048, help="default: 2048")
    option("--max-new-tokens", type=at_least(1), default=4096, help="default: 4096")
    option("--device", type=device_name, default="auto", help="auto, cpu, cuda, cuda:N, npu or npu:N")
    option("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="compute dtype (default: bfloat16)")
    option(
        "--chat-template-kwargs",
        type=template_variables,
        metavar="JSON",
        help='variables of the chat template of --model, {"enable_thinking": false} for example',
    )
    option(
        "--prompt-date", type=day, metavar="YYYY-MM-DD", help="date for a chat template that puts today's in the prompt"
    )
    option("--allow-open-thinking", action="store_true", help="accept prompts that end inside an open <think>")
    option("--seed", type=at_least(0), default=0, help="draws samples, splits and weights (default: 0)")
    option("--quiet", action="store_true", help="no progress bars")


def run(arguments: argparse.Namespace) -> int:
    if arguments.name in NEEDS_TRAINING and arguments.train is None and arguments.trained is None:
        raise UsageError(f"the {arguments.name} needs --train (records to train on) or --trained (one trained before)")
    if arguments.trained is not None and not arguments.trained.is_dir():
        raise UsageError(f"--trained {arguments.trained}: no such directory")
    # The output directory and the progress bars change no result.
    settings = {
        k: str(v) if isinstance(v, Path) else v
        for k, v in vars(arguments).items()
        if k not in ("output", "quiet", "run", "command")
    }
    run_directory.check_writable(arguments.output)
    records = _records(arguments.data, "--data")
    training = _records(arguments.train, "--train") if arguments.train else []
    answers = (
        read_predictions(arguments.answers, needs=("dataset", "question", "response")) if arguments.answers else None
    )
    # Files may have been replaced under the same names.
    settings["content of --data"] = run_directory.records_digest(records)["sha256"]
    settings["content of --train"] = run_directory.records_digest(training)["sha256"]
    for option in ("model", "assessor_model", "trained", "answers"):
        settings[f"content of --{option.replace('_', '-')}"] = _fingerprint(getattr(arguments, option))
    run_directory.check_directory(arguments.output, settings)
    if answers is not None:
        answers_in_order(answers, records)
    if arguments.name in NEEDS_TRAINING and arguments.trained is None:
        _refuse_known_questions(records, training)
    if arguments.name in VOTES:
        for record in records:
            grader_name(record)  # compares the answers of a vote, whatever --grader is
    model = ModelConfig(
        compute_dtype=arguments.dtype,
        chat_template_kwargs=arguments.chat_template_kwargs or {},
        prompt_date=arguments.prompt_date,
        allow_open_thinking=arguments.allow_open_thinking,
    )
    with closing(build_grader(arguments.grader, arguments.grader_options)) as grader:
        check_records(grader, _graded(arguments, records, training))
        return _run(arguments, settings, model, grader, records, training, answers)


def _run(
    arguments: argparse.Namespace,
    settings: Mapping[str, Any],
    model: ModelConfig,
    grader: MeasuredGrader,
    records: Sequence[Record],
    training: Sequence[Record],
    answers: Sequence[Prediction] | None,
) -> int:
    """Check the device and the model, and run the baseline."""
    from coca_mindspeed.baselines.run import run_baseline  # it imports torch
    from coca_mindspeed.baselines.target_model import TargetModel, check_layer
    from coca_mindspeed.local.load import load_policy
    from coca_mindspeed.local.model_files import read_model_config
    from coca_mindspeed.local.policy import choose_device
    from coca_mindspeed.utils.process import interruptible

    device = choose_device(arguments.device, where="--device")
    if arguments.name == "probe" and arguments.trained is None:
        check_layer(arguments.layer, read_model_config(arguments.model, model, where="--model"), where="--layer")
    if arguments.trained is not None:
        _check_trained(arguments, model)
    _check_prompts(arguments, model, records, training)
    policy = load_policy(arguments.model, model, device, where="--model")
    run_directory.claim_directory(arguments.output, settings)
    rollout = RolloutConfig(max_prompt_tokens=arguments.max_prompt_tokens, max_new_tokens=arguments.max_new_tokens)
    message = f"stopped; the finished parts are saved in {arguments.output}; the same command resumes"
    with run_directory.lock_run(arguments.output), interruptible(message):
        predictions = run_baseline(
            arguments.name,
            TargetModel(policy, grader, MethodConfig(name=arguments.method), rollout, arguments.seed),
            records,
            arguments.output,
            _options(arguments),
            training_records=training,
            open_assessor=_assessor_opener(arguments, model, device),
            answers=answers,
        )
    print_metrics({arguments.name: summary_metrics(predictions)})
    print(f"predictions: {arguments.output / 'predictions.jsonl'}")
    return 0


def _fingerprint(path: Path | None) -> str | None:
    """SHA-256 of names, sizes, and first and last megabytes of a file or a directory's files; None if missing.

    Weights that were trained further differ everywhere, and reading all of them would take long.
    """
    if path is None or not path.exists():
        return None
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}\0{size}\0".encode())
        with file.open("rb") as content:
            digest.update(content.read(_SLICE))
            content.seek(max(_SLICE, size - _SLICE))
            digest.update(content.read())
    return digest.hexdigest()


def _refuse_known_questions(records: Sequence[Record], training: Sequence[Record]) -> None:
    """Raise DataError if a training question is also an evaluation question."""
    asked = {record.question.strip() for record in records}
    if known := [record for record in training if record.question.strip() in asked]:
        raise DataError(
            f"--train: {len(known)} of {len(training)} questions are also in --data, the first is {known[0].id!r}; "
            "expected disjoint questions"
        )


def _check_trained(arguments: argparse.Namespace, model: ModelConfig) -> None:
    """Raise an error if ``--trained`` is a probe of a model of another width."""
    from coca_mindspeed.baselines.predictors import load_probe
    from coca_mindspeed.local.model_files import read_model_config

    if arguments.name != "probe":
        return
    reads = load_probe(arguments.trained).hidden_size
    has = int(read_model_config(arguments.model, model, where="--model").hidden_size)
    if reads != has:
        raise ConfigError(
            f"--trained {arguments.trained}: the probe reads {reads} hidden units, --model {arguments.model} has {has}"
        )


def _records(path: Path, option: str) -> list[Record]:
    records = list(read_records(path))
    if not records:
        raise DataError(f"{option} {path}: holds no records")
    return records


def _graded(
    arguments: argparse.Namespace, records: Sequence[Record], training: Sequence[Record]
) -> dict[Path | str, Sequence[Record]]:
    """The records whose answers will be graded, by file, without those that have graded answers."""
    given = arguments.answers is not None and arguments.name not in VOTES
    trains = arguments.name in NEEDS_TRAINING and arguments.trained is None
    files = {arguments.data: [] if given else records}
    return {**files, **({arguments.train: training} if trains else {})}


def _check_prompts(
    arguments: argparse.Namespace,
    model: ModelConfig,
    records: Sequence[Record],
    training: Sequence[Record],
) -> None:
    """Check the prompts of the model and of the assessor before they are loaded; see :func:`check_prompts`."""
    limits = LengthLimits(
        arguments.max_prompt_tokens, arguments.max_new_tokens, "--max-prompt-tokens", "--max-new-tokens"
    )
    asked = [*records, *training]
    system_prompt = training_method(arguments.method).system_prompt
    keys = TemplateKeys("--chat-template-kwargs", "--allow-open-thinking", "name a date by --prompt-date")
    how: dict[str, Any] = {"keys": keys, "show_progress": not arguments.quiet}
    check_prompts(arguments.model, model, asked, system_prompt, limits, where="--model", **how)
    if arguments.name == "assessor":
        path, where = _assessor_path(arguments, arguments.trained)
        bare = bare_questions(asked)
        nothing_new = replace(limits, response=0)
        other = _without_template_kwargs(model)
        check_prompts(path, other, bare, ASSESSOR_PROMPT, nothing_new, where=where, **how)


def _options(arguments: argparse.Namespace) -> "BaselineOptions":
    from coca_mindspeed.baselines.run import BaselineOptions

    defaults = BaselineOptions()
    return BaselineOptions(
        batch=arguments.batch,
        samples=arguments.samples,
        label=arguments.label,
        probe=replace(defaults.probe, layer=arguments.layer, width=arguments.probe_width),
        assessor=replace(defaults.assessor, lr=arguments.assessor_lr, epochs=arguments.assessor_epochs),
        trained=arguments.trained,
        show_progress=not arguments.quiet,
    )


def _assessor_opener(arguments: argparse.Namespace, model: ModelConfig, device: "torch.device") -> Any:
    from coca_mindspeed.local.load import load_policy

    def open_assessor(directory: Path | None) -> "Policy":
        path, where = _assessor_path(arguments, directory)
        return load_policy(path, _without_template_kwargs(model), device, where=where)

    return open_assessor


def _without_template_kwargs(model: ModelConfig) -> ModelConfig:
    """Remove the target model's chat template variables."""
    return model.model_copy(update={"chat_template_kwargs": {}})


def _assessor_path(arguments: argparse.Namespace, trained: Path | None) -> tuple[Path, str]:
    if trained is not None:
        return trained, "--trained"
    if arguments.assessor_model is None:
        raise UsageError("the assessor needs --assessor-model, a Hugging Face directory of a causal LM to train")
    return arguments.assessor_model, "--assessor-model"
