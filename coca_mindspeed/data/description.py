"""Text summaries of record files."""

from collections import Counter

import numpy as np

from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import Record

_QUANTILES = {"shortest": 0.0, "median": 0.5, "90%": 0.9, "99%": 0.99, "longest": 1.0}
_SOURCES_SHOWN = 12


class Summary:
    """Statistics over records, updated one by one."""

    def __init__(self) -> None:
        self._kinds: Counter[tuple[str, str]] = Counter()
        self._sources: Counter[str] = Counter()
        self._difficulties: list[float] = []
        self._lengths: dict[str, list[int]] = {
            "question, characters": [],
            "answer, characters": [],
            "prompt, tokens": [],
        }

    def add(self, record: Record, prompt_tokens: int | None) -> None:
        """Count a record; ``prompt_tokens`` is None if they were not counted."""
        self._kinds[record.dataset, record.category] += 1
        if "source" in record.metadata:
            self._sources[str(record.metadata["source"])] += 1
        if (difficulty := record.metadata.get("difficulty")) is not None:
            self._difficulties.append(float(difficulty))
        self._lengths["question, characters"].append(len(record.question))
        self._lengths["answer, characters"].append(len(record.answer))
        if prompt_tokens is not None:
            self._lengths["prompt, tokens"].append(prompt_tokens)

    def text(self) -> str:
        """Return the summary, one fact per line."""
        lines = [f"{self._kinds.total()} records"]
        lines += [f"  {dataset} ({category}): {number}" for (dataset, category), number in self._kinds.most_common()]
        if self._sources:
            lines.append(f"sources: {len(self._sources)}")
            lines += [f"  {source}: {number}" for source, number in self._sources.most_common(_SOURCES_SHOWN)]
        if self._difficulties:
            counts, edges = np.histogram(self._difficulties, bins=5, range=(0, 1))
            lines.append(f"difficulty (0 easiest), known of {len(self._difficulties)}")
            lines += [f"  {low:.1f} to {high:.1f}: {n}" for n, low, high in zip(counts, edges, edges[1:], strict=False)]
        for name, lengths in self._lengths.items():
            if lengths:
                values = np.quantile(lengths, list(_QUANTILES.values()), method="nearest")
                shown = ", ".join(f"{label} {value}" for label, value in zip(_QUANTILES, values, strict=True))
                lines.append(f"{name}: {shown}")
        return "\n".join(lines)


def example(record: Record, system_prompt: str | None) -> str:
    """Return a record as prompted, with its gold answer."""
    lines = [f"--- {record.dataset} {record.id}"]
    lines += [f"[{message['role']}] {message['content']}" for message in prompt_messages(record, system_prompt)]
    gold = record.answer or str(record.metadata.get("tests", ""))
    return "\n".join([*lines, f"[gold] {gold[:500]}"])
