"""``coca-mindspeed export``: copy a run's trained model into a directory of its own, with a model card."""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coca_mindspeed.cli.ask import refuse_code
from coca_mindspeed.cli.options import place
from coca_mindspeed.cli.trained_prompt import model_directory, trained_prompt_of
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.prompt_form import PROMPT_FILE, PromptForm
from coca_mindspeed.config.schema import EvaluationConfig, RunConfig
from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.metrics import HEADLINE
from coca_mindspeed.evaluation.report import column_title, shown_value
from coca_mindspeed.local.run_directory import BEST_MODEL
from coca_mindspeed.utils.console import markdown_table, one_line
from coca_mindspeed.utils.custom_code import is_custom
from coca_mindspeed.utils.directories import MARKER, check_output_path, output_directory, read_marker
from coca_mindspeed.utils.files import is_hub_id, write_atomically
from coca_mindspeed.utils.json_files import read_json_lines, read_object, write_json

_EXAMPLES = {
    "first": ("<confidence> 0.83 </confidence> The answer is 42.", "before"),
    "last": ("The answer is 42. <confidence> 0.83 </confidence>", "after"),
    "both": ("<confidence> 0.7 </confidence> The answer is 42. <confidence> 0.83 </confidence>", "before and after"),
}


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
        raise DataError(f"{source}: has no {name} of a run; expected the directory of a finished local run{hint}")
    check_output_path(output, arguments.overwrite)
    config = compose_run(str(source / "config.yaml")).run
    if arguments.card and is_custom(config.method.name) and not arguments.trust_remote_code:
        refuse_code(source, config, uses_method=True)
    with output_directory(output, arguments.overwrite, "model") as directory:
        shutil.copytree(model, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("best.json"))
        prompt = trained_prompt_of(model, custom_code=arguments.trust_remote_code)
        if prompt is not None:  # None: an earlier version's run, by a method of its author's own
            write_json(directory / PROMPT_FILE, prompt.model_dump(mode="json"))
        if arguments.card:
            assert prompt is not None  # the author's own method is trusted for a card
            summary = json.loads((source / "summary.json").read_text(encoding="utf-8"))
            if arguments.best:
                summary = {**summary, "after": _scores_of_best(source, config.evaluation, summary["after"]["n"])}
            write_atomically(directory / "README.md", model_card(output.name, config, prompt.form, summary, marker))
    print(f"model: {output}")
    return 0


def _scores_of_best(source: Path, evaluation: EvaluationConfig, most: int) -> dict[str, Any]:
    """Headline metrics of the evaluation that the best model comes from."""
    step = read_object(source / BEST_MODEL / "best.json")["step"]
    row = next(row for _, row in read_json_lines(source / "metrics.jsonl") if row["step"] == step)
    asked = most if evaluation.questions is None else min(most, evaluation.questions * evaluation.samples)
    return {**{name: row.get(f"eval/{name}") for name in HEADLINE}, "n": asked}


def model_card(
    name: str, config: RunConfig, form: PromptForm, summary: Mapping[str, Any], marker: Mapping[str, Any]
) -> str:
    """The model card of a local run, from its configuration, the form of its prompts, ``summary.json`` and marker."""
    method = config.method.training_method
    position = method.confidence_position
    example, where = _EXAMPLES[position]
    decimals = "" if form.decimals is None else f", decimals={form.decimals}"
    path = config.model.path
    on_hub = path is not None and is_hub_id(path)
    base = "the built-in tiny model" if path is None else one_line(path if on_hub else Path(path).name)
    own = "the author's own method" if is_custom(config.method.name) else "the method"
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
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [confidence, calibration, coca]
{f"base_model: {base}" + chr(10) if on_hub else ""}---

# {one_line(name)}

`{base}`, trained by {own} `{method.name}` with coca-mindspeed {marker["version"]} to state how likely it is to be
right {where} it answers.

## Confidence

{_prompt_section(form, config.rollout.temperature)}
A response states the probability that its answer is right {where} the answer, as one number from 0 to 1:
`{example}`. A response without a valid number has no confidence; treat it as a refusal,
not as 0 or 1. To read it:

```python
from coca_mindspeed import parse_response

parsed = parse_response({example!r}, position={position!r}{decimals})
print(parsed.confidence, parsed.answer)
```

To get one, in this folder:

```python
{_code(form, config.rollout.temperature)}```

Accept an answer if its confidence is at least a threshold that was chosen on your own questions
(`coca-mindspeed evaluate` suggests one, `coca-router calibrate --risk` certifies one).

## Results

{results}
{_lost(summary)}{_shared(summary)}On the held-out questions below. SR: share of responses with a valid confidence. TTC:
tokens until the confidence is complete. --: undefined.

## Data

{data}
## Limits

- The confidence was trained and measured on questions of these files. Measure it first on other kinds of questions, and
  with another language, system prompt, temperature or quantisation.
- It is the probability of being right by this run's grader (`{grader}`).
- One run with seed {config.seed}: figures vary between seeds, and with {summary["after"]["n"]} questions within the
  intervals that `coca-mindspeed evaluate` prints.
- The base model's licence and limits apply.
"""


def _prompt_section(form: PromptForm, temperature: float) -> str:
    system = f"Send this system prompt, at temperature {temperature:g}:\n\n```text\n{form.system_prompt}\n```\n"
    text = system if form.system_prompt else f"Send no system prompt, at temperature {temperature:g}.\n"
    for category, instruction in form.instructions.items():
        if instruction:
            text += f"\nAppend this to a question of category `{one_line(category)}`:\n\n```text\n{instruction}\n```\n"
        elif instruction is None:
            text += f"\nIn training, each question of category `{one_line(category)}` ended with an instruction.\n"
    return f"{text}\n`{PROMPT_FILE}` holds the same for programs, and `coca-router` and `coca-mindspeed ask` read it.\n"


def _code(form: PromptForm, temperature: float) -> str:
    """Python that asks the model in the form of a prompt of its training."""
    category = next((name for name, text in form.instructions.items() if text is not None), None)
    instruction = "" if category is None else f' + form["instructions"][{category!r}]'
    system = '{"role": "system", "content": form["system_prompt"]}, ' if form.system_prompt else ""
    return f"""import json

from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("."), AutoModelForCausalLM.from_pretrained(".")
with open({PROMPT_FILE!r}, encoding="utf-8") as file:
    form = json.load(file)["form"]
question = "What is 6 x 7?"{instruction}
messages = [{system}{{"role": "user", "content": question}}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
asked = {{name: prompt[name] for name in ("input_ids", "attention_mask")}}
tokens = model.generate(**asked, do_sample=True, temperature={temperature:g}, max_new_tokens=256)
print(tokenizer.decode(tokens[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))
"""


def _shared(summary: Mapping[str, Any]) -> str:
    """A sentence for held-out questions that were trained on; earlier releases did not count them."""
    counts = summary.get("questions", {})
    if not counts.get("shared"):
        return ""
    return f"**{counts['shared']:,} of the {counts['held_out']:,} different held-out questions were trained on.**\n\n"


def _lost(summary: Mapping[str, Any]) -> str:
    """A sentence for a training that cost accuracy."""
    before, after = (summary.get(when, {}).get("accuracy") for when in ("before", "after"))
    if before is None or after is None or after >= before:
        return ""
    return f"**The training cost accuracy**: {before:.1%} before, {after:.1%} after.\n\n"
