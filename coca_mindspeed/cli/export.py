"""``coca-mindspeed export``: copy a run's trained model into a directory of its own, with a model card."""

import argparse
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment

from coca_mindspeed.algorithm.parsing import END_THINK_TAG, SEGMENTS, ResponseFormat
from coca_mindspeed.cli.local_model import refuse_code
from coca_mindspeed.cli.options import place
from coca_mindspeed.cli.trained_prompt import model_directory, trained_prompt_of
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.prompt_form import PROMPT_FILE, PromptForm
from coca_mindspeed.config.schema import EvaluationConfig, RunConfig
from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.metrics import HEADLINE
from coca_mindspeed.evaluation.predictions import read_predictions
from coca_mindspeed.evaluation.report import column_title, shown_value
from coca_mindspeed.evaluation.scoreboard import Run, Scoreboard
from coca_mindspeed.local.run_directory import BEST_MODEL
from coca_mindspeed.utils.console import markdown_table, one_line
from coca_mindspeed.utils.custom_code import is_custom
from coca_mindspeed.utils.directories import MARKER, check_output_path, output_directory, read_marker
from coca_mindspeed.utils.files import is_hub_id, write_atomically
from coca_mindspeed.utils.json_files import read_json_lines, read_object

_CARD = Path(__file__).with_name("model_card.md.j2")
_WHERE = {"first": "before", "last": "after", "both": "before and after"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_directory",
        type=place,
        metavar="RUN",
        help="directory of a local run; of a stopped one, its newest checkpoint",
    )
    parser.add_argument("--output", type=place, required=True, metavar="DIR", help="where the model goes")
    best = "the model that checkpoint.best kept instead of the last one"
    parser.add_argument("--best", action="store_true", help=best)
    parser.add_argument("--card", action="store_true", help="write a model card, README.md, with the run's metrics")
    trust = "run the Python code of the run's own method, which its card describes"
    parser.add_argument("--trust-remote-code", action="store_true", help=trust)
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")


def run(arguments: argparse.Namespace) -> int:
    source, output = arguments.run_directory, arguments.output
    marker = read_marker(source, "run")
    model = source / BEST_MODEL if arguments.best else model_directory(source)
    needed = (model, source / "config.yaml", *([source / "summary.json"] if arguments.card else []))
    missing = [path.name for path in needed if not path.exists()]
    if marker is None or missing:
        name = MARKER if marker is None else missing[0]
        hint = " with checkpoint.best" if arguments.best else ""
        if (source / "stage0").is_dir():
            hint = f"; a run on MindSpeed-RL is exported by launch/convert_weights.sh mcore2hf RUN --output {source}"
        raise DataError(f"{source}: has no {name} of a run; expected the directory of a finished local run{hint}")
    check_output_path(output, arguments.overwrite)
    config = compose_run(str(source / "config.yaml")).run
    if arguments.card and is_custom(config.method.name) and not arguments.trust_remote_code:
        refuse_code(source, config, uses_method=True)
    with output_directory(output, arguments.overwrite, "model") as directory:
        shutil.copytree(model, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("best.json"))
        prompt = trained_prompt_of(model, custom_code=arguments.trust_remote_code)
        if prompt is not None:  # None: an earlier version's run, by a method of its author's own
            prompt.write(directory)
        if arguments.card:
            assert prompt is not None  # the author's own method is trusted for a card
            summary = read_object(source / "summary.json", after=dict)
            if arguments.best:
                summary = {**summary, "after": _scores_of_best(source, config.evaluation, summary["after"]["n"])}
            lost = not arguments.best and _lost_accuracy(source)  # the best model's answers are not kept
            card = model_card(output.name, config, prompt.form, summary, marker, lost_accuracy=lost)
            write_atomically(directory / "README.md", card)
    print(f"model: {output}")
    return 0


def _scores_of_best(source: Path, evaluation: EvaluationConfig, most: int) -> dict[str, Any]:
    """Headline metrics of the evaluation that the best model comes from."""
    best, log = source / BEST_MODEL / "best.json", source / "metrics.jsonl"
    step = read_object(best, step=int).get("step")
    row = next((row for _, row in read_json_lines(log) if row.get("step") == step), None)
    if row is None:
        raise DataError(f"{best}: step: expected a step of {log.name}, found {step}; restore the file")
    asked = most if evaluation.questions is None else min(most, evaluation.questions * evaluation.samples)
    return {**{name: row.get(f"eval/{name}") for name in HEADLINE}, "n": asked}


def _lost_accuracy(source: Path) -> bool:
    """Whether fewer answers are right after the training, with a 95% interval, paired by question, below 0."""
    files = [source / f"predictions_{when}.jsonl" for when in ("before", "after")]
    if not all(file.is_file() for file in files):
        return False
    before, after = (
        Run(file.stem, [replace(p, dataset="all", id=f"{p.dataset} {p.id}") for p in read_predictions(file)])
        for file in files
    )
    interval = Scoreboard([before, after]).difference(before, after, "all").intervals.get("accuracy")
    return interval is not None and interval.high < 0


def model_card(
    name: str,
    config: RunConfig,
    form: PromptForm,
    summary: Mapping[str, Any],
    marker: Mapping[str, Any],
    *,
    lost_accuracy: bool = False,
) -> str:
    """The model card of a local run, from its configuration, the form of its prompts, ``summary.json`` and marker.

    ``lost_accuracy``: fewer answers are right after the training, beyond chance.
    """
    method = config.method.training_method
    position, thought = method.confidence_position, f"6 x 7 is 42. {END_THINK_TAG} " if form.thinking else ""
    confidences = [0.7, 0.83][-len(SEGMENTS[position]) + 1 :]
    example = ResponseFormat(position, form.decimals or 2, spaced=True).response(
        f"{thought}The answer is 42.", *confidences
    )
    path = config.model.path
    on_hub = path is not None and is_hub_id(path)
    base = "the built-in tiny model" if path is None else one_line(path if on_hub else Path(path).name)
    grader = config.data.grader
    grader = Path(grader.partition(":")[0]).name if is_custom(grader) else grader  # without the author's folders
    rows = [
        [when, *(shown_value(k, summary[when].get(k)) for k in HEADLINE)]
        for when in ("before", "after")
        if when in summary
    ]
    results = markdown_table(["training", *map(column_title, HEADLINE)], rows, numbers=range(1, len(HEADLINE) + 1))
    data = markdown_table(
        ["use", "file", "questions", "SHA-256 of the records"],
        [[use, getattr(config.data, use, None) or "", d["records"], d["sha256"]] for use, d in marker["data"].items()],
    )
    environment = Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"one_line": one_line, "repr": repr}
    before, after = (summary.get(when, {}).get("accuracy") for when in ("before", "after"))
    return environment.from_string(_CARD.read_text(encoding="utf-8")).render(
        name=one_line(name),
        base=base,
        on_hub=on_hub,
        own_method=is_custom(config.method.name),
        method=method,
        example=example,
        where=_WHERE[position],
        form=form,
        prompt_file=PROMPT_FILE,
        category=next((name for name, text in form.instructions.items() if text is not None), None),
        temperature=f"{config.rollout.temperature:g}",
        max_new_tokens=max(256, config.rollout.max_new_tokens),
        results=results,
        lost=(before, after) if lost_accuracy else None,
        counts=summary.get("questions", {}),  # earlier releases did not count them
        summary=summary,
        data=data,
        marker=marker,
        grader=grader,
        seed=config.seed,
    )
