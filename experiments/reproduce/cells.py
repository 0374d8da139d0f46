"""The cells of a reproduction: what there is to run, what each needs, and where its results lie."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coca_mindspeed.algorithm.parsing import ConfidencePosition
from coca_mindspeed.algorithm.rewards import training_method
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.evaluation.predictions import Prediction, read_predictions
from experiments.reproduce.plan import Plan, SettingPlan, directory_name

Kind = Literal["start", "instruct", "trained", "question_probability", "probe", "assessor", "majority_vote"]

# Names as in the paper's tables; what the baseline command calls them.
_BASELINES: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "instruct": ("instruct", ("start-first",)),
    "majority_voting": ("majority_vote", ("start-first",)),
    "rlvr+question_prob": ("question_probability", ("rlvr",)),
    "rlvr+probe": ("probe", ("rlvr",)),
    "rlvr+assessor": ("assessor", ("rlvr", "start-first")),
}


@dataclass(frozen=True)
class ReproductionCell:
    """One method, one seed, one setting.

    Attributes:
        setting: name in the plan.
        seed: the run's seed.
        name: the method's name in the tables.
        kind: what is to be done.
        needs: names of the cells of the same setting and seed that come first.
    """

    setting: str
    seed: int
    name: str
    kind: Kind
    needs: tuple[str, ...] = ()

    def directory(self, output: Path) -> Path:
        return output / self.setting / f"seed_{self.seed}" / directory_name(self.name)

    def of(self, name: str) -> "ReproductionCell":
        """Another cell's place, of the same setting and seed."""
        return ReproductionCell(self.setting, self.seed, name, self.kind)

    @property
    def start_method(self) -> str:
        """A method that states its confidence where this start's lessons do."""
        return next(m for m in ("coca", "rlcr") if self.name == f"start-{training_method(m).confidence_position}")

    def done(self, output: Path) -> bool:
        """Whether the cell is finished: its summary is written last."""
        return (self.directory(output) / "cell.json").is_file()

    def summary(self, output: Path) -> dict[str, Any]:
        """The content of a finished cell's ``cell.json``."""
        content: dict[str, Any] = json.loads((self.directory(output) / "cell.json").read_text(encoding="utf-8"))
        return content

    def predictions(self, output: Path) -> list[Prediction]:
        """A finished cell's predictions."""
        return read_predictions(self.directory(output) / "predictions.jsonl")

    def __str__(self) -> str:
        return f"{self.setting}, seed {self.seed}, {self.name}"


def cells_of(plan: Plan, seeds: Sequence[int]) -> list[ReproductionCell]:
    """All cells, each after those that it needs; a method's seeds together, so that what is there is paired."""
    return [
        cell
        for name, setting in plan.settings.items()
        for of_all_seeds in zip(*(_cells(name, setting, seed) for seed in seeds), strict=True)
        for cell in of_all_seeds
    ]


def _cells(name: str, setting: SettingPlan, seed: int) -> Iterator[ReproductionCell]:
    positions = {method: position_of(setting, method, seed) for method in setting.trained}
    starts = {"start-first"} if setting.baselines else set()
    yield from (ReproductionCell(name, seed, start, "start") for start in starts)
    for method, position in positions.items():
        start = f"start-{position}"
        if start not in starts:  # no earlier than it is needed: what comes first can be read first
            starts.add(start)
            yield ReproductionCell(name, seed, start, "start")
        yield ReproductionCell(name, seed, method, "trained", (start,))
    for baseline in setting.baselines:
        kind, needs = _BASELINES[baseline]
        yield ReproductionCell(name, seed, baseline, kind, needs)


def run_config(setting: SettingPlan, overrides: Sequence[str], seed: int) -> RunConfig:
    """A cell's configuration, without its data and start."""
    return compose_run(setting.run, [*setting.overrides, *overrides, f"seed={seed}"]).run


def position_of(setting: SettingPlan, method: str, seed: int) -> ConfidencePosition:
    """Whether a trained method states its confidence first or last, which decides what it starts from."""
    return run_config(setting, setting.trained[method], seed).method.training_method.confidence_position
