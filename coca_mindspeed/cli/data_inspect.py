"""``coca-mindspeed data inspect``."""

import argparse
from collections import Counter
from pathlib import Path

import numpy as np

from coca_mindspeed.cli.data_prepare import SYSTEM_PROMPTS
from coca_mindspeed.cli.options import at_least
from coca_mindspeed.data.prepare.filters import PromptCounter
from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.data.registry import SOURCES, read_published, source_named
from coca_mindspeed.utils.console import print_text

_QUANTILES = {"shortest": 0.0, "median": 0.5, "90%": 0.9, "99%": 0.99, "longest": 1.0}
_SOURCES_SHOWN = 12


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Read a file, check every row, and print counts, sources, difficulties, lengths and the first examples as "
        "prompted."
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="prepared records, or with --dataset a published file")
    parser.add_argument("--dataset", choices=sorted(SOURCES), metavar="DATASET", help="source of the file")
    parser.add_argument("--tokenizer", type=Path, metavar="DIRECTORY", help="also count prompt tokens")
    parser.add_argument(
        "--prompt",
        choices=sorted(SYSTEM_PROMPTS),
        default="confidence-first",
        help="system prompt of the examples (default: %(default)s)",
    )
    parser.add_argument("--show", type=at_least(0), default=2, metavar="N", help="number of examples (default: 2)")
    parser.set_defaults(run_action=run_inspect)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print the summary, then the examples."""
    prompt = SYSTEM_PROMPTS[arguments.prompt]
    count = None if arguments.tokenizer is None else PromptCounter(arguments.tokenizer, prompt)
    summary = _Summary()
    examples: list[str] = []
    if arguments.dataset is None:
        records = read_records(arguments.path)
    else:
        records = read_published(source_named(arguments.dataset), [arguments.path])
    for record in records:
        summary.add(record, None if count is None else count(record))
        if len(examples) < arguments.show:
            examples.append(_example(record, prompt))
    print_text("\n\n".join([summary.text(), *examples]))
    return 0


def _example(record: Record, system_prompt: str | None) -> str:
    """A record as prompted, with its gold answer."""
    lines = [f"--- {record.dataset} {record.id}"]
    lines += [f"[{message['role']}] {message['content']}" for message in prompt_messages(record, system_prompt)]
    gold = record.answer or str(record.metadata.get("tests", ""))
    return "\n".join([*lines, f"[gold] {gold[:500]}"])


class _Summary:
    """Statistics over records, updated one by one."""

    def __init__(self) -> None:
        self._kinds: Counter[tuple[str, str]] = Counter()
        self._sources: Counter[str] = Counter()
        self._difficulties: list[float] = []
        names = ("question, characters", "answer, characters", "prompt, tokens")
        self._lengths: dict[str, list[int]] = {name: [] for name in names}

    def add(self, record: Record, prompt_tokens: int | None) -> None:
        """Count a record; ``prompt_tokens`` is None if they were not counted."""
        self._kinds[record.dataset, record.category] += 1
        if "source" in record.metadata:
            self._sources[str(record.metadata["source"])] += 1
        if (difficulty := record.metadata.get("difficulty")) is not None:
            self._difficulties.append(float(difficulty))
        lengths = (len(record.question), len(record.answer), prompt_tokens)
        for values, length in zip(self._lengths.values(), lengths, strict=True):
            if length is not None:
                values.append(length)

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
