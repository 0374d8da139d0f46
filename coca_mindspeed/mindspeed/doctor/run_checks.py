"""Which prompts of a file are too long for a run, without tokenizing those that cannot be."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coca_mindspeed.config.schema import ArchitectureConfig, RunConfig
from coca_mindspeed.data.prepare.filters import PromptCounter
from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import read_records
from coca_mindspeed.errors import CocaError
from coca_mindspeed.mindspeed.doctor.machine import Diagnosis, Machine, finding
from coca_mindspeed.mindspeed.plan.cluster_plan import Plan, make_plan
from coca_mindspeed.mindspeed.plan.memory import checkpoint_bytes
from coca_mindspeed.mindspeed.plan.refusals import refusals
from coca_mindspeed.mindspeed.plan.upstream_keys import keys_where_there_is_a_checkout
from coca_mindspeed.mindspeed.stages.verifiers import OWN_VERIFIER, try_verifier
from coca_mindspeed.mindspeed.start.cluster import wanted_cpus
from coca_mindspeed.mindspeed.start.prompt_template import try_template
from coca_mindspeed.mindspeed.start.settings import coca_settings
from coca_mindspeed.mindspeed.weights.checkpoints import checkpoint_layout

# A token stands for a byte at least, so a prompt has at most as many tokens as bytes.  Chat templates add a few dozen
# bytes around each message, and some a date or a default system prompt.
_TEMPLATE_BYTES = 512


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """A record whose prompt is too long."""

    record: str
    tokens: int


def too_long(
    path: Path, model: Path, system_prompt: str | None, limit: int, variables: Mapping[str, Any] | None = None
) -> list[LongPrompt]:
    """Prompts of more than ``limit`` tokens, chat template included, in the order of the file.

    Args:
        path: records, JSON Lines.
        model: Hugging Face directory with the tokenizer; only loaded if a prompt has enough bytes to be too long.
        system_prompt: the method's.
        limit: in tokens.
        variables: of the chat template.

    Raises:
        DataError: the file holds something else than records, or the directory no tokenizer.
    """
    counter: PromptCounter | None = None
    found = []
    for record in read_records(path):
        messages = prompt_messages(record, system_prompt)
        if sum(len(message["content"].encode("utf-8")) for message in messages) + _TEMPLATE_BYTES <= limit:
            continue
        counter = counter or PromptCounter(model, system_prompt, variables)
        if (tokens := counter(record)) > limit:
            found.append(LongPrompt(record.id, tokens))
    return found


_HF_KEYS = {  # our name of a shape -> the key of config.json
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_groups": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "rope_theta": "rope_theta",
}


def cpus(machine: Machine, run: RunConfig) -> Diagnosis:
    """Ray gives every NPU its CPUs on the same node, and waits for ever where there are too few."""
    wanted = wanted_cpus(run.mindspeed_rl.get("rl_config") or {}, run.hardware.nodes)
    needed = wanted.per_npu * run.hardware.npus_per_node + (wanted.others if run.hardware.nodes == 1 else 0)
    fix = f"lower mindspeed_rl.rl_config.num_cpus_for_placement_group ({wanted.per_npu}), or let this process have more"
    shown = f"{needed} or more ({wanted.per_npu} an NPU, {wanted.others} besides)"
    return finding("CPUs", str(machine.cpus()), shown, machine.cpus() >= needed, fix)


def _grader(run: RunConfig) -> Diagnosis:
    names = list((run.mindspeed_rl.get("rl_config") or {}).get("verifier_function") or [])
    coca = run.mindspeed_rl.get("coca") or {}
    grader = coca.get("grader", "auto")
    shown = f"{', '.join(names)} ({grader})" if OWN_VERIFIER in names else ", ".join(names)
    files = [Path(path) for path in (run.data.train, run.data.evaluate) if path is not None]
    wanted = "can be built here, with all that it needs, and can grade every record"
    try:
        try_verifier(names, grader, coca.get("grading") or {}, files)
    except (CocaError, ImportError) as error:
        return Diagnosis("grader", shown, wanted, str(error))
    return Diagnosis("grader", shown, wanted)


def _disk(machine: Machine, run: RunConfig, plan: Plan, output: Path) -> Diagnosis:
    """Room for the checkpoints that will be kept at one time, and for the one that is being written."""
    stages = len(run.method.training_method.stages)
    there = sum(1 for _ in output.glob("stage*/checkpoints/iter_*"))
    more = max(1, run.checkpoint.keep * stages + 1 - there)
    needed, free = more * checkpoint_bytes(plan.facts), machine.free_bytes(output)
    wanted = f"{needed / 1e9:.0f} GB or more ({more} checkpoints)"
    fix = f"make room at {output}, choose another --output, or lower checkpoint.keep ({run.checkpoint.keep})"
    return finding("free space", f"{free / 1e9:.0f} GB", wanted, free >= needed, fix)


def findings_of_run(machine: Machine, run: RunConfig, output: Path | None) -> Iterator[Diagnosis]:
    plan: Plan | None = None
    try:
        plan = make_plan(run)
        problems = "; ".join(refusals(run, plan))
        yield finding("plan", "refused" if problems else "holds", "holds", not problems, problems)
    except CocaError as error:
        yield Diagnosis("plan", "none", "holds", str(error))
    if run.model.path is not None and run.model.architecture is not None:
        yield _model(Path(run.model.path), run.model.architecture)
        yield from _end_of_text(Path(run.model.path))
    if plan is not None and (run.hardware.platform == "npu" or run.mindspeed_rl["actor_config"].get("load")):
        yield _weights(run, plan)
    if plan is not None:
        yield _disk(machine, run, plan, output or Path("runs"))
    yield _grader(run)
    files = [Path(path) for path in (run.data.train, run.data.evaluate) if path is not None]
    if run.model.path is not None and any(file.is_file() for file in files):
        yield _template(run, files)
    for key, value in (("data.train", run.data.train), ("data.evaluate", run.data.evaluate)):
        if value is not None:
            fix = f"coca-mindspeed data prepare (docs/data.md), or {key}=FILE"
            yield finding(key, value, "a file", Path(value).is_file(), fix)
            if Path(value).is_file() and run.model.path is not None:
                yield _prompts(run, key, Path(value))
    yield from _keys(machine, run)


def _prompts(run: RunConfig, key: str, path: Path) -> Diagnosis:
    """Whether every prompt fits: when the data set is built, a longer one ends the run, after its workers started."""
    limit = run.rollout.max_prompt_tokens
    name, wanted = f"prompts of {key}", f"at most {limit} tokens (rollout.max_prompt_tokens)"
    try:
        system_prompt, variables = run.method.training_method.system_prompt, run.model.chat_template_kwargs
        longer = too_long(path, Path(str(run.model.path)), system_prompt, limit, variables)
    except (CocaError, ImportError, RuntimeError) as error:  # the latter two: transformers itself is broken
        return Diagnosis(name, "not counted", wanted, str(error))
    if not longer:
        return Diagnosis(name, "none longer", wanted)
    longest = max(longer, key=lambda prompt: prompt.tokens)
    found = f"{len(longer)} longer, the longest {longest.tokens} (record {longest.record!r})"
    fix = f"coca-mindspeed data prepare ... --tokenizer {run.model.path} --max-tokens {limit}"
    return Diagnosis(name, found, wanted, f"{fix}; or a larger rollout.max_prompt_tokens")


def _template(run: RunConfig, files: list[Path]) -> Diagnosis:
    """Whether the chat template's prompts can be trained on; the driver asks the same."""
    name, wanted = "chat template", "prompts with all messages, without an open thought and without today's date"
    section = {**(run.mindspeed_rl.get("coca") or {}), "output_dir": "runs"}  # a run's own is made when it is started
    try:
        try_template(Path(str(run.model.path)), files, coca_settings(section))
    except (CocaError, ImportError, RuntimeError) as error:  # the latter two: transformers itself is broken
        return Diagnosis(name, "not trained on", wanted, str(error))
    return Diagnosis(name, "holds", wanted)


def _keys(machine: Machine, run: RunConfig) -> Iterator[Diagnosis]:
    try:
        keys = keys_where_there_is_a_checkout(machine.environment)
    except CocaError:
        return  # the finding on MindSpeed-RL's checkout says so
    if keys is not None:
        unknown = "; ".join(f"mindspeed_rl.{line}" for line in keys.unknown(run.mindspeed_rl))
        yield finding("keys of MindSpeed-RL", "unknown ones" if unknown else "known", "known", not unknown, unknown)


def _model(path: Path, architecture: ArchitectureConfig) -> Diagnosis:
    wanted = "a Hugging Face directory with the shapes of model.architecture"
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fix = f"download the model there, or model.path=DIR ({type(error).__name__})"
        return Diagnosis("model.path", str(path), wanted, fix)
    differing = [
        f"{key} is {config.get(key)}, model.architecture.{name} {getattr(architecture, name)}"
        for name, key in _HF_KEYS.items()
        if config.get(key) != getattr(architecture, name)
    ]
    return finding("model.path", str(path), wanted, not differing, "; ".join(differing))


def _end_of_text(path: Path) -> Iterator[Diagnosis]:
    """Whether a turn of the chat ends with the token that the tokenizer calls end of text.

    vLLM stops at the model's own end of a turn.  MindSpeed-RL cuts a response behind the tokenizer's, which is also its
    padding: where they differ, a token that was never sampled is trained.
    """
    try:
        tokenizer = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # the prompts are counted with it, which says what is wrong
    end = tokenizer.get("eos_token")
    token = str(end.get("content") if isinstance(end, dict) else end)
    layout = tokenizer.get("chat_template")
    if (path / "chat_template.jinja").is_file():
        layout = (path / "chat_template.jinja").read_text(encoding="utf-8")
    text = layout if isinstance(layout, str) else json.dumps(layout or "", ensure_ascii=False)
    marks = {str(mark.get("content")) for mark in (tokenizer.get("added_tokens_decoder") or {}).values()}
    # A template of plain text, or none, ends its turns with nothing: the model's own end of text is all there is.
    ends = token in text or "eos_token" in text or not any(mark in text for mark in marks)
    fix = (
        f"set eos_token in {path / 'tokenizer_config.json'} to the token that ends a turn of its chat template (for "
        "Llama 3: <|eot_id|>), as later versions of the model have it"
    )
    yield finding("end of text", token, "the end of a turn of the chat template", ends, fix)


def _weights(run: RunConfig, plan: Plan) -> Diagnosis:
    wanted = f"Megatron weights for TP {plan.facts.tp}, PP {plan.facts.pp}"
    path = str(run.mindspeed_rl["actor_config"].get("load"))
    fix = "bash launch/convert_weights.sh hf2mcore RUN"
    try:
        layout = checkpoint_layout(Path(path))
    except CocaError as error:
        return Diagnosis("weights", path, wanted, f"{error}; {fix}")
    found = f"{path}: TP {layout.tp}, PP {layout.pp}"
    return finding("weights", found, wanted, (layout.tp, layout.pp) == (plan.facts.tp, plan.facts.pp), fix)
