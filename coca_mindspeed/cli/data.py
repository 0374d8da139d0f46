"""``coca-mindspeed data``: prepare data sets, look into them, export them for verl."""

import argparse
from collections import Counter
from pathlib import Path

import numpy as np

from coca_mindspeed.cli.data_prepare import SYSTEM_PROMPTS, add_prepare_arguments
from coca_mindspeed.cli.options import at_least, place
from coca_mindspeed.data.prepare.filters import PromptCounter
from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.data.registry import SOURCES, read_published, source_named
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.verl.records import export_for_verl

_QUANTILES = {"shortest": 0.0, "median": 0.5, "90%": 0.9, "99%": 0.99, "longest": 1.0}
_SOURCES_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    prepare = actions.add_parser(
        "prepare",
        help="turn a publisher's files into records: filtered, checked, deduplicated, split",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_prepare_arguments(prepare)

    inspect = actions.add_parser(
        "inspect",
        help="show what a file holds: counts, lengths, examples as the model sees them",
        description="Read a file, check every row, and print counts, sources, difficulties, lengths and the first "
        "examples as prompted.",
    )
    option = inspect.add_argument
    option("path", type=Path, metavar="PATH", help="prepared records, or with --dataset a published file")
    option("--dataset", choices=sorted(SOURCES), metavar="DATASET", help="source of the file")
    option("--tokenizer", type=Path, metavar="DIRECTORY", help="also count prompt tokens")
    _add_prompt(inspect, "system prompt of the examples (default: %(default)s)")
    option("--show", type=at_least(0), default=2, metavar="N", help="number of examples (default: 2)")
    inspect.set_defaults(run_action=_inspect)

    export = actions.add_parser(
        "export",
        help="write prepared records in the form of another program",
        description="Write prepared records in the form of another program.",
    )
    verl = export.add_subparsers(dest="target", metavar="TARGET", required=True).add_parser(
        "verl",
        help="for verl's data.train_files and data.val_files",
        description="Write the records as verl's JSON Lines, each with its chat and its whole record.",
    )
    option = verl.add_argument
    option("--input", type=Path, required=True, metavar="FILE", help="prepared records (train.jsonl)")
    option("--output", type=place, required=True, metavar="FILE", help="to write")
    option("--overwrite", action="store_true", help="replace an earlier export")
    _add_prompt(verl, "the method's system prompt; answer-first is for rlcr (default: %(default)s)")
    verl.set_defaults(run_action=_export_for_verl)


def _add_prompt(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--prompt", choices=sorted(SYSTEM_PROMPTS), default="confidence-first", help=meaning)


def run(arguments: argparse.Namespace) -> int:
    return int(arguments.run_action(arguments))


def _export_for_verl(arguments: argparse.Namespace) -> int:
    rows = export_for_verl(arguments.input, arguments.output, SYSTEM_PROMPTS[arguments.prompt], arguments.overwrite)
    print_text(f"{rows} records written to {arguments.output}")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
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
