"""The plan of a run: what ``coca-mindspeed check`` prints, and the problems for which the run is refused.

The module ``plan`` of each engine makes one.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from coca_mindspeed.algorithm.methods import CocaMethodSettings, MethodSettings
from coca_mindspeed.config.layout import Layout
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import Problem, raise_problems
from coca_mindspeed.utils.console import PlainConsole, print_note, print_text
from coca_mindspeed.utils.process import GIB

Row = tuple[str, str]
_MISSING = " (MISSING)"
_STABLE_EPS = 0.05  # the smallest that was seen to keep the confidence learning without a bonus


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a memory estimate: name, bytes on the fullest device, and the formula in words."""

    name: str
    bytes: float
    formula: str = ""


@dataclass(frozen=True, slots=True)
class Phase:
    """Estimated memory of one phase of a step on the fullest device.

    Attributes:
        parts: add up to :attr:`gib`.
        limit_gib: what the device has for it.
    """

    name: str
    parts: tuple[Part, ...]
    limit_gib: float

    @property
    def gib(self) -> float:
        return sum(part.bytes for part in self.parts) / GIB

    def bytes_of(self, name: str) -> float:
        """Bytes of a part; 0 if there is none of this name."""
        return sum(part.bytes for part in self.parts if part.name == name)


@dataclass(frozen=True)
class Plan:
    """A run before it starts: labels and values, estimated memory, notes, and the problems; without any it may start.

    ``memory`` is empty if it cannot be estimated.  With ``warnings`` the run may start, but not learn as it should.
    """

    title: str
    rows: tuple[Row, ...]
    memory: tuple[Phase, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Labels of the rows whose file or directory is not there."""
        return [label for label, value in self.rows if value.endswith(_MISSING)]


_OFTEN = 10  # times that a question is asked, from which on a confidence may hold for the questions of training alone


@dataclass(frozen=True, slots=True)
class QuestionCounts:
    """How many different questions a run trains on and evaluates on, and how often training asks one.

    Attributes:
        train: different questions of the training set.
        records: records of the training set.
        times: how often training asks a question, on average.
        held_out: different held-out questions.
        shared: held-out questions that training asks too.
    """

    train: int
    records: int
    times: float
    held_out: int
    shared: int

    @classmethod
    def of(cls, train: Iterable[str], evaluate: Iterable[str], asked: int) -> "QuestionCounts":
        """Count the questions of records by their text; training asks ``asked`` of them in all steps together."""
        times, held_out = Counter(train), set(evaluate)
        shared = len(held_out & times.keys())
        return cls(len(times), times.total(), max(1.0, asked / max(1, len(times))), len(held_out), shared)

    def warnings(self, train_key: str, train: Any, key: str, evaluate: Any) -> tuple[Problem, ...]:
        """Return the warnings of these counts, as problems of the keys of both sets and their values."""
        problems = []
        if self.times >= _OFTEN:
            reason = f"each of its {self.train:,} different questions is asked {self.times:.0f} times on average"
            fix = (
                f"use more questions or fewer steps: from about {_OFTEN} times on, a model may learn the answers by "
                "heart, and its confidence fails on new questions (docs/troubleshooting.md, new questions)"
            )
            problems.append(Problem("questions-repeated", train_key, train, reason, fix))
        if self.shared:
            reason = f"{self.shared:,} of its {self.held_out:,} different questions are also in {train_key}"
            fix = "remove them: on questions that are trained on, metrics do not show what holds on new ones"
            problems.append(Problem("questions-shared", key, evaluate, reason, fix))
        return tuple(problems)


class Questions(NamedTuple):
    """The questions of a run: their counts, and code, reason and fix of each flaw of the training records."""

    counts: QuestionCounts
    flaws: tuple[tuple[str, str, str], ...]


_FEW_TOKENS = 2048  # of a response, in which published thinking models seldom end a thought


def short_thoughts(method: MethodSettings, key: str, tokens: int) -> tuple[Problem, ...]:
    """The warning of a method with thinking whose responses, of at most ``tokens`` by ``key``, are short."""
    if not method.thinking or tokens >= _FEW_TOKENS:
        return ()
    reason = (
        f"with thinking, a response that is cut off inside its thought has no answer; expected {_FEW_TOKENS} or more"
    )
    return (Problem("short-thoughts", key, tokens, reason, "set it to 8192 or more for a model that thinks at length"),)


def question_rows(counts: QuestionCounts | None) -> Iterator[Row]:
    """Rows on a run's questions; None: the files are not here."""
    if counts is None:
        yield "questions", "unknown: the file of records is not here"
        return
    asked = f"each is asked {counts.times:.1f} times on average"
    yield "questions", f"{counts.train:,} different ones in {counts.records:,} records; {asked}"
    if counts.held_out:
        yield "held-out questions", f"{counts.held_out:,} different ones, {counts.shared:,} of them also trained on"


def file_rows(files: Mapping[str, str | None]) -> Iterator[Row]:
    """Paths by their keys, those of missing files marked; a key without a path has no row."""
    for key, path in files.items():
        if path:
            yield key, path if Path(path).exists() else f"{path}{_MISSING}"


def form_notes(method: MethodSettings, word: str) -> Iterator[str]:
    """Yield the finding on small models about the paper's form, and the ``word`` of the engine that changes it."""
    if isinstance(method, CocaMethodSettings) and not method.entropy_bonus and method.advantage_eps < _STABLE_EPS:
        eps = f"{method.advantage_eps:g}"
        yield (
            f"with advantage_eps={eps} and no entropy bonus, the confidence of small models ended as one number for "
            f"almost all questions; {word} keeps it learning (docs/method.md, named forms)"
        )


def evaluations(config: RunConfig, unit: str, key: str = "data.evaluate") -> str:
    """When a run evaluates; ``unit`` is the engine's name of a step, in the plural, ``key`` that of the questions."""
    if not config.data.has_held_out:
        return f"none: {key} is null, so nothing is evaluated"
    interval = config.evaluation.interval
    return f"every {interval} {unit}" if interval else "none"


def batch_rows(step: str, layout: Layout) -> Iterator[Row]:
    """Responses and updates of a step, by the engine's name of it."""
    yield step, f"{layout.prompts} prompts x {layout.group} responses = {layout.responses}"
    yield f"updates per {step}", f"{layout.updates} of {layout.mini_batch} prompts"


def show_plan(plan: Plan, *, quiet: bool = False) -> None:
    """Print a plan, and its warnings also if ``quiet``; raise its problems as a ConfigError."""
    if plan.rows and not quiet:
        _print(plan)
    for warning in plan.warnings:
        print_note(f"warning: {warning}")
    raise_problems(plan.problems, f"{plan.title} cannot run:")


def _print(plan: Plan) -> None:
    console = PlainConsole()
    table = Table("", "", title=f"plan of {plan.title}", show_header=False, title_justify="left")
    for row in plan.rows:
        table.add_row(*row)
    console.print_table(table)
    if plan.memory:
        table = Table("estimated memory of one device", "GiB", "formula", title_justify="left")
        for phase in plan.memory:
            for part in phase.parts:
                table.add_row(f"{phase.name}: {part.name}", f"{part.bytes / GIB:.2f}", part.formula)
            table.add_row(f"{phase.name}, together", f"{phase.gib:.2f}", f"of {phase.limit_gib:.2f}", style="bold")
            table.add_section()
        console.print_table(table)
    for note in plan.notes:
        print_text(note)
