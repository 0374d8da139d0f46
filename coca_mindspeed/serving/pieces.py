"""Pieces of an answer, as OpenAI-compatible engines stream them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """One sampled token and its alternatives.

    Attributes:
        token: its bytes.
        log_prob: in nats.
        top: (bytes, log-prob) of the most probable tokens, the sampled one among them or not.
    """

    token: bytes
    log_prob: float
    top: tuple[tuple[bytes, float], ...]


class Piece(NamedTuple):
    """A piece of an answer.

    Attributes:
        text: new text.
        tokens: how many tokens it is; a server that names no ids sends about one token a piece.
        token_ids: None where the server names none.
        log_probs: of its tokens, where they were asked for.
        prompt_ids: the prompt's, once, where the server names them.
        prompt_tokens: once, where the server counts them.
        finish_reason: of the last piece.
    """

    text: str
    tokens: int
    token_ids: tuple[int, ...] | None
    log_probs: tuple[TokenLogProbs, ...]
    prompt_ids: tuple[int, ...] | None
    prompt_tokens: int | None
    finish_reason: str | None


def piece_of(value: Mapping[str, Any]) -> Piece:
    """The piece that an event's JSON object describes.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, IndexError: it describes none.
    """
    counted = (value.get("usage") or {}).get("prompt_tokens")
    choice = value["choices"][0] if value["choices"] else {}
    text = (choice["delta"].get("content") if "delta" in choice else choice.get("text")) or ""
    if not isinstance(text, str) or not (counted is None or isinstance(counted, int)):
        raise TypeError("text should be text and a count a number")
    ids = choice.get("token_ids")
    prompt_ids = choice.get("prompt_token_ids", value.get("prompt_token_ids"))
    return Piece(
        text=text,
        tokens=len(ids) if ids is not None else int(bool(text)),
        token_ids=None if ids is None else tuple(map(int, ids)),
        log_probs=_log_probs(choice.get("logprobs")),
        prompt_ids=None if prompt_ids is None else tuple(map(int, prompt_ids)),
        prompt_tokens=counted,
        finish_reason=choice.get("finish_reason"),
    )


def _log_probs(value: Mapping[str, Any] | None) -> tuple[TokenLogProbs, ...]:
    if not value:
        return ()
    return tuple(_chat_log_probs(value) if "content" in value else _completion_log_probs(value))


def _chat_log_probs(value: Mapping[str, Any]) -> list[TokenLogProbs]:
    return [
        TokenLogProbs(
            _token_bytes(entry),
            float(entry["logprob"]),
            tuple((_token_bytes(other), float(other["logprob"])) for other in entry.get("top_logprobs") or ()),
        )
        for entry in value["content"] or ()
    ]


def _completion_log_probs(value: Mapping[str, Any]) -> list[TokenLogProbs]:
    pairs = zip(value.get("tokens") or (), value.get("token_logprobs") or (), strict=True)
    return [TokenLogProbs(token.encode(), float(log_prob), ()) for token, log_prob in pairs]


def _token_bytes(entry: Mapping[str, Any]) -> bytes:
    return bytes(entry["bytes"]) if entry.get("bytes") is not None else str(entry["token"]).encode()
