"""The reward worker and the advantage task by hand, with a transfer dock in this process."""

import errno
import itertools
import json
import math
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from coca_mindspeed.algorithm.boundary import TokenText
from coca_mindspeed.algorithm.methods import method_settings, training_method
from coca_mindspeed.algorithm.parsing import MATH_INSTRUCTION
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.prompt_form import PromptForm
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, GradingError, TrainingError
from coca_mindspeed.evaluation.predictions import VALIDATIONS, Prediction, read_predictions, validation_files
from coca_mindspeed.grading.verdict import ExactGrader, Outcome, Verdict
from coca_mindspeed.local.inputs import trained_prompt
from coca_mindspeed.mindspeed.stages import dock, reward_worker, validation
from coca_mindspeed.mindspeed.stages.advantage_task import compute_advantages
from coca_mindspeed.mindspeed.stages.dataset import RECORD
from coca_mindspeed.mindspeed.stages.dock import ROLLOUT_LOG_PROBS, SCORES, score_columns
from coca_mindspeed.mindspeed.stages.metrics import append_line, as_ratios, divide_ratios, ratio
from coca_mindspeed.mindspeed.stages.reward_worker import MindSpeedVerifier, RewardWorker, build_verifier
from coca_mindspeed.mindspeed.stages.validation import Validation
from coca_mindspeed.mindspeed.start.process import CocaSettings
from coca_mindspeed.scoring.metrics import WeightedMean
from coca_mindspeed.scoring.rollout import Scored
from coca_mindspeed.utils.json_files import read_json_lines
from tests.mindspeed.builders import FakeDock, without_ray

NAN = math.nan


@pytest.mark.parametrize(("indexes", "row"), [([0, 2], 1), ([1, 2], 0), ([0, 1, 3, 2], 2), ([0, 1, 2], None)])
def test_broken_groups_are_an_error(indexes, row):
    with pytest.raises(TrainingError, match="whole groups" if row is None else f"position {row} "):
        dock.check_groups(indexes, 2)
    dock.check_groups([2, 3, 0, 1], 2)  # groups may come in any order


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch):
    without_ray(monkeypatch)


def _scored_dock(shuffle=False, correct=(1.0, 0.0, 1.0, 1.0)):
    """Two groups of two, scored."""
    filled = FakeDock(rows=4, group=2, shuffle=shuffle)
    for name, values in {SCORES["correct"]: correct, SCORES["stated_confidence"]: [0.3, 0.0, 0.9, NAN]}.items():
        filled.put_experience.remote({name: [torch.tensor([v], dtype=torch.float64) for v in values]}, [0, 1, 2, 3])
    lengths = [2, 3, 1, 4]
    filled.put_experience.remote(
        {
            "responses": [torch.arange(n) for n in lengths],
            "response_length": [torch.tensor([n], dtype=torch.int32) for n in lengths],
            SCORES["confidence_length"]: [torch.tensor([1], dtype=torch.int32)] * 4,
            SCORES["segment_ends"]: [torch.tensor([1, n], dtype=torch.int32) for n in lengths],
        },
        [0, 1, 2, 3],
    )
    return filled


@pytest.mark.parametrize("guarantee_order", [False, True])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_advantage_stage_does_not_depend_on_the_dispatch(guarantee_order, count, shuffle):
    filled, settings = _scored_dock(shuffle), CocaSettings(method=method_settings(advantage_eps=0.0))
    samples = compute_advantages(
        filled, settings, count=count, group_size=2, rows=4, guarantee_order=guarantee_order, sample_prompts=1
    )
    up = 1 / math.sqrt(2)
    expected = [[up, up], [-up, -up, -up], [up], [-up, 0, 0, 0]]  # the second group's answers are both right
    for index, row in enumerate(expected):
        torch.testing.assert_close(filled.data["advantages"][index], torch.tensor(row))
        assert filled.data["returns"][index] is not None
    assert [(s["index"], s["correct"], s["confidence"], s["gesr"]) for s in samples] == [
        (0, True, 0.3, 0.5),
        (1, False, 0.0, 0.5),
    ]
    assert len(filled.metrics["seconds/advantage"]) == 1
    means = {name: sum(values) / len(values) for name, values in filled.metrics.items()}
    # Brier against GESR .5 and 1: (.2^2, .5^2) and (.1^2, invalid)
    assert divide_ratios(means)["reward/confidence"] == pytest.approx(-(0.04 + 0.25 + 0.01 + 1) / 4)


def test_rewards_that_are_equal_by_definition_are_equal_behind_the_dock():
    """Confidences .1 and .9 at GESR .5: an advantage of 1e-8 / 1e-8 would train whichever float32 rounds up."""
    scored = Scored(
        stated=torch.tensor([0.1, 0.9, 0.9, 0.1], dtype=torch.float64),
        stated_after=None,
        confidence_lengths=torch.ones(4, dtype=torch.int64),
        segment_ends=torch.tensor([[1, 2]] * 4),
        correct=torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64),
    )
    filled = FakeDock(rows=4, group=4)
    filled.put_experience.remote({name: list(column) for name, column in score_columns(scored).items()}, [0, 1, 2, 3])
    settings = CocaSettings(method=method_settings(advantage_eps=0.0))
    options = {"count": 4, "group_size": 4, "rows": 4, "guarantee_order": True, "sample_prompts": 0}
    compute_advantages(filled, settings, **options)
    advantages = torch.stack([filled.data["advantages"][row] for row in range(4)])
    assert not advantages[:, 0].any()
    assert advantages[:, 1].all()


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_entropy_bonus_is_of_the_rollouts_log_probs(shuffle):
    """Brier -.04 and -.25 at GESR .5, log pi of the confidences -1 and -5: rewards .06 and .25."""
    filled = _scored_dock(shuffle)
    log_probs = [[-1.0, -90.0], [-5.0, 0.0, 0.0], [-2.0], [-99.0, 0.0, 0.0, 0.0]]
    settings = CocaSettings(method=method_settings(advantage_eps=0.0, entropy_bonus=0.1), stall_timeout=0.2)
    options = {"count": 2, "group_size": 2, "rows": 4, "guarantee_order": False, "sample_prompts": 0}
    with pytest.raises(TrainingError, match=ROLLOUT_LOG_PROBS):
        compute_advantages(filled, settings, **options)
    filled.put_experience.remote({ROLLOUT_LOG_PROBS: list(map(torch.tensor, log_probs))}, [0, 1, 2, 3])
    compute_advantages(filled, settings, **options)
    up = 1 / math.sqrt(2)
    for index, row in enumerate([[-up, up], [up, -up, -up], [up], [-up, 0, 0, 0]]):
        torch.testing.assert_close(filled.data["advantages"][index], torch.tensor(row))


@pytest.mark.parametrize("shuffle", [False, True])
def test_questions_that_the_run_asked_before_are_measured_apart(shuffle):
    seen = ([False, True], 4 / 3)
    filled, settings = _scored_dock(shuffle), CocaSettings(method=method_settings(advantage_eps=0.0))
    options = {"count": 2, "group_size": 2, "rows": 4, "guarantee_order": False, "sample_prompts": 0}
    compute_advantages(filled, settings, **options, seen=seen)
    found = divide_ratios({name: sum(values) / len(values) for name, values in filled.metrics.items()})
    assert found["first_sight/accuracy"] == 0.5
    assert found["first_sight/confidence"] == pytest.approx(0.15)
    assert found["repeated/accuracy"] == 1.0
    assert found["repeated/confidence"] == pytest.approx(0.9)  # the other states no valid one
    assert found["rollout/times_asked"] == pytest.approx(4 / 3)


@pytest.mark.parametrize("method", ["coca", "joint"])
def test_one_scale_for_the_whole_iteration_whatever_the_dispatch(method):
    def written(count, shuffle, guarantee_order):
        filled = FakeDock(rows=12, group=2, shuffle=shuffle)
        draw = torch.Generator().manual_seed(5)
        every, lengths = list(range(12)), torch.randint(1, 5, (12, 1), generator=draw, dtype=torch.int32)
        for name, column in {
            SCORES["correct"]: torch.randint(0, 2, (12, 1), generator=draw).float(),
            SCORES["stated_confidence"]: torch.rand(12, 1, generator=draw),
            "response_length": lengths,
            SCORES["confidence_length"]: torch.ones(12, 1, dtype=torch.int32),
            SCORES["segment_ends"]: torch.cat([torch.ones(12, 1, dtype=torch.int32), lengths], dim=1),
        }.items():
            filled.put_experience.remote({name: list(column)}, every)
        settings = CocaSettings(method=method_settings(method, advantage_scale="batch"))
        options = {"group_size": 2, "rows": 12, "guarantee_order": guarantee_order, "sample_prompts": 0}
        compute_advantages(filled, settings, count=count, **options)
        assert len(filled.metrics["advantage/deviation/numerator"]) == 1
        return torch.cat([filled.data["advantages"][row] for row in every])

    whole = written(12, shuffle=False, guarantee_order=True)
    assert whole.any()
    for count, shuffle, order in itertools.product((2, 4, 6), (False, True), (False, True)):
        assert torch.equal(written(count, shuffle, order), whole)


def test_an_ungradable_answer_earns_no_advantage_and_its_group_of_two_is_dropped():
    filled = _scored_dock(correct=(1.0, NAN, 1.0, 1.0))
    samples = compute_advantages(
        filled, CocaSettings(), count=2, group_size=2, rows=4, guarantee_order=False, sample_prompts=1
    )
    assert [filled.data["advantages"][index].any().item() for index in range(4)] == [False, False, True, True]
    assert [(s["correct"], s["gesr"], s["answer_advantage"]) for s in samples] == [(True, None, 0.0), (None, None, 0.0)]
    metrics = divide_ratios({name: sum(values) / len(values) for name, values in filled.metrics.items()})
    assert metrics["group/dropped_share"] == 0.5
    assert metrics["grading/ungradable_share"] == 0.25
    assert metrics["rollout/accuracy"] == pytest.approx(1.0)
    assert metrics["rollout/gesr"] == 1.0


@pytest.mark.parametrize(("count", "named"), [(3, "adv_dispatch_size 3"), (2, "'compute_advantage'")])
def test_cut_groups_and_rows_that_never_come_are_errors(count, named):
    options = {"count": count, "group_size": 2, "rows": 4, "guarantee_order": False, "sample_prompts": 0}
    with pytest.raises(TrainingError, match=named):
        compute_advantages(FakeDock(4, 2), CocaSettings(stall_timeout=0.2), **options)


def test_ratios_are_divided_after_averaging():
    # Two microbatches, 1 of 2 tokens and 1 of 8 clipped: 2 / 10, not the mean of 1/2 and 1/8.
    parts = [ratio("clip", 1, 2), ratio("clip", 1, 8)]
    averaged = {name: sum(part[name] for part in parts) / 2 for name in parts[0]}
    assert divide_ratios({**averaged, "other": 3.0}) == {"clip": pytest.approx(0.2), "other": 3.0}
    assert divide_ratios(ratio("undefined", 0.0, 0.0)) == {}
    # Means of batches are averaged over their entries; an undefined one has no weight.
    parts = [
        as_ratios({"ece": WeightedMean(0.5, 1)}),
        as_ratios({"ece": WeightedMean(0.1, 3)}),
        as_ratios({"ece": WeightedMean(NAN, 0)}),
    ]
    averaged = {name: sum(part[name] for part in parts) / 3 for name in parts[0]}
    assert divide_ratios(averaged) == {"ece": pytest.approx(0.2)}


def test_a_metric_that_is_not_finite_is_null(tmp_path):
    append_line(tmp_path / "metrics.jsonl", {"grad_norm": math.nan, "kl": -math.inf, "actor/pg_loss": 0.5})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"grad_norm": None, "kl": None, "actor/pg_loss": 0.5}


def test_a_reward_worker_that_could_not_start_says_why_when_it_is_used():
    worker = RewardWorker()
    with pytest.raises(ConfigError, match="COCA_MINDSPEED_PROCESS"):
        worker.initialize(None, None, None)
    for use in (worker.compute_rm_score, lambda: worker.score_rows({}, [], "eval.jsonl")):
        with pytest.raises(GradingError, match="COCA_MINDSPEED_PROCESS"):
            use()


def test_verifiers():
    for name, kind in (("coca", ExactGrader), ("math_17k_acc", MindSpeedVerifier)):
        assert isinstance(build_verifier(SimpleNamespace(verifier_function=[name]), "exact", {}), kind)


def test_penalties_of_mindspeeds_verifiers_are_wrong_answers(monkeypatch):
    scores = [1.0, 0.0, -0.5, -1.0]
    models = ModuleType("mindspeed_rl.models")
    models.rule_verifier = SimpleNamespace(  # type: ignore[attr-defined]
        verifier=lambda answers, *_: ([scores[int(answer)] for answer in answers], {})
    )
    monkeypatch.setitem(sys.modules, "mindspeed_rl.models", models)
    verifier = MindSpeedVerifier(SimpleNamespace(verifier_function=["acc", "format"]))
    record = Record("0", "d", "math", "q0", "1")
    assert [v.correct for v in verifier.grade([record] * 4, list("0123"))] == [True, False, False, False]
    for partial in (0.5, 1.1, float("nan")):
        scores[0] = partial
        with pytest.raises(GradingError, match=r"\['acc', 'format'\] .*expected 1"):
            verifier.grade([record] * 4, list("0123"))


class Lenient:
    """Calls every answer right, but cannot grade an empty one."""

    def grade(self, records, answers):
        return [Verdict(Outcome.RIGHT if answer else Outcome.UNGRADABLE) for answer in answers]

    def close(self): ...


def test_a_validation_names_the_form_that_an_export_names(monkeypatch):
    records = [Record("0", "d", "math", "1+1=", "2")]
    method = method_settings(thinking=True, confidence_decimals=2)
    stubs = {
        "process_settings": lambda: SimpleNamespace(
            coca=CocaSettings(method=method, chat_template_kwargs={"a": 1}), max_new_tokens=9
        ),
        "build_verifier": lambda *_: Lenient(),
        "token_text": lambda *_: TokenText([bytes([byte]) for byte in range(256)]),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(reward_worker, name, stub)
    megatron = SimpleNamespace(global_batch_size=1, dataset_additional_keys=[], padded_vocab_size=256, data_path="r")
    worker = RewardWorker()
    tokenizer = SimpleNamespace(tokenizer=SimpleNamespace(eos_token_id=0))
    worker.initialize(megatron, SimpleNamespace(n_samples_per_prompt=1), tokenizer)
    worker.take_records({"r": records, "eval.jsonl": records})
    text = "<think><confidence>.50</confidence></think>2"
    given = {
        "responses": [torch.tensor(list(text.encode()), dtype=torch.int32)],
        "response_length": [torch.tensor([len(text)], dtype=torch.int32)],
        RECORD: [torch.tensor([0])],
    }
    [answer] = worker.score_rows(given, [0], "eval.jsonl")
    run = compose_run(
        "demo", ["method.thinking=true", "method.confidence_decimals=2", "+model.chat_template_kwargs.a=1"]
    )
    [exported] = trained_prompt(run.run, records).form.digests().values()
    assert answer.form == exported


@pytest.mark.parametrize("required", [True, False])
def test_the_reward_stage(monkeypatch, required):
    """A restated question earns nothing in training, where that is required; in a validation it is right."""
    records = [Record("0", "d", "math", "Compute 1+1=", "2", metadata={"grader": "math"})]
    for name, stub in {
        "process_settings": lambda: SimpleNamespace(
            coca=CocaSettings(require_evaluated=required), max_new_tokens=len(texts[1])
        ),
        "build_verifier": lambda *_: Lenient(),
        "token_text": lambda *_: TokenText([bytes([byte]) for byte in range(256)]),
    }.items():
        monkeypatch.setattr(reward_worker, name, stub)
    megatron = SimpleNamespace(
        global_batch_size=1, dataset_additional_keys=[RECORD], padded_vocab_size=256, data_path="r.jsonl"
    )
    rl_config = SimpleNamespace(n_samples_per_prompt=3, reward_dispatch_size=3, guarantee_order=False)
    texts = ["<confidence>.5</confidence>$1+1$", "<confidence>.5</confidence>2", ""]
    given = {
        "responses": [torch.tensor(list(text.encode()), dtype=torch.int32) for text in texts],
        "response_length": [torch.tensor([len(text)], dtype=torch.int32) for text in texts],
        RECORD: [torch.tensor([0])] * 3,
    }
    filled = FakeDock(rows=3, group=3)
    filled.put_experience.remote(given, [0, 1, 2])
    worker = RewardWorker()
    worker.initialize(megatron, rl_config, SimpleNamespace(tokenizer=SimpleNamespace(eos_token_id=ord("2"))))
    worker.take_records({"r.jsonl": records, "eval.jsonl": records})
    worker.init_transfer_dock(filled)
    worker.compute_rm_score()

    # Of the two with the most tokens, one ends by itself.
    shares = {name: sum(values) for name, values in filled.metrics.items() if name.startswith("response/cut_off_share")}
    assert divide_ratios(shares) == {"response/cut_off_share": 1 / 3}

    def written(column):
        return [float(filled.data[column][row]) for row in range(3)]

    assert written("rm_scores") == [float(not required), 1.0, 0.0]
    assert str(written(SCORES["correct"])) == f"[{float(not required)}, 1.0, nan]"
    assert written(SCORES["confidence_length"]) == [27, 27, 0]
    assert written(SCORES["stated_confidence"])[:2] == [0.5, 0.5]
    assert math.isnan(written(SCORES["stated_confidence"])[2])
    answers = worker.score_rows(given, [0, 1, 2], "eval.jsonl")
    assert [(a.id, a.sample, a.confidence, a.correct) for a in answers] == [
        ("0", 0, 0.5, True),
        ("0", 1, 0.5, True),
        ("0", 2, None, None),
    ]
    assert [(a.response, a.tokens) for a in answers] == [(text, len(text)) for text in texts]
    form = PromptForm(system_prompt=training_method("coca").system_prompt, instructions={"math": MATH_INSTRUCTION})
    named = ("d", "math", "2", "coca", form.digest(form.instructions["math"]))
    assert {(a.dataset, a.category, a.gold, a.method, a.form) for a in answers} == {named}


def test_a_validation_writes_its_predictions_and_metrics(monkeypatch, tmp_path):
    """Three questions in iterations of two, with two answers each."""
    right, stated = [True, False, True, True, None, False], [0.9, 0.1, None, 0.8, 0.5, 0.3]

    def score_rows(columns, rows, file):
        questions = [int(record) for record in columns[RECORD]]
        assert (file, rows) == (str(tmp_path / "e.jsonl"), list(range(len(questions))))
        return [
            Prediction(str(q), "d", "q", "r", stated[2 * q + i % 2], right[2 * q + i % 2], 3, sample=i % 2)
            for i, q in enumerate(questions)
        ]

    def put_prompts_experience(batch, samples, _columns):
        rows = [(prompt, record) for prompt, record in zip(*batch.values(), strict=True) for _ in range(samples)]
        names = ("prompts", RECORD)
        return {name: [row[at] for row in rows] for at, name in enumerate(names)}, list(range(len(rows)))

    class Dock(FakeDock):
        def _put_experience(self, data_dict, indexes, is_prompt):
            assert is_prompt
            columns = ("responses", "response_length", "input_ids", ROLLOUT_LOG_PROBS)
            answered = dict.fromkeys(columns, data_dict["prompts"])
            super()._put_experience({**data_dict, **answered}, indexes)

        def _clear(self):
            self.data.clear()

    upstream = SimpleNamespace(put_prompts_experience=put_prompts_experience)
    monkeypatch.setitem(sys.modules, "mindspeed_rl.trainer.utils.transfer_dock", upstream)
    monkeypatch.setattr(validation, "load_prompts", lambda *_: [np.array([1, 2])] * 3)
    for module in (validation, dock):
        monkeypatch.setattr(module, "fetch", lambda value, timeout=None: value)
    settings = CocaSettings.model_validate(
        {"eval_interval": 1, "eval_data": str(tmp_path / "e.jsonl"), "output_dir": str(tmp_path)}
    )
    worker = SimpleNamespace(
        rl_config=SimpleNamespace(max_prompt_length=9),
        generate_sequences=lambda blocking: None,
        wait_all_ref_objs_run_over=lambda: None,
    )
    run_by = SimpleNamespace(
        actor_worker=worker,
        tokenizer=SimpleNamespace(tokenizer=None),
        reward_list=[SimpleNamespace(score_rows=SimpleNamespace(remote=score_rows))],
        global_batch_size=2,
        n_samples_per_prompt=2,
        transfer_dock=Dock(rows=4, group=2),
        tensorboard=None,
        wandb=None,
    )
    of_run = Validation(settings, run_by)

    def fail(*_):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as full:
        full.setattr(validation, "write_predictions", fail)
        with pytest.raises(OSError, match="no space"):
            of_run.run(50)
    assert not of_run.is_done(50)  # so a resumed run repeats it
    run_by.transfer_dock.data.clear()
    named = of_run.run(50)
    assert of_run.is_done(50)
    [(step, file)] = validation_files(tmp_path / VALIDATIONS).items()
    assert step == 50
    written = read_predictions(file)
    assert [(p.id, p.sample) for p in written] == [(q, sample) for q in "012" for sample in (0, 1)]
    assert ([p.correct for p in written], [p.confidence for p in written]) == (right, stated)
    assert (named["eval/accuracy"], named["eval/ungradable_share"]) == (0.6, pytest.approx(1 / 6))
    [(_, logged)] = read_json_lines(tmp_path / "validation.jsonl")
    assert logged == {"step": 50, **named}
    assert list(run_by.transfer_dock.metrics["held_out/accuracy"]) == [named["held_out/accuracy"]]
