"""The training questions that are reserved for the confidence (``data.confidence_share``).

The answers never learn on them, so that a confidence that learns their success rates learns those of new questions.
Statistics calls it sample splitting.
"""

import hashlib
from collections.abc import Sequence

from coca_mindspeed.data.filters import normalise
from coca_mindspeed.data.records import Record


def is_reserved(record: Record, share: float, seed: int) -> bool:
    """Whether a question is among the ``share`` of the questions that are reserved.

    The hash of the seed and of the question's subject (``metadata.subject``, if it is a text) or else its normalised
    text decides, so that equal questions and questions about the same subject are in the same part.
    """
    subject = record.metadata.get("subject")
    key = normalise(subject if isinstance(subject, str) else record.question)
    digest = hashlib.sha256(repr((seed, "confidence share", key)).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def parts(records: Sequence[Record], share: float, seed: int) -> tuple[list[Record], list[Record]]:
    """The questions that the answers learn on, and the reserved ones, each in the order of ``records``."""
    reserved = [record for record in records if is_reserved(record, share, seed)]
    return [record for record in records if not is_reserved(record, share, seed)], reserved
