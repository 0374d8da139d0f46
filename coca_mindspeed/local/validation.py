"""Records of a local run, and checks of them before its weights are read.

Records are read without torch.  Checks of prompts, token ids and lengths use the model's tokenizer.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.algorithm.parsing import ResponseFormat
from coca_mindspeed.config.plan import QuestionCounts
from coca_mindspeed.config.prompt_form import TrainedPrompt
from coca_mindspeed.config.schema import DataConfig, ModelConfig, RunConfig
from coca_mindspeed.data.arithmetic import Split, arithmetic_records
from coca_mindspeed.data.prompts import TEMPLATE_KEYS, TemplateKeys, check_template, form_of, render_prompts
from coca_mindspeed.data.records import Record
from coca_mindspeed.data.registry import read_own
from coca_mindspeed.errors import DataError, Problem, raise_problems
from coca_mindspeed.grading.verdict import MeasuredGrader
from coca_mindspeed.local.model_files import context_limit, read_model_config
from coca_mindspeed.local.run_directory import (
    RunState,
)
from coca_mindspeed.utils.custom_code import is_custom
from coca_mindspeed.utils.progress import StepProgress

_CHUNK = 200  # prompts checked at a time; small enough to show progress
_CONTROL_TOKEN = re.compile(r"<.+>|\[.+\]")  # <pad>, <|endoftext|>, [PAD]
_SILENT = 3.0  # seconds before progress is shown


@dataclass(frozen=True)
class LengthLimits:
    """Longest prompt and response in tokens, and the keys or options that set them."""

    prompt: int
    response: int
    prompt_key: str = "rollout.max_prompt_tokens"
    response_key: str = "rollout.max_new_tokens"


@dataclass(frozen=True)
class RunInputs:
    """Records, grader and complete configuration of a run whose weights are not read yet."""

    state: RunState  # of its directory
    config: RunConfig  # complete: with the number of steps, and the directory of a model of the hub
    grader: MeasuredGrader
    train: Sequence[Record]
    evaluate: Sequence[Record]
    warm_up: Sequence[Record]
    digests: Mapping[str, Mapping[str, Any]]  # of the records, by the names of the sets
    model: Path | None  # that the run starts from; None: the built-in one
    where: str  # names the model in messages
    show_progress: bool

    @cached_property
    def questions(self) -> QuestionCounts:
        train, evaluate = ([record.question for record in records] for records in (self.train, self.evaluate))
        return QuestionCounts.of(train, evaluate, self.config.total_steps * self.config.rollout.prompts)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """Return the warnings of the run's questions."""
        data = self.config.data
        if data.name == "records":
            return self.questions.warnings("data.train", data.train, "data.evaluate", data.evaluate)
        return self.questions.warnings("data.train_size", data.train_size, "data.evaluate_size", data.evaluate_size)


def load_data(config: DataConfig) -> tuple[list[Record], list[Record]]:
    """Training and held-out records; raises DataError if a file cannot be read or holds no records."""
    if config.name == "arithmetic":
        return _arithmetic(config, "train"), _arithmetic(config, "evaluate")
    train = _read("data.train", str(config.train), config.columns)
    if config.evaluate is None:
        return train, []
    return train, _read("data.evaluate", config.evaluate, config.columns_of_evaluate)


def trained_prompt(config: RunConfig, train: Sequence[Record]) -> TrainedPrompt:
    """Return the form of the prompts of a run that trains on ``train``."""
    method = config.method
    variables = config.model.chat_template_kwargs
    form = form_of(train, method.training_method.system_prompt, variables, method.confidence_decimals)
    return TrainedPrompt(
        form=form,
        method=None if is_custom(method.name) else method.name,
        max_confidence_tokens=method.max_confidence_tokens,
        max_new_tokens=config.rollout.max_new_tokens,
    )


def _arithmetic(config: DataConfig, split: Split) -> list[Record]:
    size = config.train_size if split == "train" else config.evaluate_size
    try:
        return arithmetic_records(size, split, config.seed)
    except ValueError as error:
        raise DataError(f"data.{split}_size={size}: {error}") from error


def _read(key: str, path: str, columns: Mapping[str, str]) -> list[Record]:
    records = read_own(path, columns)
    if not records:
        raise DataError(f"{key}={path}: holds no records")
    return records


def read_warm_up_records(config: RunConfig) -> list[Record]:
    """The records of ``warm_up.records``, if it is set; DataError if one of their answers cannot be a response."""
    if config.warm_up.records is None:
        return []
    records = _read("warm_up.records", config.warm_up.records, config.data.columns)
    for record in records:
        where = f"warm_up.records: {record.name}"
        if not record.answer.strip():
            raise DataError(f"{where} has no answer")
        if config.warm_up.wrong_answers and not any(character.isdecimal() for character in record.answer):
            raise DataError(
                f"{where}: warm_up.wrong_answers={config.warm_up.wrong_answers:g} changes a digit, and its answer "
                f"{record.answer!r:.80} has none; set warm_up.wrong_answers=0"
            )
    return records


_DECIMALS = 2  # of a confidence where the method asks for no number of them


def warm_up_format(method: MethodSettings) -> ResponseFormat:
    """The format of the responses of ``warm_up.records``."""
    return ResponseFormat(
        method.training_method.confidence_position, method.confidence_decimals or _DECIMALS, spaced=True
    )


def check_answers(tokenizer: Any, inputs: RunInputs) -> Problem | None:
    """Raise DataError if ``rollout.max_new_tokens`` would cut a response of the warm-up off.

    Returns a problem of gold answers that are longer, if there are any: a response can then only give a shorter form.
    """
    longest, written = inputs.config.rollout.max_new_tokens, warm_up_format(inputs.config.method)
    texts = [written.response(record.answer, 0.0, 0.0) for record in inputs.warm_up]
    for record, length in _longer(tokenizer, inputs.warm_up, texts, longest - 1):  # and the end of the turn
        raise DataError(
            f"warm_up.records: {record.name}: its answer with a confidence has {length + 1} tokens, and "
            f"rollout.max_new_tokens={longest} would cut it off; set rollout.max_new_tokens={length + 1} or more, or "
            "remove the record"
        )
    asked = [*inputs.train, *inputs.evaluate]
    found = list(_longer(tokenizer, asked, [record.answer for record in asked], longest))
    if not found:
        return None
    record, length = max(found, key=lambda each: each[1])
    reason = f"{len(found):,} gold answers have more tokens, {record.name} {length:,}"
    fix = f"set it to {length} or more besides the tokens of the confidence, or remove these records"
    return Problem("long-answers", "rollout.max_new_tokens", longest, reason, fix)


def _longer(tokenizer: Any, records: Sequence[Record], texts: Sequence[str], most: int) -> Iterator[tuple[Record, int]]:
    """The records whose texts have more than ``most`` tokens, and how many."""
    doubtful = [(record, text) for record, text in zip(records, texts, strict=True) if _most_bytes(text) > most]
    ids = tokenizer([text for _, text in doubtful], add_special_tokens=False)["input_ids"] if doubtful else []
    yield from ((record, len(own)) for (record, _), own in zip(doubtful, ids, strict=True) if len(own) > most)


def check_prompts(
    tokenizer: Any,
    path: Path,
    model: ModelConfig,
    records: Sequence[Record],
    system_prompt: str | None,
    limits: LengthLimits,
    *,
    where: str = "model.path",
    keys: TemplateKeys = TEMPLATE_KEYS,
    show_progress: bool = True,
) -> None:
    """Refuse prompts that the model in ``path`` with this tokenizer cannot process, without reading its weights.

    Raises ConfigError for a chat template that is missing, refuses the prompt, drops a message, opens a thought or
    reads the clock, and for token ids or sequences beyond the model's; DataError names a record with an unusable
    prompt.
    """
    architecture, shown = read_model_config(path, model, where=where), f"{where}={path}"
    check_template(tokenizer, records, system_prompt, shown, keys, allow_open_thinking=model.allow_open_thinking)
    check_lengths(tokenizer, architecture, records, system_prompt, limits, shown, show_progress)


def ordinary_pad_token(tokenizer: Any) -> str | None:
    """The padding token if it is a piece of ordinary text, which the policy could then never write; else None."""
    token, pad_id = tokenizer.pad_token, tokenizer.pad_token_id
    if pad_id is None or pad_id == tokenizer.eos_token_id or _CONTROL_TOKEN.fullmatch(token):
        return None
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("vocab") or {}
    pieces = vocabulary if isinstance(vocabulary, dict) else {piece for piece, *_ in vocabulary}  # Unigram: a list
    return str(token) if token in pieces else None


def check_lengths(
    tokenizer: Any,
    architecture: Any,
    records: Sequence[Record],
    system_prompt: str | None,
    limits: LengthLimits,
    model: str,
    show_progress: bool,
) -> None:
    """Refuse prompts of a wrong length, or ids without a row in the embedding of ``architecture`` (``model``).

    A token stands for at least one byte of the normalised text, whose length :func:`_most_bytes` bounds, so short texts
    are not tokenized, unless the vocabulary has ids without a row.
    """
    context, rows = context_limit(architecture), getattr(architecture, "vocab_size", math.inf)
    room = limits.prompt if context is None else min(limits.prompt, context.tokens - limits.response)
    rowless = any(token_id >= rows for token_id in tokenizer.get_vocab().values())

    def refuse_id(what: str, fix: str) -> None:
        reason = f"its embedding has {rows} rows (vocab_size in config.json), its tokenizer gives {what}"
        fix = f"model.resize_token_embeddings({len(tokenizer)}) and save_pretrained{fix}"
        key, _, path = model.partition("=")
        raise_problems([Problem("token-id", key, path, reason, fix)])

    for name in ("pad_token", "eos_token"):
        token_id = getattr(tokenizer, f"{name}_id")
        if token_id is not None and token_id >= rows:
            refuse_id(f"{name} {getattr(tokenizer, name)!r} the id {token_id}", f", or name another {name}")
    with StepProgress(len(records), show_progress, title="checking prompts", patience=_SILENT) as progress:
        for start in range(0, len(records), _CHUNK):
            chunk = records[start : start + _CHUNK]
            texts = render_prompts(tokenizer, chunk, system_prompt)
            doubtful = [
                (record, text)
                for record, text in zip(chunk, texts, strict=True)
                if rowless or not text or _most_bytes(text) > room
            ]
            texts = [text for _, text in doubtful]
            prompts = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
            for (record, _), ids in zip(doubtful, prompts, strict=True):
                name, length = record.name, len(ids)
                if not 0 < length <= limits.prompt:
                    raise DataError(
                        f"{name}: its prompt has {length} tokens, expected 1 to {limits.prompt} ({limits.prompt_key})"
                    )
                if (token_id := max(ids)) >= rows:
                    token = tokenizer.convert_ids_to_tokens(token_id)
                    refuse_id(f"{token!r} in the prompt of {name} the id {token_id}", "")
                if context is not None and length >= context.tokens:
                    raise DataError(
                        f"{name}: its prompt has {length} tokens, and the context of {model} has {context.tokens} for "
                        f"prompt and response: {context.reason}"
                    )
                if context is not None and length + limits.response > context.tokens:
                    reason = (
                        f"with the prompt of {name} ({length} tokens) exceeds the {context.tokens} tokens of {model}: "
                        f"{context.reason}"
                    )
                    fix = f"set it to {context.tokens - length} or less"
                    raise_problems([Problem("context", limits.response_key, limits.response, reason, fix)])
            progress.show(start + len(chunk))


def _most_bytes(text: str) -> int:
    """Most bytes of a text's normal form.

    NFKC and NFKD expand a character up to 11 times, NFC and NFD 3 times, as SentencePiece a space, and it adds one.
    """
    return (3 if text.isascii() else 11) * len(text.encode()) + 3
