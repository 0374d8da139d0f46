"""The questions of a reproduction: write built-in ones, and check all before the first job."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from coca_mindspeed.config.schema import DataConfig, RunConfig
from coca_mindspeed.data.records import Record, read_records, write_records
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.inputs import load_data
from coca_mindspeed.local.model_files import needs_date
from experiments.miniature import miniature
from experiments.real_world.families import Sizes, real_world_sets
from experiments.reproduce.plan import Job, Plan, SettingPlan, run_config

PARTS = ("warm_up", "train", "evaluate")
Sets = Mapping[str, Sequence[Record]]  # part -> records, in the order of PARTS


def missing_sets(plan: Plan, output: Path) -> dict[str, Sets]:
    """Built-in questions of the settings whose files do not exist yet."""
    return {
        name: _built_in(plan, setting)
        for name, setting in plan.settings.items()
        if setting.built_in and not set_file(output, name, "evaluate").exists()
    }


def _built_in(plan: Plan, setting: SettingPlan) -> Sets:
    if setting.real_world is not None:
        # The tables have a column per category, here the family's role.
        sets = real_world_sets(Sizes(**setting.real_world.model_dump()))
        return {part: [replace(r, category=r.metadata["role"]) for r in records] for part, records in sets.items()}
    assert setting.miniature is not None
    data = miniature(setting.miniature, size=plan.train_questions, evaluate=plan.evaluate_questions)
    return {part: getattr(data, part) for part in PARTS}


def write_sets(sets: Mapping[str, Sets], output: Path) -> None:
    """Write the record files; a setting's ``evaluate.jsonl`` is written last and marks it as complete."""
    for setting, parts in sets.items():
        for part, records in parts.items():
            write_records(set_file(output, setting, part), records)


def set_file(output: Path, setting: str, part: str) -> Path:
    """The file of a setting's built-in questions."""
    return output / setting / "tasks" / f"{part}.jsonl"


class Repetition(NamedTuple):
    """How often a set of records asks its questions: the mean and the largest number of times."""

    questions: int
    records: int
    mean: float
    largest: int

    def __str__(self) -> str:
        return (
            f"{self.questions:,} different questions in {self.records:,} records; a question is asked {self.mean:.1f} "
            f"times on average, {self.largest:,} at most"
        )


def repetition(records: Iterable[Record]) -> Repetition:
    """Count how often each question is asked, of at least one record."""
    times = Counter(record.question for record in records)
    return Repetition(len(times), times.total(), times.total() / len(times), max(times.values()))


def how_often_asked(plan: Plan, output: Path) -> list[str]:
    """For each file of built-in questions, how often it asks a question."""
    return [
        f"{setting.title}, {part}: {repetition(read_records(file))}."
        for name, setting in plan.settings.items()
        for part in PARTS
        if setting.built_in and (file := set_file(output, name, part)).exists()
    ]


def question_files(plan: Plan, job: Job, output: Path, data: DataConfig) -> dict[str, Path]:
    """The existing files that a job's questions come from."""
    if plan.settings[job.setting].built_in:
        return {part: set_file(output, job.setting, part) for part in ("train", "evaluate", "warm_up")}
    return {name: Path(file) for name, file in (("train", data.train), ("evaluate", data.evaluate)) if file is not None}


def job_config(plan: Plan, job: Job, output: Path) -> RunConfig:
    """A job's configuration without its start; baselines on RLVR's model have RLVR's configuration."""
    setting = plan.settings[job.setting]
    config = run_config(setting, overrides_of(setting, job), job.seed)
    if not setting.built_in:
        return config
    train, evaluate = (str(set_file(output, job.setting, part)) for part in ("train", "evaluate"))
    data = {"name": "records", "grader": "auto", "train": train, "evaluate": evaluate}
    return config.model_copy(update={"data": config.data.model_copy(update=data)})


def overrides_of(setting: SettingPlan, job: Job) -> Sequence[str]:
    """The overrides of a job beside those of its setting."""
    if job.kind == "start":
        return [f"method={job.start_method}"]
    return setting.trained[job.name] if job.kind == "trained" else setting.trained.get("rlvr", [])


def check_questions(plan: Plan, jobs: Sequence[Job], output: Path, missing: Mapping[str, Sets]) -> None:
    """Check the questions of all unfinished jobs; writes nothing.

    Args:
        plan: the plan.
        jobs: all jobs.
        output: directory of the reproduction.
        missing: built-in questions that are not written yet.

    Raises:
        ConfigError: a setting has no held-out questions, or other ones for some methods.
        DataError: an unreadable file, a record that cannot be graded, or a data set of several categories.
        GradingError: an unknown grader or option, or a missing dependency of the grader.
    """
    composed: set[tuple[str, tuple[str, ...]]] = set()
    checked: list[tuple[str, DataConfig]] = []
    held_out: dict[str, tuple[object, ...]] = {}
    for job in jobs:
        key = (job.setting, tuple(overrides_of(plan.settings[job.setting], job)))
        if job.kind == "start" or key in composed or job.done(output):
            continue
        composed.add(key)
        config = job_config(plan, job, output)
        data = config.data
        asked = (data.name, data.evaluate, data.evaluate_size, data.seed)
        if held_out.setdefault(job.setting, asked) != asked:
            raise ConfigError(
                f"setting {job.setting!r}, {job.name}: overrides of data.* change the held-out questions; expected the "
                "same for every method of a setting"
            )
        case = (job.setting, data)
        if case not in checked:
            checked.append(case)
            _check(job, config, missing.get(job.setting))


def _check(job: Job, config: RunConfig, sets: Sets | None) -> None:
    data, where = config.data, f"setting {job.setting!r}, {job.name}"
    train, evaluate = load_data(data) if sets is None else (sets["train"], sets["evaluate"])
    if not evaluate:
        raise ConfigError(f"{where}: data.evaluate: no held-out questions")
    categories: dict[str, str] = {}  # the tables average a category over its data sets
    for record in evaluate:
        if (other := categories.setdefault(record.dataset, record.category)) != record.category:
            raise DataError(
                f"{where}, data.evaluate: record {record.id!r} of {record.dataset!r} is of category "
                f"{record.category!r}, others of that data set of {other!r}; use one 'dataset' per category"
            )
    if needs_date(config, evaluate[0]):
        raise ConfigError(
            f"{where}: the chat template of model.path={config.model.path} prints today's date, which differs between "
            "jobs; add model.prompt_date=YYYY-MM-DD to the overrides"
        )
    with closing(build_grader(data.grader, data.grader_options)) as grader:
        grader.check([*train, *evaluate])
