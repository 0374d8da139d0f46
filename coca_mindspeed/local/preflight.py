"""What can be known of a run before its model is loaded: every prompt fits, and every record can be graded."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.data.chat_template import TEMPLATE_KEYS, TemplateKeys, check_template
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.model_files import (
    ContextLimit,
    check_prompt_length,
    load_tokenizer,
    read_context_limit,
    read_model_config,
    render_prompts,
)
from coca_mindspeed.local.progress import StepProgress

_AT_ONCE = 1000  # prompts; few enough to show how far the check is
_CONTROL_TOKEN = re.compile(r"<.+>|\[.+\]")  # <pad>, <|endoftext|>, [PAD]
_PATIENCE = 3.0  # seconds without a sign of life


@dataclass(frozen=True)
class LengthLimits:
    """What the user allows, and by which keys or options.

    Attributes:
        prompt: longest prompt in tokens.
        response: longest response in tokens.
        prompt_key: what sets the first, for messages.
        response_key: what sets the second.
    """

    prompt: int
    response: int
    prompt_key: str = "rollout.max_prompt_tokens"
    response_key: str = "rollout.max_new_tokens"


def emulated_dtype(model: ModelConfig, device: torch.device) -> str | None:
    """What to tell somebody whose run would compute in a dtype that the processor only imitates; None: nothing.

    On an Intel Xeon without bfloat16 instructions an update of a model of 135 million parameters takes three times as
    long in bfloat16 as in float32.
    """
    if model.compute_dtype != "bfloat16" or device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return None
    processor = torch.cpu.get_capabilities()
    if processor.get("architecture") != "x86_64" or processor.get("avx512_bf16") or processor.get("amx_bf16"):
        return None
    return (
        "model.compute_dtype=bfloat16: this processor has no instructions for it and imitates them, several times "
        "slower than model.compute_dtype=float32"
    )


def check_prompts(
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
    """Refuse what the model in ``path`` could not be asked; its weights are not read.

    Raises:
        ConfigError: no tokenizer, no chat template, or one that refuses the prompt, leaves a message out, ends the
            prompt inside an open thought or reads the clock; token ids beyond the embedding; responses beyond its
            context.
        DataError: a prompt is empty, too long or not text; it names the record.
    """
    tokenizer = load_tokenizer(path, model, where=where)
    context = read_context_limit(path, model, where=where)
    check_token_ids(tokenizer, read_model_config(path, model, where=where), records, system_prompt, f"{where}={path}")
    check_template(
        tokenizer,
        records,
        system_prompt,
        f"{where}={path}",
        keys,
        allow_open_thinking=model.allow_open_thinking,
    )
    check_lengths(tokenizer, context, records, system_prompt, limits, f"{where}={path}", show_progress)


def check_token_ids(
    tokenizer: Any, architecture: Any, records: Sequence[Record], system_prompt: str | None, model: str
) -> None:
    """Refuse token ids that have no row in the model's embedding: of padding, of the end of a response, of a prompt.

    Args:
        tokenizer: the model's.
        architecture: its Hugging Face configuration, which says how many rows there are.
        records: to ask.
        system_prompt: the method's.
        model: names the model in messages.

    Raises:
        ConfigError: names the token.
    """
    rows = getattr(architecture, "vocab_size", None)
    if rows is None:
        return
    remedy = (
        f"but its embedding has {rows} rows (vocab_size in config.json); give it more (model.resize_token_embeddings("
        f"{len(tokenizer)}) and save_pretrained)"
    )
    for name in ("pad_token", "eos_token"):
        token_id = getattr(tokenizer, f"{name}_id")
        if token_id is not None and token_id >= rows:
            raise ConfigError(
                f"{model}: its tokenizer's {name} {getattr(tokenizer, name)!r} has the id {token_id}, {remedy}, or "
                f"name a token that it has as {name} in tokenizer_config.json"
            )
    beyond = {token: token_id for token, token_id in tokenizer.get_vocab().items() if token_id >= rows}
    if not beyond:
        return
    for start in range(0, len(records), _AT_ONCE):
        chunk = records[start : start + _AT_ONCE]
        encoded = tokenizer(render_prompts(tokenizer, chunk, system_prompt), add_special_tokens=False)["input_ids"]
        for record, ids in zip(chunk, encoded, strict=True):
            if ids and (token_id := max(ids)) >= rows:
                raise ConfigError(
                    f"{model}: the prompt of record {record.id!r} of {record.dataset} holds the token "
                    f"{tokenizer.convert_ids_to_tokens(token_id)!r} of id {token_id}, {remedy}"
                )


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
    context: ContextLimit | None,
    records: Sequence[Record],
    system_prompt: str | None,
    limits: LengthLimits,
    model: str,
    show_progress: bool,
) -> None:
    """See :func:`check_prompts`; ``model`` names the model in messages."""
    room = limits.prompt if context is None else min(limits.prompt, context.tokens - limits.response)
    with StepProgress(len(records), show_progress, title="checking prompts", patience=_PATIENCE) as progress:
        for start in range(0, len(records), _AT_ONCE):
            chunk = records[start : start + _AT_ONCE]
            for record, length in _lengths_to_check(tokenizer, chunk, system_prompt, room):
                check_prompt_length(record, length, limits.prompt, key=limits.prompt_key)
                if context is not None and length + limits.response > context.tokens:
                    raise ConfigError(
                        f"{limits.response_key}={limits.response}: with the prompt of record {record.id!r} of "
                        f"{record.dataset} ({length} tokens) a sequence may have {length + limits.response} tokens, "
                        f"but {model} takes {context.tokens}: {context.reason}; lower {limits.response_key}"
                    )
            progress.show(start + len(chunk), "")


def _lengths_to_check(
    tokenizer: Any, records: Sequence[Record], system_prompt: str | None, room: int
) -> list[tuple[Record, int]]:
    """Prompts that may not fit into ``room`` tokens, with their lengths.

    A token stands for at least one byte of the normalised text, and normal forms at most triple the bytes of a text
    (the one more is SentencePiece's leading space), so short texts need not be tokenised.
    """
    doubtful = [
        (record, text)
        for record, text in zip(records, render_prompts(tokenizer, records, system_prompt), strict=True)
        if not text or 3 * len(text.encode()) + 1 > room
    ]
    if not doubtful:
        return []
    encoded = tokenizer([text for _, text in doubtful], add_special_tokens=False)["input_ids"]
    return [(record, len(ids)) for (record, _), ids in zip(doubtful, encoded, strict=True)]
