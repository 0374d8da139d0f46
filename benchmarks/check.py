"""``make bench-check``: has anything become slower or larger than ``benchmarks/baselines.json`` says?

Ratios of two ways that run in turn in one process, and peaks of memory.  They differ between processors: baselines
name theirs, and another one gets the figures without a verdict.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import sampler_against_generate, update_at_real_size, update_with_shared_prompts
from benchmarks.machine import load, machine, packages, processor
from coca_mindspeed.utils.json_files import write_json
from coca_mindspeed.utils.text_formats import value_of

BASELINES = Path(__file__).with_name("baselines.json")
Kind = Literal["times as fast", "MiB"]
# How much worse a figure may be: noise of a quiet machine is below it.
_SLOWER, _LARGER = 0.15, 0.05
_PACKAGES = ("torch", "transformers")


@dataclass(frozen=True)
class Figure:
    """What is measured.

    Attributes:
        kind: a ratio (more is better) or a size (less is better).
        measure: measures it in so many rounds.
    """

    kind: Kind
    measure: Callable[[int], float]


def _peak_of_update(_: int) -> float:
    """MiB beyond weights and process of an update by chunks of logits, in a process of its own."""
    return update_at_real_size.measured_alone("--responses", "2", "--tokens", "256")["peak beyond"] / 2**20


FIGURES: Mapping[str, Figure] = {
    "sampler against generate": Figure("times as fast", lambda rounds: sampler_against_generate.run(rounds)["ratio"]),
    "update with shared prompts against the plain way": Figure(
        "times as fast", lambda rounds: update_with_shared_prompts.run(rounds)["ratio"]
    ),
    "update at a real vocabulary, beyond weights and process": Figure("MiB", _peak_of_update),
}


@dataclass(frozen=True)
class Comparison:
    """One figure beside its baseline.

    Attributes:
        name: the figure's.
        kind: see :class:`Figure`.
        before: the baseline; None: there is none.
        now: what was found; None: it is measured no more.
    """

    name: str
    kind: Kind
    before: float | None
    now: float | None

    @property
    def worse(self) -> float:
        """How much slower or larger than the baseline, as a share of it; below 0: better."""
        if self.before is None or self.now is None:
            return math.inf
        return (self.before / self.now if self.kind == "times as fast" else self.now / self.before) - 1

    @property
    def problem(self) -> str | None:
        """What is wrong; None: nothing."""
        if self.before is None:
            return "has no baseline"
        if self.now is None:
            return "is measured no more"
        slower = self.kind == "times as fast"
        if self.worse <= (_SLOWER if slower else _LARGER):
            return None
        return f"{100 * self.worse:.0f}% {'slower' if slower else 'larger'}"


def compare(baselines: Mapping[str, float], found: Mapping[str, float], kinds: Mapping[str, Kind]) -> list[Comparison]:
    """Every figure that has a baseline or was measured, in the order of the measurement.

    Raises:
        ValueError: a figure is not a positive number.
    """
    for name, value in [*baselines.items(), *found.items()]:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}: expected a positive number, found {value}")
    return [
        Comparison(name, kinds.get(name, "MiB"), baselines.get(name), found.get(name))
        for name in dict.fromkeys([*found, *baselines])
    ]


def read_baselines(path: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """The figures of a file, and where they were measured.

    Raises:
        ValueError: it is not such a file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        figures = {str(name): float(entry["value"]) for name, entry in content["figures"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: holds no baselines ({error!r}); make bench-baselines writes them") from error
    return figures, content


def measured(names: Sequence[str], rounds: int) -> dict[str, float]:
    """Each figure by name."""
    return {name: FIGURES[name].measure(rounds) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check", description=__doc__)
    parser.add_argument("--baselines", type=Path, default=BASELINES, help="default: benchmarks/baselines.json")
    parser.add_argument("--update", action="store_true", help="write what is found as the new baselines")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds of each ratio (default: 20)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.update:
        found = measured(list(FIGURES), arguments.rounds)
        figures = {name: {"kind": FIGURES[name].kind, "value": float(f"{value:.4g}")} for name, value in found.items()}
        where = {"machine": machine(), "load": load(), "packages": packages(*_PACKAGES), "rounds": arguments.rounds}
        write_json(arguments.baselines, {**where, "figures": figures})
        print(arguments.baselines)
        return 0
    try:
        baselines, content = read_baselines(arguments.baselines)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return check(baselines, content, lambda names: measured(names, arguments.rounds))


def check(
    baselines: Mapping[str, float], content: Mapping[str, Any], measure: Callable[[Sequence[str]], dict[str, float]]
) -> int:
    """Measure and print every figure beside its baseline; 1 where one is worse, also when it is measured again.

    Baselines of another processor, by ``content``, give no verdict: 0, and nothing is measured again.
    """
    comparable = value_of(content, "machine.processor") == processor()
    kinds = {name: figure.kind for name, figure in FIGURES.items()}
    comparisons = compare(baselines, measure(list(FIGURES)), kinds)
    if not comparable:
        _print(comparisons, content, with_verdict=False)
        return 0
    again = [each.name for each in comparisons if each.problem and each.before is not None and each.now is not None]
    if again:  # noise rarely strikes twice
        second = {each.name: each for each in compare(baselines, measure(again), kinds) if each.name in again}
        comparisons = [min(each, second.get(each.name, each), key=attrgetter("worse")) for each in comparisons]
    _print(comparisons, content)
    return int(any(each.problem for each in comparisons))


def _print(comparisons: Sequence[Comparison], content: Mapping[str, Any], *, with_verdict: bool = True) -> None:
    table = Table(title="figures beside their baselines", title_justify="left")
    for column in ("figure", "unit", "baseline", "now", "verdict"):
        table.add_column(column, justify="right" if column in ("baseline", "now") else "left")
    for each in comparisons:
        values = ("--" if value is None else f"{value:,.4g}" for value in (each.before, each.now))
        table.add_row(each.name, each.kind, *values, (each.problem or "ok") if with_verdict else "--")
    console = Console()
    console.print(table)
    here = {"machine": machine(), "packages": packages(*_PACKAGES)}
    for what, now in here.items():
        before = content.get(what)
        if before != now:
            console.print(f"the baselines' {what}: {before}; here: {now}", highlight=False, soft_wrap=True)
    if not with_verdict:
        console.print("no verdict: the baselines are of another processor (make bench-baselines measures them here)")


if __name__ == "__main__":
    sys.exit(main())
