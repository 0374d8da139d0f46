"""Find the ends of a response's segments on the sampled token ids.

A byte-level tokenizer may merge the last ``>`` of the closing tag with what follows, or split the tag anywhere, so
the boundary is looked for in the bytes behind the ids; re-tokenising decoded text would move it.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from coca_mindspeed.algorithm import check_tensor
from coca_mindspeed.algorithm.parsing import CLOSE_TAG, END_THINK_TAG, OPEN_TAG, ConfidencePosition

_FIRST_WINDOW = 32  # tokens searched at first; a confidence takes about ten
_TOKENS_AT_ONCE = 2**18  # bounds the memory of one search to a few megabytes, whatever the batch


class TokenText:
    """The bytes that each token id stands for, as tensors, so that text and boundary come from the same table.

    Build it with :func:`coca_mindspeed.utils.tokenization.token_text`.  A control token (end of text, padding) has no
    bytes; a token may hold part of a multi-byte character.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """``tokens``: the bytes of token 0, 1, ...; as long as the model's vocabulary."""
        self.vocabulary_size = len(tokens)
        # Two ids of our own follow the vocabulary: padding (no bytes) and a separator that no tag contains.
        self._padding, self._separator = self.vocabulary_size, self.vocabulary_size + 1
        sizes = torch.tensor([*map(len, tokens), 0, 1], dtype=torch.int64)
        self._sizes = sizes
        self._starts = sizes.cumsum(0) - sizes
        self._bytes = torch.frombuffer(bytearray(b"".join(tokens) + b"\0"), dtype=torch.uint8)

    def to(self, device: torch.device) -> "TokenText":
        """Move the table; a no-op where it is already there."""
        self._sizes, self._starts = self._sizes.to(device), self._starts.to(device)
        self._bytes = self._bytes.to(device)
        return self

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token; none for a control token."""
        start = int(self._starts[token_id])
        return self._bytes[start : start + int(self._sizes[token_id])].cpu().numpy().tobytes()

    def decode(self, token_ids: Tensor, lengths: Tensor) -> list[str]:
        """The text of each response; bytes that are not UTF-8 become U+FFFD.

        Args:
            token_ids: int ``[B, T]``.
            lengths: int ``[B]``, tokens of each response.
        """
        _check_responses(token_ids, lengths, self)
        stream, token_of_byte = self._byte_stream(_window(token_ids, lengths, token_ids.shape[1], "first", self))
        raw = stream.cpu().numpy().tobytes()
        row_of_byte = token_of_byte // (token_ids.shape[1] + 1)
        ends = torch.bincount(row_of_byte, minlength=len(lengths)).cumsum(0).tolist()
        starts = [0, *ends][: len(ends)]
        return [raw[start : end - 1].decode("utf-8", "replace") for start, end in zip(starts, ends, strict=True)]

    def _byte_stream(self, window: Tensor) -> tuple[Tensor, Tensor]:
        """The bytes of ``window`` ``[rows, columns]`` in a row, uint8 ``[n]``, and the token of each, int64 ``[n]``."""
        flat = window.flatten()
        sizes = self._sizes[flat]
        token_of_byte = torch.repeat_interleave(torch.arange(len(flat), device=flat.device), sizes)
        # Position in the table = start of the token there + offset of the byte within its token.
        shift = self._starts[flat] - (sizes.cumsum(0) - sizes)
        position = torch.arange(len(token_of_byte), device=flat.device) + shift[token_of_byte]
        return self._bytes[position], token_of_byte


def confidence_segment_lengths(
    token_ids: Tensor,
    response_lengths: Tensor,
    token_text: TokenText,
    valid: Tensor,
    *,
    max_confidence_tokens: int = 16,
    position: ConfidencePosition = "first",
) -> Tensor:
    """Return the number of tokens of each response until its confidence is known, int64 ``[B]``.

    A token counts if any of its characters stand before the end of the closing tag, so a token that straddles the
    boundary does.  The search uses the bytes of the sampled ids; nothing is re-tokenised.

    Args:
        token_ids: int ``[B, T]``, the sampled ids, right-padded with anything.
        response_lengths: int ``[B]``.
        token_text: bytes of each id.
        valid: bool ``[B]``, whether :class:`ResponseParser` found a confidence in the response's text.
        max_confidence_tokens: most tokens of an invalid response, which has no closing tag.
        position: ``first`` and ``both``: up to the end of the first closing tag, which is the length of the confidence
            segment.  ``last`` (RLCR): up to the end of the last one.

    Raises ValueError: mismatching shapes, dtypes, devices or ids, or a response is said to be valid, but its tokens
    hold no closing tag.
    """
    most_B = _most_tokens(response_lengths, max_confidence_tokens)
    side: _Side = "last" if position == "last" else "first"
    closes_B = _tokens_with(token_ids, response_lengths, token_text, valid, CLOSE_TAG, len(CLOSE_TAG) - 1, side)
    return torch.where(valid, closes_B, most_B)


def segment_ends(
    token_ids: Tensor,
    response_lengths: Tensor,
    token_text: TokenText,
    valid: Sequence[Tensor],
    *,
    max_confidence_tokens: int = 16,
    position: ConfidencePosition = "first",
) -> Tensor:
    """The tokens of each response up to the end of each of its segments, int64 ``[B, S]``; the last is its length.

    A confidence segment before the answer ends as :func:`confidence_segment_lengths` says.  One after the answer
    begins with the token that holds the first character of its opening tag, and takes the rest of the response; of an
    invalid response, its last ``max_confidence_tokens`` tokens that no earlier confidence has.

    Args:
        token_ids, response_lengths, token_text, max_confidence_tokens: as of :func:`confidence_segment_lengths`.
        valid: bool ``[B]`` for each confidence of the response.
        position: of the confidences, which is the order of the segments: ``SEGMENTS[position]``.
    """
    most_B = _most_tokens(response_lengths, max_confidence_tokens)
    lengths_B = response_lengths.to(torch.int64)
    ends_B = []
    if position != "last":
        first_B = confidence_segment_lengths(
            token_ids, lengths_B, token_text, valid[0], max_confidence_tokens=max_confidence_tokens
        )
        ends_B.append(first_B)
    if position != "first":
        opens_B = _tokens_with(token_ids, lengths_B, token_text, valid[-1], OPEN_TAG, 0, "last") - 1
        begin_B = torch.where(valid[-1], opens_B, lengths_B - most_B)
        ends_B.append(torch.maximum(begin_B, ends_B[0]) if ends_B else begin_B)
    return torch.stack([*ends_B, lengths_B], dim=1)


def thought_ends(token_ids: Tensor, response_lengths: Tensor, token_text: TokenText, closed: Tensor) -> Tensor:
    """The tokens of each response up to the end of its first ``</think>``, int64 ``[B]``; 0 where it has none.

    Args:
        token_ids, response_lengths, token_text: as of :func:`confidence_segment_lengths`.
        closed: bool ``[B]``, whether the response's text has the tag.
    """
    tag = END_THINK_TAG
    return _tokens_with(token_ids, response_lengths, token_text, closed, tag, len(tag) - 1, "first")


def _most_tokens(lengths: Tensor, max_confidence_tokens: int) -> Tensor:
    """Length of the confidence segment of each response if it is invalid, int64 ``[B]``."""
    if max_confidence_tokens < 1:
        raise ValueError(f"max_confidence_tokens should be at least 1, found {max_confidence_tokens}")
    return lengths.to(torch.int64).clamp(max=max_confidence_tokens)


_Side = Literal["first", "last"]


def _tokens_with(
    token_ids: Tensor, response_lengths: Tensor, token_text: TokenText, valid: Tensor, tag: str, byte: int, side: _Side
) -> Tensor:
    """Tokens of each valid response up to the one that holds a byte of its first or last ``tag``, int64 ``[B]``."""
    _check_responses(token_ids, response_lengths, token_text)
    check_tensor("valid", valid, "bool", *response_lengths.shape, device=token_ids.device)
    token_text.to(token_ids.device)
    lengths_B = response_lengths.to(torch.int64)
    result_B = torch.zeros_like(lengths_B)
    rows = valid.nonzero().flatten()
    width = _FIRST_WINDOW
    while len(rows):
        found = torch.cat(
            [
                _tag_in_window(token_ids[chunk], lengths_B[chunk], token_text, width, tag.encode(), byte, side)
                for chunk in rows.split(max(1, _TOKENS_AT_ONCE // width))
            ]
        )
        result_B[rows] = found
        rows = rows[found == 0]
        if len(rows) and width >= token_ids.shape[1]:
            raise ValueError(f"response {int(rows[0])} is marked valid, but its tokens hold no {tag}")
        width *= 4
    return result_B


def _window(token_ids: Tensor, lengths: Tensor, width: int, side: _Side, token_text: TokenText) -> Tensor:
    """The first (or last) ``width`` tokens of each row, our padding behind them, our separator in a last column."""
    width = min(width, token_ids.shape[1])
    start_B = torch.zeros_like(lengths) if side == "first" else (lengths - width).clamp(min=0)
    index_BW = start_B[:, None] + torch.arange(width, device=token_ids.device)
    inside_BW = index_BW < lengths[:, None]
    ids_BW = token_ids.gather(1, index_BW.clamp(max=max(0, token_ids.shape[1] - 1))).to(torch.int64)
    separator_B1 = torch.full((len(ids_BW), 1), token_text._separator, device=ids_BW.device)
    return torch.cat([torch.where(inside_BW, ids_BW, token_text._padding), separator_B1], dim=1)


def _tag_in_window(
    token_ids: Tensor, lengths: Tensor, token_text: TokenText, width: int, tag: bytes, byte: int, side: _Side
) -> Tensor:
    """Tokens up to and including the one of the tag's ``byte``, per row; 0 where the window holds no whole tag."""
    window = _window(token_ids, lengths, width, side, token_text)
    stream, token_of_byte = token_text._byte_stream(window)
    candidates = max(0, len(stream) - len(tag) + 1)
    hit = torch.ones(candidates, dtype=torch.bool, device=stream.device)
    for offset, value in enumerate(tag):
        hit &= stream[offset : offset + candidates] == value
    token = token_of_byte[hit.nonzero().flatten() + byte]
    columns = window.shape[1]
    row, count = token // columns, token % columns + 1
    reduce = "amin" if side == "first" else "amax"
    position = torch.zeros_like(lengths).scatter_reduce(0, row, count, reduce, include_self=False)
    if side == "last":
        position = torch.where(position > 0, position + (lengths - (columns - 1)).clamp(min=0), position)
    return position


def _check_responses(token_ids: Tensor, lengths: Tensor, token_text: TokenText) -> None:
    check_tensor("token_ids", token_ids, "int", "batch", "tokens")
    check_tensor("response_lengths", lengths, "int", len(token_ids), device=token_ids.device)
    if len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) > token_ids.shape[1]):
        raise ValueError(f"response_lengths should be in [0, {token_ids.shape[1]}], found {lengths.tolist()[:8]} ...")
    if token_ids.numel() and (int(token_ids.min()) < 0 or int(token_ids.max()) >= token_text.vocabulary_size):
        raise ValueError(
            f"token ids should be in [0, {token_text.vocabulary_size}), "
            f"found [{int(token_ids.min())}, {int(token_ids.max())}]"
        )
