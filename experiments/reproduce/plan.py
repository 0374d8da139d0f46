"""The plan of a reproduction (one YAML file) and the jobs that it consists of."""

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator

from coca_mindspeed.algorithm.methods import training_method
from coca_mindspeed.algorithm.parsing import SEGMENTS, ConfidencePosition
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import RunConfig, Section
from coca_mindspeed.errors import ConfigError, UsageError, did_you_mean, validation_problems
from coca_mindspeed.utils.text_formats import YamlError, read_yaml
from experiments.answers import Answer, read_answers
from experiments.miniature import MiniatureName
from experiments.paper.figures import check_setting

PLANS = Path(__file__).parents[1] / "plans"
Baseline = Literal[
    "instruct", "rlvr+question_prob", "rlvr+probe", "rlvr+assessor", "majority_voting", "coca+family_mean"
]
Kind = Literal[
    "start", "instruct", "trained", "question_probability", "probe", "assessor", "majority_vote", "family_mean"
]
# Baselines by their names in the paper -> kind of job, jobs that come first.
_BASELINES: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "instruct": ("instruct", ("start-first",)),
    "majority_voting": ("majority_vote", ("start-first",)),
    "rlvr+question_prob": ("question_probability", ("rlvr",)),
    "rlvr+probe": ("probe", ("rlvr",)),
    "rlvr+assessor": ("assessor", ("rlvr", "start-first")),
    "coca+family_mean": ("family_mean", ("coca",)),
}
#: An override of a plan's own: the evaluations of the job also compute readings of the confidence.
READINGS = "evaluation.readings=true"
_MOST_DECIMALS = 3  # of a confidence whose readings are computed
_RESERVED_METHODS = (*get_args(Baseline), *(f"start-{position}" for position in SEGMENTS))
_RESERVED_SETTINGS = ("report", "settings.json", ".lock")
# Keys that built-in questions replace -> the only value that an override may give.
_REPLACED_KEYS = {
    "data.name": "records",
    "data.train": "set-by-the-plan",
    "data.evaluate": "set-by-the-plan",
    "data.grader": "auto",
    **dict.fromkeys(("data.rows", "data.train_size", "data.evaluate_size", "data.seed")),
}


class RealWorldPlan(Section):
    """Real-world questions (experiments/README.md): the most of each family per set, and the greatest difficulty."""

    train: int = Field(600, ge=1)
    evaluate: int = Field(100, ge=2)
    warm_up: int = Field(80, ge=1)
    hardest: float = Field(1.0, ge=0.1, le=1)


class SettingPlan(Section):
    """Methods that share data and start.

    Attributes:
        title: in headings.
        run: built-in run or YAML file that every training is based on.
        miniature: built-in questions for the tiny model.
        real_world: built-in questions for a pretrained model, which has an SFT warm-up first.
        overrides: of the run, for every job.
        trained: name of each trained method -> its overrides, which may have :data:`READINGS`.
        baselines: other methods.
    """

    title: str
    run: str
    miniature: MiniatureName | None = None
    real_world: RealWorldPlan | None = None
    overrides: list[str] = Field(default_factory=list)
    trained: dict[str, list[str]]
    baselines: list[Baseline] = Field(default_factory=list)

    @property
    def built_in(self) -> bool:
        """Whether the questions come from this package instead of the run's ``data.*``."""
        return self.miniature is not None or self.real_world is not None


class Plan(Section):
    """A reproduction.

    Attributes:
        title: of the report.
        first_seed: seeds count from here; earlier ones were used to choose the settings.
        seeds: in this order, instead of those from ``first_seed`` on.
        settings: by name.
        train_questions: of the miniature.
        evaluate_questions: of the miniature, per family.
        samples: k of majority voting.
        predictor_questions: training questions of probe and assessor.
        assessor_model: base of the assessor; None: the setting's start.
        assessor_lr: of its fine-tuning.
        assessor_epochs: the most.
        paper_setting: the paper's table to compare with.
    """

    title: str
    first_seed: int = Field(0, ge=0)
    seeds: list[Annotated[int, Field(ge=0)]] | None = None
    settings: dict[str, SettingPlan]
    train_questions: int = Field(50_000, ge=100)
    evaluate_questions: int = Field(1000, ge=8)
    samples: int = Field(16, ge=1)
    predictor_questions: int = Field(4000, ge=10)
    assessor_model: str | None = None
    assessor_lr: float = Field(1e-5, gt=0)
    assessor_epochs: int = Field(3, ge=1)
    paper_setting: str = "qwen2.5-7b/math"

    def seeds_to_run(self, count: int) -> Sequence[int]:
        """The first ``count`` seeds of the plan.

        Raises:
            UsageError: the plan lists fewer.
        """
        if self.seeds is None:
            return range(self.first_seed, self.first_seed + count)
        if count > len(self.seeds):
            raise UsageError(f"--seeds {count}: the plan lists {len(self.seeds)}: {', '.join(map(str, self.seeds))}")
        return self.seeds[:count]

    @field_validator("settings")
    @classmethod
    def _check_settings(cls, settings: dict[str, SettingPlan]) -> dict[str, SettingPlan]:
        for name, setting in settings.items():
            _check_directory_name(name, "settings")
            if name in _RESERVED_SETTINGS:
                raise ValueError(f"{name}: reserved; rename the setting")
            if setting.miniature is not None and setting.real_world is not None:
                raise ValueError(f"{name}: has both 'miniature' and 'real_world'; expected one")
            for baseline in setting.baselines:
                base, _, added = baseline.partition("+")
                if added and base not in setting.trained:
                    raise ValueError(f"{name}: {baseline} needs {base!r} among the trained methods")
                if setting.baselines.count(baseline) > 1:
                    raise ValueError(f"{name}: baselines: {baseline} is listed twice")
            _check_methods(name, setting)
        return settings

    @field_validator("paper_setting")
    @classmethod
    def _check_paper_setting(cls, setting: str) -> str:
        try:
            check_setting(setting)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return setting


def _directory_name(method: str) -> str:
    return method.replace(" ", "_").replace(",", "")


def _check_directory_name(name: str, where: str) -> None:
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        raise ValueError(f"{where}: {name!r}: not usable as the name of a directory")


def _check_methods(where: str, setting: SettingPlan) -> None:
    taken = {_directory_name(name): name for name in _RESERVED_METHODS}
    for method in setting.trained:
        directory = _directory_name(method)
        _check_directory_name(directory, f"{where}: trained")
        if (other := taken.get(directory)) is not None:
            raise ValueError(f"{where}: trained: {method!r} and {other!r} would share {directory!r}; rename it")
        taken[directory] = method
    for override in (o for listed in (setting.overrides, *setting.trained.values()) for o in listed):
        key, _, value = override.lstrip("+").partition("=")
        if setting.built_in and key in _REPLACED_KEYS and value != _REPLACED_KEYS[key]:
            raise ValueError(f"{where}: {override}: has no effect on built-in questions; remove it")


def plan_path(name: str) -> Path:
    """A YAML file, or a plan of ``experiments/plans`` by its name.

    Raises:
        UsageError: there is no plan of that name.
    """
    if Path(name).suffix in (".yaml", ".yml"):
        return Path(name)
    ours = {path.stem: path for path in sorted(PLANS.glob("*.yaml"))}
    if name not in ours:
        raise UsageError(f"--plan: unknown plan {name!r}{did_you_mean(name, ours)}; built-in plans: {', '.join(ours)}")
    return ours[name]


def read_plan(path: Path) -> Plan:
    """Read and validate a plan.

    Raises:
        ConfigError: with every problem on its own line.
    """
    try:
        return Plan.model_validate(read_yaml(path))
    except OSError as error:
        raise ConfigError(f"--plan {path}: cannot be read: {error.strerror}") from error
    except YamlError as error:
        raise ConfigError(f"--plan {path}: is not valid YAML: {error}") from error
    except ValidationError as error:
        problems = validation_problems(error)
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems), problems) from error


@dataclass(frozen=True)
class Job:
    """One method, seed and setting; ``needs`` are the names of the jobs that come first."""

    setting: str
    seed: int
    name: str
    kind: Kind
    needs: tuple[str, ...] = ()

    def directory(self, output: Path) -> Path:
        return output / self.setting / f"seed_{self.seed}" / _directory_name(self.name)

    def other(self, name: str) -> "Job":
        """Another job of the same setting and seed, for its directory."""
        return Job(self.setting, self.seed, name, self.kind)

    @property
    def start_method(self) -> str:
        """For a start: a method with the same confidence position."""
        return next(
            m for m in ("coca", "rlcr", "caliber") if self.name == f"start-{training_method(m).confidence_position}"
        )

    def done(self, output: Path) -> bool:
        return (self.directory(output) / "cell.json").is_file()  # written last

    def summary(self, output: Path) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.directory(output) / "cell.json").read_text(encoding="utf-8"))
        return content

    def predictions(self, output: Path) -> list[Answer]:
        return read_answers(self.directory(output) / "predictions.jsonl")

    def __str__(self) -> str:
        return f"{self.setting}, seed {self.seed}, {self.name}"


def jobs_of(plan: Plan, seeds: Sequence[int]) -> list[Job]:
    """All jobs in a valid order; the seeds of a method are adjacent, so that a stopped reproduction is paired."""
    return [
        job
        for name, setting in plan.settings.items()
        for of_all_seeds in zip(*(_jobs(name, setting, seed) for seed in seeds), strict=True)
        for job in of_all_seeds
    ]


def _jobs(name: str, setting: SettingPlan, seed: int) -> Iterator[Job]:
    positions = {method: position_of(setting, method, seed) for method in setting.trained}
    starts = {"start-first"} if setting.baselines else set()
    yield from (Job(name, seed, start, "start") for start in starts)
    for method, position in positions.items():
        start = f"start-{position}"
        if start not in starts:
            starts.add(start)
            yield Job(name, seed, start, "start")
        yield Job(name, seed, method, "trained", (start,))
    for baseline in setting.baselines:
        yield Job(name, seed, baseline, *_BASELINES[baseline])


def run_config(setting: SettingPlan, overrides: Sequence[str], seed: int) -> RunConfig:
    """A job's configuration, without built-in data and start.

    Raises ConfigError for a key, and for :data:`READINGS` of a confidence that has none.
    """
    listed = (*setting.overrides, *overrides)
    run = _composed(setting.run, (*(override for override in listed if override != READINGS), f"seed={seed}"))
    if READINGS in listed:
        name, decimals = run.method.label, run.method.confidence_decimals or 0
        if run.method.training_method.confidence_position == "last":
            raise ConfigError(f"override {READINGS}: needs a method with the confidence first, found {name}")
        if decimals > _MOST_DECIMALS:
            raise ConfigError(
                f"override {READINGS}: at most {_MOST_DECIMALS} decimals, found method.confidence_decimals={decimals}"
            )
    return run


@functools.cache
def _composed(run: str, overrides: tuple[str, ...]) -> RunConfig:
    """A job asks for its configuration several times, at a tenth of a second each."""
    return compose_run(run, overrides).run


def saved_config(run: Path) -> RunConfig:
    """The configuration of a run directory; earlier commits also saved ``evaluation.readings``."""
    values = read_yaml(run / "config.yaml")
    values["evaluation"].pop("readings", None)
    return RunConfig.model_validate(values)


def position_of(setting: SettingPlan, method: str, seed: int) -> ConfidencePosition:
    """Whether a trained method states its confidence first or last, which decides its start."""
    return run_config(setting, setting.trained[method], seed).method.training_method.confidence_position
