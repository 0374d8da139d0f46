"""What can be known of a run before its model is loaded: every prompt fits, and every record can be graded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.chat import check_prompt_length, load_tokenizer, render_prompts
from coca_mindspeed.local.context import ContextLimit, read_context_limit
from coca_mindspeed.local.progress import StepProgress

_AT_ONCE = 1000  # prompts; few enough to show how far the check is
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
    show_progress: bool = True,
) -> None:
    """Refuse what the model in ``path`` could not be asked; its weights are not read.

    Raises:
        ConfigError: no tokenizer, no chat template or one that refuses the prompt; responses beyond its context.
        DataError: a prompt is empty, too long or not text; it names the record.
    """
    tokenizer = load_tokenizer(path, model, where=where)
    context = read_context_limit(path, model, where=where)
    check_lengths(tokenizer, context, records, system_prompt, limits, f"{where}={path}", show_progress)


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
