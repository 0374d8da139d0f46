"""``coca-mindspeed baseline``: run a baseline of CoCA on any causal LM directory."""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coca_mindspeed.algorithm.methods import METHODS, method_settings
from coca_mindspeed.baselines import ASSESSOR_PROMPT, BASELINES, NEEDS_TRAINING, VOTES, answers_in_order, bare_questions
from coca_mindspeed.cli.options import (
    THINKING_HELP,
    at_least,
    day,
    device_name,
    grader_option,
    grader_options,
    place,
    template_variables,
)
from coca_mindspeed.cli.trained_prompt import model_directory, trained_prompt_of
from coca_mindspeed.config.schema import ModelConfig, RolloutConfig
from coca_mindspeed.data.prompts import TemplateKeys
from coca_mindspeed.data.records import Record, records_digest
from coca_mindspeed.data.registry import read_records_of
from coca_mindspeed.errors import ConfigError, DataError, UsageError
from coca_mindspeed.evaluation.predictions import Prediction, read_predictions
from coca_mindspeed.evaluation.report import print_metrics, summary_metrics
from coca_mindspeed.grading.registry import build_grader, grader_name
from coca_mindspeed.grading.verdict import MeasuredGrader
from coca_mindspeed.local.prompt_checks import LengthLimits, check_prompts
from coca_mindspeed.utils.directories import check_directory, check_writable, claim_directory, lock_run
from coca_mindspeed.utils.files import fingerprint

if TYPE_CHECKING:
    from coca_mindspeed.local.policy import Policy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    path: dict[str, Any] = {"type": place, "metavar": "PATH"}
    option("name", choices=BASELINES, metavar="NAME", help=", ".join(BASELINES))
    option("--model", **path, required=True, help="run or Hugging Face directory of the model under test")
    option("--data", **path, required=True, help="records to evaluate on (JSON Lines)")
    option("--output", **path, required=True, help="results; the same command resumes a stopped run")
    option("--train", **path, help="records that a probe or an assessor is trained on")
    option("--trained", **path, help="directory of a probe or assessor trained before")
    option("--assessor-model", **path, help="model to fine-tune as assessor (the paper: Qwen2.5-1.5B-Instruct)")
    option("--answers", **path, help="predictions of the model, to take its answers from")
    option("--samples", type=at_least(1), default=16, metavar="K", help="samples of a vote (default: 16)")
    option("--layer", type=int, default=-1, help="layer whose hidden states the probe reads (default: the last)")
    option("--method", choices=tuple(METHODS), default="coca", help="method of prompt and format (default: coca)")
    named = "a name of docs/grading.md, or your own: ./file.py:name or package.module:name (default: by record)"
    option("--grader", type=grader_option, default="auto", metavar="NAME", help=named)
    option("--grader-options", type=grader_options, metavar="JSON", help="options of the grader (docs/grading.md)")
    option("--batch", type=at_least(1), default=64, help="questions at once (default: 64)")
    option("--max-prompt-tokens", type=at_least(1), default=2048, help="default: 2048")
    option("--max-new-tokens", type=at_least(1), default=4096, help="default: 4096")
    option("--device", type=device_name, default="auto", help="auto, cpu, cuda, cuda:N, npu or npu:N")
    option(
        "--dtype", choices=("float32", "bfloat16"), help="compute dtype (default: that of its training, or bfloat16)"
    )
    option(
        "--chat-template-kwargs",
        type=template_variables,
        metavar="JSON",
        help='variables of the chat template of --model, {"enable_thinking": false} for example',
    )
    option(
        "--prompt-date", type=day, metavar="YYYY-MM-DD", help="date for a chat template that puts today's in the prompt"
    )
    option("--thinking", action="store_true", help=THINKING_HELP)
    option("--seed", type=at_least(0), default=0, help="draws samples, splits and weights (default: 0)")
    option("--quiet", action="store_true", help="no progress bars")


def run(arguments: argparse.Namespace) -> int:
    name, trains = arguments.name, arguments.name in NEEDS_TRAINING and arguments.trained is None
    if trains and arguments.train is None:
        raise UsageError(f"the {name} needs --train (records to train on) or --trained (one trained before)")
    if arguments.trained is not None and not arguments.trained.is_dir():
        raise UsageError(f"--trained {arguments.trained}: no such directory")
    if name == "assessor":
        _assessor_path(arguments, arguments.trained)
    arguments.model = model_directory(arguments.model)
    if arguments.dtype is None:
        trained = trained_prompt_of(arguments.model)
        arguments.dtype = (trained and trained.compute_dtype) or "bfloat16"
    # The output directory and the progress bars change no result.
    settings = {
        k: str(v) if isinstance(v, Path) else v
        for k, v in vars(arguments).items()
        if k not in ("output", "quiet", "run", "command")
    }
    check_writable(arguments.output)
    records = read_records_of("--data", arguments.data)
    training = read_records_of("--train", arguments.train) if arguments.train else []
    needed = ("dataset", "question", "response")
    answers = read_predictions(arguments.answers, needs=needed) if arguments.answers else None
    # Files may have been replaced under the same names.
    settings["content of --data"] = records_digest(records)["sha256"]
    settings["content of --train"] = records_digest(training)["sha256"]
    for option in ("model", "assessor_model", "trained", "answers"):
        settings[f"content of --{option.replace('_', '-')}"] = fingerprint(getattr(arguments, option))
    check_directory(arguments.output, settings)
    if answers is not None:
        answers_in_order(answers, records)
    asked = {record.question.strip() for record in records}
    if trains and (known := [record for record in training if record.question.strip() in asked]):
        raise DataError(
            f"--train: {len(known)} of {len(training)} questions are also in --data, the first is {known[0].id!r}; "
            "expected disjoint questions"
        )
    if name in VOTES:
        for record in records:
            grader_name(record)  # compares the answers of a vote, whatever --grader is
    graded = [*([] if answers is not None and name not in VOTES else records), *(training if trains else [])]
    with closing(build_grader(arguments.grader, arguments.grader_options)) as grader:
        grader.check(graded)
        return _run(arguments, settings, grader, records, training, answers)


def _run(
    arguments: argparse.Namespace,
    settings: Mapping[str, Any],
    grader: MeasuredGrader,
    records: Sequence[Record],
    training: Sequence[Record],
    answers: Sequence[Prediction] | None,
) -> int:
    """Check the device, the model and the prompts, and run the baseline."""
    from coca_mindspeed.baselines.predictors import TargetModel, check_layer, load_probe
    from coca_mindspeed.baselines.run import BaselineOptions, run_baseline  # it imports torch
    from coca_mindspeed.local.load import load_policy
    from coca_mindspeed.local.model_files import load_model_tokenizer, read_model_config
    from coca_mindspeed.local.policy import choose_device
    from coca_mindspeed.utils.process import interruptible

    device = choose_device(arguments.device, where="--device")
    model = ModelConfig(
        compute_dtype=arguments.dtype,
        chat_template_kwargs=arguments.chat_template_kwargs or {},
        prompt_date=arguments.prompt_date,
    )
    assessor = model.model_copy(update={"chat_template_kwargs": {}})  # the variables are the target model's
    if arguments.name == "probe":
        architecture = read_model_config(arguments.model, model, where="--model")
        if arguments.trained is None:
            check_layer(arguments.layer, architecture, where="--layer")
        elif (reads := len(load_probe(arguments.trained).mean)) != architecture.hidden_size:
            raise ConfigError(
                f"--trained {arguments.trained}: the probe reads {reads} hidden units, --model {arguments.model} has "
                f"{architecture.hidden_size}"
            )
    limits = LengthLimits(
        arguments.max_prompt_tokens, arguments.max_new_tokens, "--max-prompt-tokens", "--max-new-tokens"
    )
    keys = TemplateKeys("--chat-template-kwargs", "--thinking", "name a date by --prompt-date")
    how: dict[str, Any] = {"keys": keys, "show_progress": not arguments.quiet}
    method = method_settings(arguments.method, thinking=arguments.thinking)
    given: dict[str, Any] = {"where": "--model", "thinking": method.thinking, **how}
    asked = [*records, *training]
    tokenizer = load_model_tokenizer(arguments.model, model, where="--model")
    check_prompts(tokenizer, arguments.model, model, asked, method.system_prompt, limits, **given)
    if arguments.name == "assessor":
        path, where = _assessor_path(arguments, arguments.trained)
        nothing_new = replace(limits, response=0)
        tokenizer, questions = load_model_tokenizer(path, assessor, where=where), bare_questions(asked)
        check_prompts(
            tokenizer, path, assessor, questions, ASSESSOR_PROMPT, nothing_new, where=where, thinking=None, **how
        )
    policy = load_policy(arguments.model, model, device, where="--model")
    claim_directory(arguments.output, settings)
    rollout = RolloutConfig(max_prompt_tokens=arguments.max_prompt_tokens, max_new_tokens=arguments.max_new_tokens)
    options = BaselineOptions(
        batch=arguments.batch,
        samples=arguments.samples,
        probe=replace(BaselineOptions().probe, layer=arguments.layer),
        trained=arguments.trained,
        show_progress=not arguments.quiet,
    )

    def open_assessor(directory: Path | None) -> "Policy":
        path, where = _assessor_path(arguments, directory)
        return load_policy(path, assessor, device, where=where)

    message = f"stopped; the finished parts are saved in {arguments.output}; the same command resumes"
    with lock_run(arguments.output), interruptible(message):
        predictions = run_baseline(
            arguments.name,
            TargetModel(policy, grader, method, rollout, arguments.seed),
            records,
            arguments.output,
            options,
            training_records=training,
            open_assessor=open_assessor,
            answers=answers,
        )
    print_metrics({arguments.name: summary_metrics(predictions)})
    print(f"predictions: {arguments.output / 'predictions.jsonl'}")
    return 0


def _assessor_path(arguments: argparse.Namespace, trained: Path | None) -> tuple[Path, str]:
    if trained is not None:
        return trained, "--trained"
    if arguments.assessor_model is None:
        raise UsageError("the assessor needs --assessor-model, a Hugging Face directory of a causal LM to train")
    return arguments.assessor_model, "--assessor-model"
