"""The questions of a reproduction: made where a setting names embedded ones, and checked before any cell is run."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from coca_mindspeed.config.schema import DataConfig, RunConfig
from coca_mindspeed.data.records import Record, write_records
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.grading.label_check import check_records
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.confidence_start import check_enough_questions
from coca_mindspeed.local.model_files import reads_date
from coca_mindspeed.local.setup import load_data, record_sources
from experiments.miniature import miniature
from experiments.real_world.families import Sizes, real_world_sets
from experiments.reproduce.cells import ReproductionCell, run_config
from experiments.reproduce.plan import Plan, SettingPlan

Sets = Mapping[str, Sequence[Record]]  # name of each set -> its records; "evaluate" comes last


def missing_sets(plan: Plan, output: Path) -> dict[str, Sets]:
    """Setting -> the embedded questions that it names, of the settings whose files are not there yet."""
    return {
        name: _embedded(plan, setting)
        for name, setting in plan.settings.items()
        if setting.embedded and not _file(output, name, "evaluate").exists()
    }


def write_sets(sets: Mapping[str, Sets], output: Path) -> None:
    """Write each setting's record files, the evaluation's last: with it they are whole."""
    for setting, parts in sets.items():
        for part, records in parts.items():
            write_records(_file(output, setting, part), records)


def warm_up_file(output: Path, setting: str) -> Path:
    """The embedded lessons of a setting."""
    return _file(output, setting, "warm_up")


def set_files(plan: Plan, cell: ReproductionCell, output: Path, data: DataConfig) -> dict[str, Path]:
    """The files that a cell's questions come from; a set that is generated, or drawn from a name, has none."""
    if plan.settings[cell.setting].embedded:
        return {part: _file(output, cell.setting, part) for part in ("train", "evaluate", "warm_up")}
    return {name: Path(file) for name, file in (("train", data.train), ("evaluate", data.evaluate)) if file is not None}


def cell_config(plan: Plan, cell: ReproductionCell, output: Path) -> RunConfig:
    """A cell's configuration, without its start; what needs RLVR's model has RLVR's."""
    setting = plan.settings[cell.setting]
    config = run_config(setting, _overrides(setting, cell), cell.seed)
    if not setting.embedded:
        return config
    train, evaluate = (str(_file(output, cell.setting, part)) for part in ("train", "evaluate"))
    # Embedded records say themselves how they are graded.
    embedded = {"name": "records", "grader": "auto", "train": train, "evaluate": evaluate}
    return config.model_copy(update={"data": config.data.model_copy(update=embedded)})


def check_questions(plan: Plan, cells: Sequence[ReproductionCell], output: Path, missing: Mapping[str, Sets]) -> None:
    """Refuse what a cell that is not done could not ask or grade; nothing is written.

    Args:
        plan: the reproduction's.
        cells: all of them.
        output: the reproduction's directory.
        missing: the embedded questions that are still to be written.

    Raises:
        ConfigError: a setting has no held-out questions, or not the same for all of its methods.
        DataError: a file cannot be read, a record lacks what its answers are graded by, or a held-out data set is of
            several categories.
        GradingError: an unknown grader or option, or what the grader needs is missing.
    """
    seen: set[tuple[str, tuple[str, ...]]] = set()
    checked: list[tuple[str, DataConfig, int]] = []
    held_out: dict[str, tuple[object, ...]] = {}
    for cell in cells:
        if cell.kind == "start" or cell.done(output):
            continue
        composed = (cell.setting, tuple(_overrides(plan.settings[cell.setting], cell)))
        if composed in seen:
            continue
        seen.add(composed)
        config = cell_config(plan, cell, output)
        data = config.data
        asked = (data.name, data.evaluate, data.evaluate_size, data.seed)
        if held_out.setdefault(cell.setting, asked) != asked:
            raise ConfigError(
                f"setting {cell.setting!r}, {cell.name}: its overrides of data.* name other held-out questions than "
                "those of the methods before it; every method of a setting is measured on the same"
            )
        case = (cell.setting, data, config.confidence_start.questions)
        if case not in checked:
            checked.append(case)
            _check(cell, config, missing.get(cell.setting))


def _check(cell: ReproductionCell, config: RunConfig, sets: Sets | None) -> None:
    data = config.data
    train, evaluate = load_data(data) if sets is None else (sets["train"], sets["evaluate"])
    if not evaluate:
        raise ConfigError(
            f"setting {cell.setting!r}, {cell.name}: data.evaluate names no held-out questions, on which every method "
            "is measured"
        )
    _check_categories(cell, evaluate)
    check_enough_questions(config, train)
    system_prompt = config.method.training_method.system_prompt
    needs_date = config.model.path is not None and config.model.prompt_date is None
    if needs_date and reads_date(config.model, evaluate[0], system_prompt):
        raise ConfigError(
            f"setting {cell.setting!r}: the chat template of model.path={config.model.path} puts today's date into the "
            "prompt, and methods may be asked on different days; add model.prompt_date=YYYY-MM-DD to its overrides"
        )
    with closing(build_grader(data.grader, data.grader_options)) as grader:
        # Embedded questions are in no file yet.
        named: dict[Path | str, Sequence[Record]] = {"train": train, "evaluate": evaluate}
        check_records(grader, record_sources(data, train, evaluate) if sets is None else named)


def _check_categories(cell: ReproductionCell, evaluate: Sequence[Record]) -> None:
    """The tables have a column for each category, which is the mean over its data sets."""
    categories: dict[str, str] = {}
    for record in evaluate:
        if (other := categories.setdefault(record.dataset, record.category)) != record.category:
            raise DataError(
                f"setting {cell.setting!r}, data.evaluate: record {record.id!r} of {record.dataset!r} is of category "
                f"{record.category!r}, and others of that data set are of {other!r}; give each category's records a "
                "'dataset' of their own, because a data set counts in one column of the tables"
            )


def _overrides(setting: SettingPlan, cell: ReproductionCell) -> Sequence[str]:
    if cell.kind == "start":
        return [f"method={cell.start_method}"]
    return setting.trained[cell.name] if cell.kind == "trained" else setting.trained.get("rlvr", [])


def _embedded(plan: Plan, setting: SettingPlan) -> Sets:
    if setting.real_world is not None:
        # A record's category in the tables is its family's role.
        return {
            part: [replace(r, category=r.metadata["role"]) for r in records]
            for part, records in real_world_sets(Sizes(**setting.real_world.model_dump())).items()
        }
    assert setting.miniature is not None
    data = miniature(setting.miniature, size=plan.train_questions, evaluate=plan.evaluate_questions)
    return {"warm_up": data.warm_up, "train": data.train, "evaluate": data.evaluate}


def _file(output: Path, setting: str, part: str) -> Path:
    return output / setting / "tasks" / f"{part}.jsonl"
