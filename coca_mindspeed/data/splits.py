"""Which split a generated question belongs to: decided by its text alone, whatever the sizes and seeds."""

import hashlib
from typing import Literal

Split = Literal["train", "evaluate"]


def split_of(text: str, held_out: float) -> Split:
    """``evaluate`` for a share ``held_out`` of all texts, by their hash; ``train`` for the others."""
    digest = hashlib.sha256(text.encode()).digest()
    return "evaluate" if int.from_bytes(digest[:8], "big") < held_out * 2**64 else "train"
