"""Ids of models and data sets of the hub."""

import re
from pathlib import Path

_HUB_ID = re.compile(r"(?!models/)[\w-]+/[\w.-]+(:[\w.-]*){0,2}", re.ASCII)
_DATA_FILE = re.compile(r".*\.(jsonl?|ndjson|csv|tsv|parquet|arrow|gz)", re.IGNORECASE)


def is_hub_id(text: str) -> bool:
    """True for a hub id (ORG/NAME[:CONFIGURATION[:SPLIT]]) that is not a local path."""
    path = Path(text)
    return not (_HUB_ID.fullmatch(text) is None or _DATA_FILE.fullmatch(text) or path.exists() or path.parent.is_dir())
