"""The plan of a reproduction: which runs, on which data, compared how; one YAML file."""

from pathlib import Path
from typing import Literal, get_args

from pydantic import Field, ValidationError, field_validator

from coca_mindspeed.config.checks import validation_problems
from coca_mindspeed.config.compose import config_directory
from coca_mindspeed.config.schema import Section
from coca_mindspeed.data.embedded.miniature import MiniatureName
from coca_mindspeed.errors import ConfigError, UsageError
from coca_mindspeed.evaluation.paper.published import check_setting
from coca_mindspeed.utils.text_formats import YamlError, did_you_mean, read_yaml

BaselineCell = Literal["instruct", "rlvr+question_prob", "rlvr+probe", "rlvr+assessor", "majority_voting"]
# Cells that a plan's trained methods must not be called like.
_TAKEN = (*get_args(BaselineCell), "start-first", "start-last")
# Beside the settings' directories in the reproduction's own.
_BESIDE_SETTINGS = ("report", "settings.json", ".lock")
# What embedded questions decide, and what an override may nevertheless say of it.
_DATA_OF_EMBEDDED = {
    "data.name": "records",
    "data.train": "set-by-the-plan",
    "data.evaluate": "set-by-the-plan",
    "data.grader": "auto",
    **dict.fromkeys(("data.rows", "data.train_size", "data.evaluate_size", "data.seed")),
}


class RealWorldPlan(Section):
    """Questions about the real world (docs/training.md): the most of each family in each of the three sets."""

    train: int = Field(600, ge=1, description="to train on")
    evaluate: int = Field(100, ge=2, description="held out, and of families that are never trained on")
    warm_up: int = Field(80, ge=1, description="to learn the format from, before anything else")
    hardest: float = Field(1.0, ge=0.1, le=1, description="the greatest difficulty of the trained families' questions")


class SettingPlan(Section):
    """One table's worth of runs: the same data and the same start for every method."""

    title: str = Field(description="as it stands above the tables")
    run: str = Field(description="ready-made run or YAML file that every training starts from")
    miniature: MiniatureName | None = Field(None, description="embedded data; null: what the run's data.* names")
    real_world: RealWorldPlan | None = Field(
        None, description="questions for a model of your own, which learns the format first; its categories are roles"
    )
    overrides: list[str] = Field(default_factory=list, description="of the run, for every cell")
    trained: dict[str, list[str]] = Field(description="name of each trained method -> its own overrides")
    baselines: list[BaselineCell] = Field(default_factory=list, description="what is not trained by reward")

    @property
    def embedded(self) -> bool:
        """Whether its questions come with this package, and not from the run's ``data.*``."""
        return self.miniature is not None or self.real_world is not None


class Plan(Section):
    """A whole reproduction."""

    title: str = Field(description="title of the report")
    settings: dict[str, SettingPlan]
    train_questions: int = Field(50_000, ge=100, description="of the embedded data")
    evaluate_questions: int = Field(1000, ge=8, description="held-out ones of each embedded family")
    samples: int = Field(16, ge=1, description="k of majority voting")
    predictor_questions: int = Field(4000, ge=10, description="answered questions a probe and an assessor learn from")
    assessor_model: str | None = Field(None, description="what becomes the assessor; null: the start of the setting")
    assessor_lr: float = Field(1e-5, gt=0, description="of its fine-tuning")
    assessor_epochs: int = Field(3, ge=1, description="at most")
    paper_setting: str = Field("qwen2.5-7b/math", description="the paper's main table that ours stands beside")

    @field_validator("settings")
    @classmethod
    def _settings_have_what_they_need(cls, settings: dict[str, SettingPlan]) -> dict[str, SettingPlan]:
        for name, setting in settings.items():
            _check_directory_name(name, "settings")
            if name in _BESIDE_SETTINGS:
                raise ValueError(f"{name}: is the name of something else in the reproduction's directory")
            if setting.miniature is not None and setting.real_world is not None:
                raise ValueError(f"{name}: has both 'miniature' and 'real_world'; one of them is its data")
            for baseline in setting.baselines:
                if baseline.startswith("rlvr+") and "rlvr" not in setting.trained:
                    raise ValueError(f"{name}: {baseline} needs 'rlvr' among the trained methods")
                if setting.baselines.count(baseline) > 1:
                    raise ValueError(f"{name}: baselines: {baseline} is there twice")
            _check_method_names(name, setting)
            if setting.embedded:
                _check_data_overrides(name, setting)
        return settings

    @field_validator("paper_setting")
    @classmethod
    def _paper_setting_is_the_papers(cls, setting: str) -> str:
        try:
            check_setting(setting)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return setting


def directory_name(method: str) -> str:
    """What the directory of a method's cell is called."""
    return method.replace(" ", "_").replace(",", "")


def _check_directory_name(name: str, where: str) -> None:
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        raise ValueError(f"{where}: {name!r}: cannot be the name of a directory, which holds its results")


def _check_method_names(where: str, setting: SettingPlan) -> None:
    """Each trained method has a directory, and so results, of its own."""
    taken = {directory_name(name): name for name in _TAKEN}
    for method in setting.trained:
        directory = directory_name(method)
        _check_directory_name(directory, f"{where}: trained")
        if (other := taken.get(directory)) is not None:
            whose = f"as that of {other!r}, whose results it would take for its own"
            raise ValueError(f"{where}: trained: {method!r}: its directory would be {directory!r} {whose}; rename it")
        taken[directory] = method


def _check_data_overrides(where: str, setting: SettingPlan) -> None:
    """Refuse what embedded questions would put aside."""
    for override in (o for listed in (setting.overrides, *setting.trained.values()) for o in listed):
        key, _, value = override.lstrip("+").partition("=")
        if key in _DATA_OF_EMBEDDED and value != _DATA_OF_EMBEDDED[key]:
            raise ValueError(f"{where}: {override}: has no effect, because the setting's questions come with the plan")


def plan_path(name: str) -> Path:
    """A plan of ``configs/reproduce`` by its name, or a path of your own.

    Raises:
        UsageError: there is no plan of that name.
    """
    if Path(name).suffix in (".yaml", ".yml"):
        return Path(name)
    ours = {path.stem: path for path in sorted((config_directory() / "reproduce").glob("*.yaml"))}
    if name not in ours:
        raise UsageError(
            f"--plan: unknown plan {name!r}{did_you_mean(name, ours)}; ready-made plans: {', '.join(ours)}"
        )
    return ours[name]


def read_plan(path: Path) -> Plan:
    """Read and check a plan.

    Raises:
        ConfigError: the file is missing or not a plan; every problem on a line of its own.
    """
    try:
        content = read_yaml(path)
    except OSError as error:
        raise ConfigError(f"--plan {path}: cannot be read: {error.strerror}") from error
    except YamlError as error:
        raise ConfigError(f"--plan {path}: is not valid YAML: {error}") from error
    try:
        return Plan.model_validate(content)
    except ValidationError as error:
        problems = validation_problems(error)
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems), problems) from error
