"""Checks of a local run's prompts and gold answers with the model's tokenizer, before its weights are read."""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.data.prompts import TEMPLATE_KEYS, TemplateKeys, check_template, render_prompts
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError, Problem, raise_problems
from coca_mindspeed.local.inputs import RunInputs, warm_up_format
from coca_mindspeed.local.model_files import ContextLimit, context_limit, read_model_config
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
    record, length = max(found, key=lambda pair: pair[1])
    reason = f"{len(found):,} gold answers have more tokens, {record.name} {length:,}"
    fix = f"set it to {length} or more besides the tokens of the confidence, or remove these records"
    return Problem("long-answers", "rollout.max_new_tokens", longest, reason, fix)


def _longer(tokenizer: Any, records: Sequence[Record], texts: Sequence[str], most: int) -> Iterator[tuple[Record, int]]:
    """The records whose texts have more than ``most`` tokens, and how many."""
    tokenized = _tokenized(tokenizer, records, texts, lambda text: _most_bytes(text) > most)
    yield from ((record, len(ids)) for record, ids in tokenized if len(ids) > most)


def _tokenized(
    tokenizer: Any, records: Sequence[Record], texts: Sequence[str], is_doubtful: Callable[[str], bool]
) -> Iterator[tuple[Record, list[int]]]:
    """The records whose texts are doubtful, and the token ids of these."""
    doubtful = [(record, text) for record, text in zip(records, texts, strict=True) if is_doubtful(text)]
    if doubtful:
        encoded = tokenizer([text for _, text in doubtful], add_special_tokens=False)["input_ids"]
        yield from ((record, ids) for (record, _), ids in zip(doubtful, encoded, strict=True))


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
    thinking: bool | None = False,
    show_progress: bool = True,
) -> None:
    """Refuse prompts that the model in ``path`` with this tokenizer cannot process, without reading its weights.

    Raises ConfigError for a chat template that is missing, refuses the prompt, drops a message, reads the clock or does
    not fit ``thinking`` (see ``check_template``), and for token ids or sequences beyond the model's; DataError names a
    record with an unusable prompt.
    """
    architecture, shown = read_model_config(path, model, where=where), f"{where}={path}"
    check_template(tokenizer, records, system_prompt, shown, keys, thinking=thinking)
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
    ids = _IdLimit(tokenizer, rows, model)
    ids.check_special_tokens()
    rowless = any(token_id >= rows for token_id in tokenizer.get_vocab().values())

    def is_doubtful(text: str) -> bool:
        return rowless or not text or _most_bytes(text) > room

    with StepProgress(len(records), show_progress, title="checking prompts", patience=_SILENT) as progress:
        for start in range(0, len(records), _CHUNK):
            chunk = records[start : start + _CHUNK]
            texts = render_prompts(tokenizer, chunk, system_prompt)
            for record, prompt in _tokenized(tokenizer, chunk, texts, is_doubtful):
                _check_length(record.name, len(prompt), limits)
                ids.check(record.name, prompt)
                if context is not None:
                    _check_context(record.name, len(prompt), limits, context, model)
            progress.show(start + len(chunk))


class _IdLimit(NamedTuple):
    """The ids of a tokenizer that have a row in the embedding of ``model``."""

    tokenizer: Any
    rows: float
    model: str  # key and path

    def check_special_tokens(self) -> None:
        for name in ("pad_token", "eos_token"):
            token_id = getattr(self.tokenizer, f"{name}_id")
            if token_id is not None and token_id >= self.rows:
                self._refuse(f"{name} {getattr(self.tokenizer, name)!r} the id {token_id}", f", or name another {name}")

    def check(self, name: str, prompt: Sequence[int]) -> None:
        if (token_id := max(prompt)) >= self.rows:
            token = self.tokenizer.convert_ids_to_tokens(token_id)
            self._refuse(f"{token!r} in the prompt of {name} the id {token_id}", "")

    def _refuse(self, what: str, fix: str) -> None:
        reason = f"its embedding has {self.rows} rows (vocab_size in config.json), its tokenizer gives {what}"
        fix = f"model.resize_token_embeddings({len(self.tokenizer)}) and save_pretrained{fix}"
        key, _, path = self.model.partition("=")
        raise_problems([Problem("token-id", key, path, reason, fix)])


def _check_length(name: str, length: int, limits: LengthLimits) -> None:
    if not 0 < length <= limits.prompt:
        raise DataError(f"{name}: its prompt has {length} tokens, expected 1 to {limits.prompt} ({limits.prompt_key})")


def _check_context(name: str, length: int, limits: LengthLimits, context: ContextLimit, model: str) -> None:
    if length >= context.tokens:
        raise DataError(
            f"{name}: its prompt has {length} tokens, and the context of {model} has {context.tokens} for prompt and "
            f"response: {context.reason}"
        )
    if length + limits.response > context.tokens:
        reason = f"with the prompt of {name} ({length} tokens) exceeds the {context.tokens} tokens of {model}: "
        fix = f"set it to {context.tokens - length} or less"
        raise_problems([Problem("context", limits.response_key, limits.response, reason + context.reason, fix)])


def _most_bytes(text: str) -> int:
    """Most bytes of a text's normal form.

    NFKC and NFKD expand a character up to 11 times, NFC and NFD 3 times, as SentencePiece a space, and it adds one.
    """
    return (3 if text.isascii() else 11) * len(text.encode()) + 3
