"""The logs of a run's iterations and validations, also where it was killed and goes on.

MindSpeed-RL's trainer is stood in for by the calls of its ``fit``; the loop itself runs under tests/integration.
"""

import sys
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from coca_mindspeed.data.records import Record, write_records
from coca_mindspeed.evaluation.predictions import VALIDATIONS, validation_file, validation_files, write_predictions
from coca_mindspeed.mindspeed.stages import trainer as stages_trainer
from coca_mindspeed.mindspeed.stages.metrics import append_line
from coca_mindspeed.mindspeed.stages.validation import Validation
from coca_mindspeed.mindspeed.start.process import CocaSettings
from coca_mindspeed.mindspeed.start.records import read_record_file, take_files
from coca_mindspeed.utils import saving
from coca_mindspeed.utils.json_files import read_json_lines
from coca_mindspeed.utils.saving import StopRequest
from tests.support.waiting import Clock


class Killed(BaseException):
    """The run was killed."""


class UpstreamMetric:
    """MindSpeed-RL's ``Metric``, as far as ``fit`` uses it."""

    def __init__(self):
        self.metric: dict[str, Any] = {}

    def update(self, key="", value=None, cumulate=False):
        self.metric.update(value if isinstance(value, dict) else {key: value})


class UpstreamLoggers:
    """MindSpeed-RL's ``Loggers``, as far as ``fit`` uses it; ``logged`` keeps what it was given."""

    def __init__(self, name):
        self.logged = []

    def info(self, msg, iteration=None, steps=None):
        self.logged.append(msg if iteration is None else {**msg})


class Iterations:
    """The calls by which ``fit`` logs its iterations."""

    def __init__(self):
        self.metrics = stages_trainer.iteration_metrics(UpstreamMetric)()
        self.logger = stages_trainer.iteration_logger(UpstreamLoggers)("grpo_trainer_hybrid")
        self.logger.info("start")

    def log(self, iteration, values):
        self.metrics.update(value=values)
        self.metrics.update("vllm_tps", 7.0)
        self.logger.info(self.metrics.metric, iteration, 6)


TOKENS = 24_000


class UpstreamTrainer:
    """The order of events in MindSpeed-RL's ``RayGRPOTrainer.fit``; ``die_at`` names the one before which it dies."""

    saved = 0

    def __init__(self, actor_worker, ref_worker, reward_list, **kwargs):
        self.actor_worker, self.reward_list, self.train_iters = actor_worker, reward_list, 6
        self.num_cpus_for_local_task, self.tokenizer = 1, SimpleNamespace(tokenizer=None)
        self.micro_batch_size = self.n_samples_per_prompt = self.global_batch_size = 2
        self.transfer_dock = {}
        self.die_at, self.on_event, self.saves = kwargs["die_at"], kwargs["on_event"], []

    def event(self, name, iteration):
        self.on_event(name, iteration)
        if self.die_at == (name, iteration):
            raise Killed

    def fit(self, data_iters):
        iteration = self.actor_worker.get_iteration()
        self.iterations = Iterations()
        while iteration < self.train_iters:
            begin = stages_trainer.time.monotonic()
            next(data_iters)
            self.event("metrics", iteration + 1)
            self.compute_advantage(blocking=True, guarantee_order=False)
            rare = {"rare": 1.0} if iteration == 2 else {}
            iteration += 1
            seconds = stages_trainer.time.monotonic() - begin
            speed = {"timing/all": seconds, "e2e_tps": TOKENS / seconds}
            self.iterations.log(iteration, {"grad_norm": float(iteration), **rare, **speed, **self.transfer_dock})
            if iteration % 2 == 0:
                self.save_checkpoint(iteration)

    def save_checkpoint(self, iteration):
        self.event("save", iteration)
        self.saves.append(iteration)
        UpstreamTrainer.saved = iteration


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts the trainer from the newest checkpoint; validations write a row each and may be where it dies.

    Returns what its iterations asked for; with ``on_event``, which is told of each event, the trainer.
    """
    section = {"eval_interval": 3, "eval_data": "e.jsonl", "output_dir": str(tmp_path), "checkpoint_minutes": 30.0}
    section["method"] = {"thinking": True}
    process = SimpleNamespace(coca=CocaSettings.model_validate(section), reference=True, max_new_tokens=9)
    asked: list[Any] = []
    nothing = SimpleNamespace(remote=lambda *_, **options: asked.append(options["seen"]) or [])
    ray = SimpleNamespace(remote=lambda _: SimpleNamespace(options=lambda **_: nothing), put=lambda value: value)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(stages_trainer, "process_settings", lambda: process)
    monkeypatch.setattr(stages_trainer, "fetch", lambda value: value)

    def report(dock, metrics):
        dock.update({name: value for name, (value, *_) in metrics.items()})

    monkeypatch.setattr(stages_trainer, "report", report)
    monkeypatch.setattr(UpstreamTrainer, "saved", 0)

    def prepare(self, settings, trainer):
        self._log, self._trainer = settings.output_dir / "validation.jsonl", trainer

    def validate(self, iteration):
        self._trainer.event("validation", iteration)
        append_line(self._log, {"step": iteration, "eval/accuracy": 0.5})

    monkeypatch.setattr(Validation, "__init__", prepare)
    monkeypatch.setattr(Validation, "run", validate)

    data = tmp_path / "train.jsonl"
    write_records(data, [Record(str(i), "d", "math", f"{i}+1=", str(i + 1)) for i in range(4)])
    take_files({str(data): read_record_file(data)})

    def run(die_at=None, on_event=None):
        config = SimpleNamespace(data_path=str(data), global_batch_size=2, seed=1, no_shuffle=False)
        worker = SimpleNamespace(get_iteration=lambda: UpstreamTrainer.saved, megatron_config=config)
        trainer = stages_trainer.grpo_trainer(UpstreamTrainer)(
            worker, None, [], die_at=die_at, on_event=on_event or (lambda *_: None)
        )
        if die_at is None:
            trainer.fit(iter(range(100)))
            return trainer if on_event else asked
        with pytest.raises(Killed):
            trainer.fit(iter(range(100)))
        return asked

    return run


def steps(path):
    return [row["step"] for _, row in read_json_lines(path)]


DEATHS = [("metrics", 1), ("metrics", 4), ("save", 4), ("save", 6), ("validation", 3), ("validation", 6)]


@pytest.mark.parametrize("die_at", DEATHS, ids=str)
@pytest.mark.parametrize("torn", [False, True])
def test_every_iteration_and_every_validation_is_logged_once(start, tmp_path, die_at, torn):
    start(die_at)
    samples = {n: tmp_path / "samples" / f"iteration_{n:06d}.jsonl" for n in range(1, 7)}
    for path in samples.values():
        path.parent.mkdir(exist_ok=True)
        path.touch()
    for step in (0, 3, 6):
        write_predictions(validation_file(tmp_path / VALIDATIONS, step), [])
    continued = UpstreamTrainer.saved
    if torn:
        for name in ("metrics.jsonl", "validation.jsonl"):
            with (tmp_path / name).open("a") as file:
                file.write('{"step": 5, "reward/an')
    start()
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    assert steps(tmp_path / "validation.jsonl") == [0, 3, 6]
    # Samples of iterations that come again are removed.
    assert [n for n, path in samples.items() if path.exists()] == list(range(1, continued + 1))
    kept = [step for step in (0, 3, 6) if continued and step <= continued]
    assert [*validation_files(tmp_path / VALIDATIONS)] == kept


def test_each_iteration_is_told_what_earlier_ones_asked(start):
    """Two of four questions an iteration; the run dies in the fourth and goes on behind the second."""
    first = [(seen, times) for seen, times in start(("save", 4))]
    assert first == [([False] * 2, 1.0), ([False] * 2, 1.0), ([True] * 2, 1.5), ([True] * 2, 2.0)]
    assert start()[4:] == [*first[2:], ([True] * 2, 2.5), ([True] * 2, 3.0)]


def test_a_run_that_ends_in_its_last_validation_has_it_done_at_the_next_start(start, tmp_path):
    """And a line of the log has what ``fit`` logs of its own iteration alone."""
    start(("validation", 6))
    assert UpstreamTrainer.saved == 6
    rows = [row for _, row in read_json_lines(tmp_path / "metrics.jsonl")]
    assert [row["step"] for row in rows if "rare" in row] == [3]
    assert all(row["vllm_tps"] == 7.0 for row in rows)
    assert steps(tmp_path / "validation.jsonl") == [0, 3]
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    start(("validation", 6))
    start()
    assert steps(tmp_path / "validation.jsonl") == [0, 3, 6]
    start()
    assert steps(tmp_path / "validation.jsonl") == [0, 3, 6]
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize(
    ("asked_at", "saves", "validated"),
    [
        (("metrics", 1), [1], [0]),  # by a signal in the first iteration; checkpoints come every second one
        (("metrics", 4), [2, 4], [0, 3]),
        (("validation", 3), [2, 3], [0, 3]),
        (("validation", 0), [], [0]),  # nothing is trained
        (("metrics", 6), [2, 4, 6], [0, 3, 6]),  # the last one ends as ever
    ],
)
def test_a_run_that_is_asked_to_stop_ends_after_its_iteration_saved_and_goes_on(
    start, tmp_path, asked_at, saves, validated
):
    request = StopRequest.of(tmp_path.parent)
    trainer = start(on_event=lambda *event: request.ask() if event == asked_at else None)
    assert trainer.saves == saves
    assert steps(tmp_path / "validation.jsonl") == validated
    assert request.answered() == (None if saves[-1:] == [6] else (saves or [0])[-1])
    request.withdraw()
    assert start(on_event=lambda *_: None).saves == [step for step in (2, 4, 6) if step > (saves or [0])[-1]]
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    assert steps(tmp_path / "validation.jsonl") == [0, 3, 6]


def test_an_iteration_is_saved_by_the_clock_too(start, monkeypatch):
    """After 30 minutes, of which an iteration takes 20; a checkpoint by the interval starts them anew."""
    clock = Clock(monkeypatch, saving)

    def twenty_minutes(name, _iteration):
        clock.ahead += 20 * 60 * (name == "metrics")

    assert start(on_event=twenty_minutes).saves == [2, 4, 6]
    UpstreamTrainer.saved = 0

    def forty_minutes(name, _iteration):
        clock.ahead += 40 * 60 * (name == "metrics")

    assert start(on_event=forty_minutes).saves == [1, 2, 3, 4, 5, 6]


def test_tokens_per_second_are_of_the_iteration_alone(start, tmp_path, monkeypatch):
    """40 minutes each; MindSpeed-RL's time has the half hours of a validation and of a checkpoint by the clock too."""
    clock = Clock(monkeypatch, saving)
    monkeypatch.setattr(stages_trainer, "time", clock)

    def pass_time(name, _iteration):
        clock.ahead += 60 * (40 if name == "metrics" else 30)

    start(on_event=pass_time)
    rows = [row for _, row in read_json_lines(tmp_path / "metrics.jsonl")]
    assert [row["timing/all"] / 60 for row in rows] == pytest.approx([70, 70, 40, 100, 40, 70], abs=0.1)
    assert [row["e2e_tps"] for row in rows] == pytest.approx([10] * 6, rel=1e-3)


def test_ray_may_have_pickled_the_class_in_the_meantime(tmp_path, monkeypatch):
    """Whatever Ray sends along with a class that is made in a function comes back into that very class, copied."""
    settings = CocaSettings.model_validate({"output_dir": str(tmp_path)})
    monkeypatch.setattr(stages_trainer, "process_settings", lambda: SimpleNamespace(coca=settings, reference=False))
    iterations = Iterations()
    for iteration in (1, 2):
        for made in (iterations.metrics, iterations.logger):
            assert cloudpickle.loads(cloudpickle.dumps(type(made))) is type(made)
        in_the_dock = cloudpickle.loads(cloudpickle.dumps(iterations.metrics))
        in_the_dock.reset()
        in_the_dock.update("seconds/advantage", [1.0])
        assert in_the_dock.metric == {"seconds/advantage": [1.0]}
        iterations.log(iteration, {"grad_norm": 0.5})
    assert steps(tmp_path / "metrics.jsonl") == [1, 2]


@pytest.mark.parametrize("reference", [True, False])
def test_no_time_is_reported_of_a_reference_that_is_not_there(reference, tmp_path, monkeypatch):
    """MindSpeed-RL reports it as 0."""
    process = SimpleNamespace(coca=CocaSettings(output_dir=tmp_path), reference=reference)
    monkeypatch.setattr(stages_trainer, "process_settings", lambda: process)
    Iterations().log(1, {"timing/non_overlap_reference_model": 0, "timing/non_overlap_adv": 0.1})
    [(_, row)] = read_json_lines(tmp_path / "metrics.jsonl")
    assert ("timing/non_overlap_reference_model" in row, row["timing/non_overlap_adv"]) == (reference, 0.1)


def test_an_iteration_whose_answers_cannot_be_graded_is_warned_about(monkeypatch, capsys):
    process = SimpleNamespace(coca=CocaSettings.model_validate({}), reference=False)
    monkeypatch.setattr(stages_trainer, "process_settings", lambda: process)
    iterations, warnings = Iterations(), []
    for iteration in range(1, 12):
        iterations.log(iteration, {"grading/ungradable_share": 1.0 if iteration > 6 else 0.0})
        warnings.append("warning: " in capsys.readouterr().err)
    assert warnings == [False] * 6 + [True] + [False] * 4


def test_the_gap_of_a_validation_warns_once_and_is_not_logged(tmp_path, monkeypatch, capsys):
    """The next iteration brings it; the answers of the training agree with their confidences."""
    process = SimpleNamespace(coca=CocaSettings(output_dir=tmp_path), reference=False)
    monkeypatch.setattr(stages_trainer, "process_settings", lambda: process)
    iterations = Iterations()

    def gap(name, confidence):
        return {f"{name}/accuracy": 0.5, f"{name}/confidence": confidence, f"{name}/gap_error": 0.01}

    for iteration in range(1, 8):
        validated = gap("held_out", 0.9) if iteration == 6 else {}
        iterations.log(iteration, {**gap("first_sight", 0.5), **validated})
        assert ("warning: " in capsys.readouterr().err) == (iteration == 6)
    written = [row for _, row in read_json_lines(tmp_path / "metrics.jsonl")]
    assert [row["step"] for row in written] == [1, 2, 3, 4, 5, 6, 7]
    for row in (*written, *iterations.logger.logged[1:]):
        assert row["first_sight/confidence"] == 0.5
        assert not [name for name in row if name.startswith("held_out/")]
