"""OpenCompass configuration of the paper's evaluation, built from OpenCompass's own data set configurations.

``python -m coca_mindspeed.evaluation.opencompass.config --help`` writes it as JSON, which ``opencompass FILE`` reads.
A Python configuration could not call these functions: OpenCompass parses such files without executing imports.
"""

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from coca_mindspeed.algorithm.methods import METHODS
from coca_mindspeed.algorithm.parsing import SYSTEM_PROMPTS, ConfidencePosition
from coca_mindspeed.config.prompt_form import PROMPT_FILE, PromptForm, prompt_file, read_prompt_file
from coca_mindspeed.errors import CocaError, ConfigError, MissingDependencyError
from coca_mindspeed.evaluation.metrics import HEADLINE_METRICS
from coca_mindspeed.evaluation.scoreboard import DATASETS
from coca_mindspeed.utils.console import print_failure
from coca_mindspeed.utils.json_files import write_json

_EVALUATORS = "coca_mindspeed.evaluation.opencompass.evaluator"

# Our name -> module of OpenCompass's configurations, and the variable in it.
STOCK: Mapping[str, tuple[str, str]] = {
    "gsm8k": ("gsm8k.gsm8k_0shot_v2_gen_17d799", "gsm8k_datasets"),
    "math500": ("math.math_prm800k_500_0shot_cot_gen_11c4b5", "math_datasets"),
    "aime24": ("aime2024.aime2024_gen_17d799", "aime2024_datasets"),
    "aime25": ("aime2025.aime2025_cascade_eval_gen_5e9f4f", "aime2025_datasets"),
    "mbpp_sanitized": ("mbpp.sanitized_mbpp_mdblock_0shot_nocot_gen_a2e416", "sanitized_mbpp_datasets"),
    "humaneval": ("humaneval.humaneval_openai_sample_evals_gen_dcae0e", "humaneval_datasets"),
    "simpleqa": ("SimpleQA.simpleqa_gen_0283c3", "simpleqa_datasets"),
    "triviaqa": ("triviaqa.triviaqa_gen_0356ec", "triviaqa_datasets"),
}
_CHAT = {
    "round": [{"role": "HUMAN", "api_role": "HUMAN"}, {"role": "BOT", "api_role": "BOT", "generate": True}],
    "reserved_roles": [{"role": "SYSTEM", "api_role": "SYSTEM"}],
}


def _import_paths(value: Any) -> Any:
    """Replace classes and functions by their import paths, for JSON."""
    if isinstance(value, Mapping):
        return {key: _import_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_import_paths(item) for item in value]
    return f"{value.__module__}.{value.__qualname__}" if callable(value) else value


def stock_dataset(name: str) -> dict[str, Any]:
    """Return OpenCompass's own configuration of one of the paper's data sets.

    Raises MissingDependencyError without OpenCompass, ConfigError if this release lacks the data set.
    """
    module, variable = STOCK[name]
    try:
        importlib.import_module("opencompass")
    except ImportError as error:
        raise MissingDependencyError(
            f"OpenCompass cannot be imported ({error}); it needs its own environment, requirements/opencompass.txt"
        ) from error
    try:
        datasets = getattr(importlib.import_module(f"opencompass.configs.datasets.{module}"), variable)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"OpenCompass has no configuration {module}; 0.5.4 has it: {error}") from error
    return {**_import_paths(deepcopy(datasets[0])), "abbr": name}


def with_confidence(
    dataset: Mapping[str, Any],
    *,
    position: ConfidencePosition = "first",
    tokenizer_path: str | None = None,
    form: PromptForm | None = None,
    category: str | None = None,
) -> dict[str, Any]:
    """Add our system prompt to a data set's configuration and wrap its evaluator.

    ``dataset`` is any generation data set without few-shot examples, which contradict the response format.  With the
    ``form`` that a model was trained with, its system prompt is added, and a question is followed by the instruction of
    ``category``; if the form has none for it, OpenCompass's own prompt is kept.
    """
    config = deepcopy(dict(dataset))
    infer, evaluation = config["infer_cfg"], config["eval_cfg"]
    if "ice_template" in infer:
        raise ConfigError(
            f"data set {config['abbr']}: has few-shot examples, whose answers state no confidence; use a zero-shot one"
        )
    # A length here would override the model's; a stop word would cut the response after its confidence.
    for key in ("max_out_len", "stopping_criteria"):
        infer["inferencer"].pop(key, None)
    columns = config["reader_cfg"]["input_columns"]
    question = columns if isinstance(columns, str) else columns[0]
    instruction = None if form is None or category is None else form.instructions.get(category)
    if instruction is not None:
        text = f"{{{question}}}{instruction}"
        infer["prompt_template"]["template"] = {"round": [{"role": "HUMAN", "prompt": text}]}
        infer["prompt_template"].pop("messages", None)
    _add_system_prompt(infer["prompt_template"], SYSTEM_PROMPTS[position] if form is None else form.system_prompt)
    evaluation["evaluator"] = {
        "type": f"{_EVALUATORS}.ConfidenceEvaluator",
        "evaluator": evaluation["evaluator"],
        "answer_postprocessor": evaluation.pop("pred_postprocessor", None),
        "tokenizer_path": tokenizer_path,
        "position": position,
        "question_column": question,
    }
    if form is not None:
        evaluation["evaluator"] |= {"decimals": form.decimals, "thinking": form.thinking}
    if form is not None and instruction is not None:
        evaluation["evaluator"]["form"] = form.digest(instruction)
    return config


def _add_system_prompt(template: dict[str, Any], prompt: str | None) -> None:
    if "messages" in template:
        system = [] if prompt is None else [{"role": "system", "content": prompt}]
        template["messages"] = [*system, *template["messages"]]
        return
    body = template["template"]
    if isinstance(body, str):
        body = {"round": [{"role": "HUMAN", "prompt": body}]}
    # A reply prefix in the template ("A:") would precede the confidence.
    rounds = body["round"][:-1] if body["round"][-1]["role"] == "BOT" else body["round"]
    system = [] if prompt is None else [{"role": "SYSTEM", "fallback_role": "HUMAN", "prompt": prompt}]
    template["template"] = {**body, "begin": system, "round": rounds}


def paper_dataset(name: str, judge: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a data set of the paper with the grader that we use, before :func:`with_confidence`.

    AIME 2025 uses AIME 2024's prompt and rule; code runs in this project's sandbox; SimpleQA is graded by ``judge``.

    Raises ConfigError: SimpleQA without a judge.
    """
    config = stock_dataset(name)
    evaluation = config["eval_cfg"]
    stock = evaluation["evaluator"]
    if name == "aime25":
        evaluation["evaluator"] = stock["rule_evaluator"]
        config["infer_cfg"]["prompt_template"] = stock_dataset("aime24")["infer_cfg"]["prompt_template"]
    elif name == "mbpp_sanitized":
        evaluation["evaluator"] = {"type": f"{_EVALUATORS}.SandboxedMBPPEvaluator"}
    elif name == "humaneval":
        evaluation["evaluator"] = {"type": f"{_EVALUATORS}.SandboxedHumanEvalEvaluator"}
    elif name == "simpleqa":
        if judge is None:
            raise ConfigError("data set simpleqa: is graded by a judge model; name one, or leave the data set out")
        del config["mode"]
        questions = {key: config[key] for key in ("type", "path", "reader_cfg")}
        evaluation["evaluator"] = stock | {
            "type": "opencompass.evaluator.GenericLLMEvaluator",
            "judge_cfg": dict(judge),
            "dataset_cfg": {**questions, "abbr": f"{name}_judged"},
        }
    return config


def served_model(abbr: str, *, name: str, api_base: str, tokenizer_path: str, **more: Any) -> dict[str, Any]:
    """Return the configuration of a model behind an OpenAI-compatible endpoint (``api_base``: ``http://host:8000/v1``).

    ``abbr`` is its name in tables, ``name`` at the endpoint.  The settings are the paper's: temperature 1.0, at most
    4,096 new tokens; ``more`` changes them.  Without a local tokenizer OpenCompass would download GPT-4's.
    """
    return {
        "type": "opencompass.models.OpenAISDK",
        "abbr": abbr,
        "path": name,
        "key": "EMPTY",
        "openai_api_base": api_base,
        "tokenizer_path": tokenizer_path,
        "temperature": 1.0,
        "max_out_len": 4096,
        "max_seq_len": 32768,
        **dict.fromkeys(("query_per_second", "max_workers", "batch_size"), 32),
        "meta_template": _CHAT,
        **more,
    }


def paper_config(
    model: Mapping[str, Any],
    *,
    datasets: Sequence[str] = tuple(STOCK),
    judge: Mapping[str, Any] | None = None,
    position: ConfidencePosition = "first",
    samples: int = 1,
    form: PromptForm | None = None,
) -> dict[str, Any]:
    """Return the whole configuration: data sets of :data:`STOCK`, model, and a summary of every metric.

    ``judge`` grades SimpleQA.  ``samples`` is the number of samples of every question (n).  ``form`` is as in
    :func:`with_confidence`.
    """
    how: dict[str, Any] = {"position": position, "tokenizer_path": model.get("tokenizer_path"), "form": form}
    wrapped = [
        with_confidence(paper_dataset(name, judge), **how, category=category) | {"n": samples}
        for name in datasets
        for category, names in DATASETS.items()
        if name in names
    ]
    abbrs = [[dataset["abbr"], metric] for dataset in wrapped for metric in HEADLINE_METRICS]
    return {
        "datasets": wrapped,
        "models": [dict(model)],
        "summarizer": {"type": "opencompass.summarizers.DefaultSummarizer", "dataset_abbrs": abbrs},
    }


def main(argv: list[str] | None = None) -> int:
    """Write the configuration; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m coca_mindspeed.evaluation.opencompass.config",
        description="Write OpenCompass's configuration of the paper's evaluation as JSON.",
    )
    option = parser.add_argument
    option("--model", required=True, help="the model's name at the endpoint")
    option("--abbr", default="coca", help="the model's name in tables (default: %(default)s)")
    option("--api-base", required=True, help="OpenAI-compatible endpoint: http://host:8000/v1")
    option("--tokenizer", required=True, type=Path, help="directory of the model's tokenizer")
    option("--judge", help="name of the model that grades SimpleQA")
    option("--judge-api-base", help="endpoint of the judge (default: --api-base)")
    option("--judge-key", default="EMPTY", help="key of the judge; ENV reads OPENAI_API_KEY (default: %(default)s)")
    option("--datasets", nargs="+", choices=STOCK, default=list(STOCK), metavar="NAME", help="default: all")
    option(
        "--position", choices=tuple(SYSTEM_PROMPTS), help="last: answer-first models (default: the form's, or first)"
    )
    option("--form", type=Path, metavar="FILE", help=f"an exported model's {PROMPT_FILE}, whose prompts are sent")
    option("--samples", type=int, default=1, help="samples of every question (default: %(default)s)")
    option("--output", type=Path, required=True, help="the file to write, ending in .json")
    given = parser.parse_args(argv)
    if given.samples < 1:
        parser.error(f"--samples: expected 1 or more, found {given.samples}")
    shared = {"api_base": given.api_base, "tokenizer_path": str(given.tokenizer.absolute())}
    model, judge = served_model(given.abbr, name=given.model, **shared), None
    if given.judge is not None:
        shared["api_base"] = given.judge_api_base or given.api_base
        answer: dict[str, Any] = {"key": given.judge_key, "temperature": 0.0, "max_out_len": 16}
        judge = served_model("judge", name=given.judge, **shared, **answer)
    choices: dict[str, Any] = {"datasets": given.datasets, "samples": given.samples}
    try:
        position, form = "first", None
        if given.form is not None:
            trained = read_prompt_file(prompt_file(given.form) or given.form)
            position, form = METHODS[trained.method or "coca"].confidence_position, trained.form
        choices |= {"position": given.position or position, "form": form}
        write_json(given.output, paper_config(model, judge=judge, **choices))
    except CocaError as error:
        return print_failure(error, error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
