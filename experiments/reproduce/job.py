"""Run one job.  It may run in its own process, so all its inputs are files or arguments."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from coca_mindspeed.algorithm.parsing import THINK_TAG
from coca_mindspeed.baselines.predictors import FitConfig, TargetModel
from coca_mindspeed.baselines.run import BaselineOptions, run_baseline
from coca_mindspeed.config.compose import ComposedConfig
from coca_mindspeed.config.schema import ModelConfig, RunConfig
from coca_mindspeed.data.records import read_records
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.metrics import calibration_metrics
from coca_mindspeed.evaluation.predictions import Prediction, outcomes
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.evaluation import HeldOut
from coca_mindspeed.local.inputs import load_data, read_warm_up_records
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.logging import RunLog
from coca_mindspeed.local.policy import Policy, choose_device
from coca_mindspeed.local.run import LocalRun, warm_start
from coca_mindspeed.local.run_directory import with_model
from coca_mindspeed.local.sft import run_sft_warm_up
from coca_mindspeed.local.start import open_run
from coca_mindspeed.utils.directories import is_ours
from coca_mindspeed.utils.json_files import write_json
from experiments.answers import read_answers, with_reading, write_answers
from experiments.miniature import symbols_of
from experiments.readings import with_readings
from experiments.reproduce.plan import READINGS, Job, Plan, run_config
from experiments.reproduce.provenance import machine, made_from, source_commit
from experiments.reproduce.questions import job_config, overrides_of, set_file

_BATCH = 500  # questions of a baseline at a time


@dataclass(frozen=True)
class Workplace:
    """Plan and output directory of a reproduction.

    Attributes:
        plan: the plan.
        output: its directory.
        threads: CPU threads of a job whose run does not set trainer.threads; None: PyTorch's default.
        show_progress: show progress bars, for one job at a time.
    """

    plan: Plan
    output: Path
    threads: int | None = None
    show_progress: bool = False


def run_job(place: Workplace, job: Job) -> float:
    """Run the job unless it is done, write its ``cell.json`` last and return the seconds of this process."""
    if job.done(place.output):
        return 0.0
    trainer = run_config(place.plan.settings[job.setting], [], job.seed).trainer
    threads = trainer.threads or place.threads
    if threads is not None:
        torch.set_num_threads(threads)
    if not place.show_progress:
        disable_progress_bar()  # transformers 5 shows bars for the weights of any model
    directory = job.directory(place.output)
    directory.mkdir(parents=True, exist_ok=True)
    summary: dict[str, object] = {"setting": job.setting, "seed": job.seed, "name": job.name}
    origin = {
        "sources": [source_commit()],
        "machines": [machine(choose_device(trainer.device))],
        "made_from": made_from(place.plan, job, place.output),
    }
    started = time.perf_counter()
    if job.kind == "start":
        _make_start(place, job)
    else:
        run = {"trained": _train, "family_mean": _family_mean}.get(job.kind, _run_baseline)
        predictions: Sequence[Prediction] = run(place, job)
        write_answers(directory / "predictions.jsonl", predictions)
        summary["datasets"] = _metrics_by_dataset(predictions)
    seconds = time.perf_counter() - started
    write_json(directory / "cell.json", {**summary, "seconds": seconds, **origin})
    return seconds


def _run_baseline(place: Workplace, job: Job) -> Sequence[Prediction]:
    plan, config = place.plan, job_config(place.plan, job, place.output)
    train, evaluate = load_data(config.data)
    training_records = train[: plan.predictor_questions]
    device = choose_device(config.trainer.device)
    on_start = job.kind in ("instruct", "majority_vote")
    model = _start(place, job, config, "first") if on_start else job.other("rlvr").directory(place.output) / "run/model"

    def open_assessor(trained: Path | None) -> Policy:
        base = plan.assessor_model
        path = trained or (_start(place, job, config, "first") if base is None else Path(base))
        return load_policy(path, ModelConfig(compute_dtype=config.model.compute_dtype), device, where="assessor_model")

    fit = FitConfig(
        lr=plan.assessor_lr, weight_decay=0.0, batch=32, epochs=plan.assessor_epochs, patience=3, validation=0.1
    )
    options = BaselineOptions(
        batch=min(_BATCH, config.rollout.batch_responses or _BATCH),
        samples=plan.samples,
        label=job.name,
        assessor=fit,
        show_progress=place.show_progress,
    )
    with closing(build_grader(config.data.grader, config.data.grader_options)) as grader:
        grader.check([*training_records, *evaluate])
        policy = load_policy(model, config.model, device)
        predictions = run_baseline(
            "verbalised" if job.kind == "instruct" else job.kind,
            TargetModel(policy, grader, config.method, config.rollout, job.seed),
            evaluate,
            job.directory(place.output),
            options,
            training_records=training_records,
            open_assessor=open_assessor,
            # Rate the same answers as RLVR's own row.
            answers=None if on_start else _first_answers(place, job.other("rlvr")),
        )
        reads = job.kind == "instruct" and _asks_readings(place, job)
        return with_readings(policy, evaluate, predictions, config) if reads else predictions


def _first_answers(place: Workplace, job: Job) -> list[Prediction]:
    """The first answer to each question, without readings, which are of the job's own confidence."""
    return [with_reading(p, None) for p in job.predictions(place.output) if p.sample == 0]


def _asks_readings(place: Workplace, job: Job) -> bool:
    setting = place.plan.settings[job.setting]
    return READINGS in (*setting.overrides, *overrides_of(setting, job))


@dataclass(frozen=True)
class _ReadHeldOut(HeldOut):
    """Held-out questions whose files of answers also hold readings of the confidence."""

    def before(self, *, trained: bool, keep: bool) -> list[Prediction]:
        predictions = super().before(trained=trained, keep=keep)
        if predictions and not trained:
            self._add_readings(self.output / "predictions_before.jsonl")
        return predictions

    def while_training(self, step: int, log: RunLog, show: Callable[[str], None]) -> dict[str, float]:
        metrics = super().while_training(step, log, show)
        path = self.output / "evaluations" / f"step_{step:06d}.jsonl"
        if path.exists():  # written where a question has several answers
            self._add_readings(path)
        return metrics

    def _add_readings(self, path: Path) -> None:
        answers = read_answers(path)
        records = self.records[: len(answers) // self.config.evaluation.samples]
        write_answers(path, with_readings(self.policy, records, answers, self.config))


class _ReadRun(LocalRun):
    """A run whose evaluations compute readings of the confidence."""

    def held_out(self, policy: Policy) -> HeldOut:
        inputs = self.inputs
        return _ReadHeldOut(self.config, policy, inputs.grader, inputs.evaluate, self.output, inputs.show_progress)


def _train(place: Workplace, job: Job) -> Sequence[Prediction]:
    config, reads = job_config(place.plan, job, place.output), _asks_readings(place, job)
    start = _start(place, job, config, config.method.training_method.confidence_position)
    config = with_model(config, path=str(start))
    directory = job.directory(place.output) / "run"
    resume = is_ours(directory, "run")
    composed = ComposedConfig(config, job.name)
    with open_run(composed, directory, resume=resume, show_progress=place.show_progress) as local:
        if reads:
            local = _ReadRun(local.inputs, local.device, local.tokenizer, local.started)
        policy = local.start()
        # the curve's step 0
        before = local.evaluate_before(policy) if config.evaluation.samples > 1 else ()
        local.train(policy, before)
        held_out = local.held_out(policy)
        predictions = [replace(p, method=job.name) for p in held_out.evaluate(held_out.records, "after")]
        return with_readings(policy, held_out.records, predictions, config) if reads else predictions


def _family_mean(place: Workplace, job: Job) -> Sequence[Prediction]:
    """CoCA's answers, with the true success rate of each data set as the confidence."""
    answers = job.other("coca").predictions(place.output)
    rates = {
        dataset: float(outcomes(p for p in answers if p.dataset == dataset).correct.mean())
        for dataset in dict.fromkeys(p.dataset for p in answers)
    }
    return [
        replace(with_reading(p, None), confidence=rates[p.dataset], tokens_to_confidence=0, method=job.name)
        for p in answers
    ]


def _start(place: Workplace, job: Job, config: RunConfig, position: str) -> Path:
    """The model that every method of the setting with this confidence position starts from."""
    if config.model.path is not None and place.plan.settings[job.setting].real_world is None:
        return Path(config.model.path)
    return job.other(f"start-{position}").directory(place.output) / "warm_start"


def _make_start(place: Workplace, job: Job) -> None:
    """Train the tiny model or run a pretrained model's SFT warm-up; without built-in questions, use it as it is."""
    setting = place.plan.settings[job.setting]
    config = run_config(setting, [f"method={job.start_method}"], job.seed)
    examples, output = set_file(place.output, job.setting, "warm_up"), job.directory(place.output)
    device = choose_device(config.trainer.device)
    if setting.real_world is not None:
        if (path := config.model.path) is None:
            raise ConfigError(f"setting {job.setting!r}: real_world needs a pretrained model; add model.path=DIR")
        config = config.model_copy(update={"warm_up": config.warm_up.model_copy(update={"records": str(examples)})})
        policy = load_policy(Path(path), config.model, device)
        run_sft_warm_up(policy, read_warm_up_records(config), config, output, show_progress=place.show_progress)
    elif config.model.path is None:
        name = setting.miniature
        records = load_data(config.data)[0] if name is None else list(read_records(examples))
        symbols = "" if name is None else symbols_of(name)
        started = warm_start(config, output, records, device, show_progress=False, symbols=symbols)
        if name == "scratch":
            _let_template_think(started)


def _let_template_think(model: Path) -> None:
    """Open a thought behind the question where the template's variable ``enable_thinking`` is set."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    question = tokenizer.chat_template.removesuffix("=")
    tokenizer.chat_template = f"{question}{{%- if enable_thinking %}}{THINK_TAG}{{%- endif %}}="
    tokenizer.save_pretrained(model)


def _metrics_by_dataset(predictions: Sequence[Prediction]) -> dict[str, object]:
    result: dict[str, object] = {}
    for dataset in dict.fromkeys(p.dataset for p in predictions):
        chosen = [p for p in predictions if p.dataset == dataset]
        data = outcomes(chosen)
        metrics = calibration_metrics(data.confidence, data.correct, data.tokens_to_confidence).headline()
        result[dataset] = {"category": chosen[0].category, **metrics}
    return result
