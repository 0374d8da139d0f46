"""Running one cell; it may run in a process of its own, so everything that it needs is on disk or in its arguments."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from coca_mindspeed.baselines.assessor import AssessorConfig
from coca_mindspeed.baselines.early_stopping import FitConfig
from coca_mindspeed.baselines.run import BaselineOptions, run_baseline
from coca_mindspeed.baselines.target_model import TargetModel
from coca_mindspeed.config.compose import ComposedConfig
from coca_mindspeed.config.schema import ModelConfig, RunConfig
from coca_mindspeed.data.embedded.miniature import SYMBOLS
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.predictions import Prediction, outcomes, write_predictions
from coca_mindspeed.grading.label_check import check_records
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.policy import Policy, choose_device, load_policy
from coca_mindspeed.local.setup import load_data, open_session, record_sources, warm_start
from coca_mindspeed.local.warm_up import read_warm_up_records, teach_format
from coca_mindspeed.reproduce.cells import ReproductionCell, run_config
from coca_mindspeed.reproduce.plan import Plan, SettingPlan
from coca_mindspeed.reproduce.provenance import made_from, source
from coca_mindspeed.reproduce.questions import cell_config, warm_up_file
from coca_mindspeed.utils.files import write_json

_BATCH = 500  # questions of a baseline at once, and of its parts


@dataclass(frozen=True)
class Workplace:
    """What every cell's work needs to know.

    Attributes:
        plan: the reproduction's.
        output: its directory.
        threads: CPU threads of a cell whose run names none (trainer.threads); None: as PyTorch likes.
        show_progress: draw each cell's progress bars, where one cell runs at a time.
    """

    plan: Plan
    output: Path
    threads: int | None = None
    show_progress: bool = False


def run_cell(place: Workplace, cell: ReproductionCell) -> float:
    """Run the cell unless it is done, and write its ``cell.json`` last.

    Returns:
        Seconds of wall time of this process; a cell that was stopped before does not add its earlier seconds.
    """
    if cell.done(place.output):
        return 0.0
    setting = place.plan.settings[cell.setting]
    threads = run_config(setting, [], cell.seed).trainer.threads or place.threads
    if threads is not None:
        torch.set_num_threads(threads)
    directory = cell.directory(place.output)
    directory.mkdir(parents=True, exist_ok=True)
    summary: dict[str, object] = {"setting": cell.setting, "seed": cell.seed, "name": cell.name}
    origin = made_from(place.plan, cell, place.output)
    started, made_by = time.perf_counter(), source()
    if cell.kind == "start":
        _warm_start(place, setting, cell)
    else:
        predictions = _predictions(place, setting, cell)
        write_predictions(directory / "predictions.jsonl", predictions)
        summary["datasets"] = _metrics_by_dataset(predictions)
    seconds = time.perf_counter() - started
    summary |= {
        "seconds": seconds,
        "sources": [made_by["commit"]],
        "machines": [made_by["machine"]],
        "made_from": origin,
    }
    write_json(directory / "cell.json", summary)
    return seconds


def _predictions(place: Workplace, setting: SettingPlan, cell: ReproductionCell) -> list[Prediction]:
    if cell.kind == "trained":
        return _train(place, setting, cell)
    config = cell_config(place.plan, cell, place.output)
    train, evaluate = load_data(config.data)
    lessons = train[: place.plan.predictor_questions]
    device = choose_device(config.trainer.device)
    on_start = cell.kind in ("instruct", "majority_vote")
    model = _start(place, cell, config, "first") if on_start else cell.of("rlvr").directory(place.output) / "run/model"

    def open_assessor(trained: Path | None) -> Policy:
        begin = place.plan.assessor_model
        path = trained or (_start(place, cell, config, "first") if begin is None else Path(begin))
        return load_policy(path, ModelConfig(compute_dtype=config.model.compute_dtype), device, where="assessor_model")

    with closing(build_grader(config.data.grader, config.data.grader_options)) as grader:
        check_records(grader, record_sources(config.data, lessons, evaluate))
        policy = load_policy(model, config.model, device)
        return run_baseline(
            "verbalised" if cell.kind == "instruct" else cell.kind,
            TargetModel(policy, grader, config.method, config.rollout, cell.seed),
            evaluate,
            cell.directory(place.output),
            _baseline_options(place, cell, config),
            training_records=lessons,
            open_assessor=open_assessor,
            # The same answers as RLVR's own row: only their confidence differs.
            answers=None if on_start else cell.of("rlvr").predictions(place.output),
        )


def _baseline_options(place: Workplace, cell: ReproductionCell, config: RunConfig) -> BaselineOptions:
    plan = place.plan
    fit = FitConfig(
        lr=plan.assessor_lr, weight_decay=0.0, batch=32, epochs=plan.assessor_epochs, patience=3, validation=0.1
    )
    return BaselineOptions(
        batch=min(_BATCH, config.rollout.batch_responses or _BATCH),
        samples=plan.samples,
        label=cell.name,
        assessor=AssessorConfig(max_prompt_tokens=config.rollout.max_prompt_tokens, fit=fit),
        show_progress=place.show_progress,
    )


def _train(place: Workplace, setting: SettingPlan, cell: ReproductionCell) -> list[Prediction]:
    config = cell_config(place.plan, cell, place.output)
    position = config.method.training_method.confidence_position
    start = _start(place, cell, config, position)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(start)})})
    run = cell.directory(place.output) / "run"
    session = open_session(ComposedConfig(config, setting.run, ()), run, resume=True, show_progress=place.show_progress)
    with closing(session):
        trainer = session.trainer
        trainer.run(session.resume_from)
        predictions = trainer.evaluate(trainer.evaluate_records, "after")
    return _labelled(predictions, trainer.evaluate_records, cell)


def _labelled(predictions: Sequence[Prediction], records: Sequence[Record], cell: ReproductionCell) -> list[Prediction]:
    return [
        replace(p, category=record.category, method=cell.name, seed=cell.seed)
        for p, record in zip(predictions, records, strict=True)
    ]


def _start(place: Workplace, cell: ReproductionCell, config: RunConfig, position: str) -> Path:
    """The model that every method of the setting starts from."""
    if config.model.path is not None and place.plan.settings[cell.setting].real_world is None:
        return Path(config.model.path)
    return cell.of(f"start-{position}").directory(place.output) / "warm_start"


def _warm_start(place: Workplace, setting: SettingPlan, cell: ReproductionCell) -> None:
    """Warm up the tiny model, or teach a model of one's own the format; without lessons for it, it starts as it is."""
    config = run_config(setting, [f"method={cell.start_method}"], cell.seed)
    tasks = warm_up_file(place.output, cell.setting)
    if setting.real_world is not None:
        _teach_format(place, cell, config, tasks)
        return
    if config.model.path is not None:
        return
    records = load_data(config.data)[0] if setting.miniature is None else list(read_records(tasks))
    symbols = "" if setting.miniature is None else SYMBOLS
    device = choose_device(config.trainer.device)
    warm_start(config, cell.directory(place.output), records, device, show_progress=False, symbols=symbols)


def _teach_format(place: Workplace, cell: ReproductionCell, config: RunConfig, lessons: Path) -> None:
    if config.model.path is None:
        raise ConfigError(
            f"setting {cell.setting!r}: real_world is for a model of your own; overrides name no model.path"
        )
    config = config.model_copy(update={"warm_up": config.warm_up.model_copy(update={"records": str(lessons)})})
    policy = load_policy(Path(str(config.model.path)), config.model, choose_device(config.trainer.device))
    output = cell.directory(place.output)
    teach_format(policy, read_warm_up_records(config), config, output, show_progress=place.show_progress)


def _metrics_by_dataset(predictions: Sequence[Prediction]) -> dict[str, object]:
    result: dict[str, object] = {}
    for dataset in dict.fromkeys(p.dataset for p in predictions):
        chosen = [p for p in predictions if p.dataset == dataset]
        data = outcomes(chosen)
        metrics = calibration_metrics(data.confidence, data.correct, data.tokens_to_confidence).headline()
        result[dataset] = {"category": chosen[0].category, **metrics}
    return result
