"""Readings of a confidence, against logits of whole strings."""

import pytest
import torch

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.evaluation.predictions import Prediction, read_predictions
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.tiny_model import write_tiny_model
from experiments.answers import Reading, read_answers, read_as, with_reading, write_answers
from experiments.readings import Numbers, read_confidences
from experiments.reproduce.job import Workplace, run_job
from experiments.reproduce.plan import READINGS, Plan, SettingPlan, jobs_of, run_config


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory, seed=0)
    run = compose_run("demo", [f"model.path={directory}", "model.compute_dtype=float32"]).run
    return load_policy(directory, run.model, torch.device("cpu"))


def whole_strings(policy, prompt, rows):
    """Log-prob of each row of tokens, by a forward pass of its own."""
    found = []
    for row in rows:
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*prompt, *row]])).logits[0, len(prompt) - 1 : -1]
        log_probs = policy.sampling_logits(logits, 1.0).log_softmax(-1)
        found.append(float(log_probs.gather(1, torch.tensor(row)[:, None]).double().sum()))
    return torch.tensor(found, dtype=torch.float64)


def greedy_number(policy, prompt, numbers):
    """The number of the most probable token after token, among beginnings of the numbers."""
    path = ()
    while path not in numbers.token_ids:
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*prompt, *path]])).logits[0, -1]
        following = sorted({row[len(path)] for row in numbers.token_ids if row[: len(path)] == path})
        path = (*path, max(following, key=lambda token: float(logits[token])))
    return numbers.token_ids.index(path)


@pytest.mark.parametrize("decimals", [1, 2, None])
def test_the_trie_gives_the_probabilities_of_whole_strings(policy, decimals):
    numbers = Numbers.of(policy, ["<confidence>0.5</confidence>4", "<confidence>0.7</confidence>", "4"], decimals)
    assert len(numbers.values) == {1: 11, 2: 101, None: 114}[decimals]
    prompts = policy.encode_prompts(arithmetic_records(3, "train", 0), "")
    log_probs, greedy = numbers.log_probs(policy, prompts)
    for prompt, found, number in zip(prompts, log_probs, greedy.tolist(), strict=True):
        torch.testing.assert_close(found, whole_strings(policy, prompt, numbers.token_ids), rtol=1e-4, atol=1e-4)
        assert number == greedy_number(policy, prompt, numbers)
    mass = log_probs.exp().sum(1)
    expected = (log_probs.softmax(1) @ torch.tensor(numbers.values, dtype=torch.float64)).tolist()
    for rows in (1, 1000):
        readings = read_confidences(policy, prompts, numbers, rows)
        assert [r.expected_confidence for r in readings] == pytest.approx(expected, rel=1e-4)
        assert [r.confidence_mass for r in readings] == pytest.approx(mass.clamp(max=1).tolist(), rel=1e-4)
    assert Numbers.of(policy, ["no confidence"], decimals) is None


QUICK = [
    *("warm_up.steps=120", "warm_up.batch=16", "rollout.prompts=4", "rollout.group_size=4", "trainer.steps=1"),
    *("data.evaluate_size=7", "rollout.batch_responses=7", "evaluation.interval=1", "evaluation.samples=3"),
]


def test_a_plan_asks_for_the_readings_of_a_job(tmp_path):
    trained = {"rlvr": ["method=rlvr", READINGS]}
    setting = {"title": "Sums", "run": "demo", "overrides": QUICK, "trained": trained, "baselines": ["instruct"]}
    plan = Plan.model_validate({"title": "T", "settings": {"sums": setting}})
    for job in jobs_of(plan, [0]):
        run_job(Workplace(plan, tmp_path), job)
    run = tmp_path / "sums" / "seed_0" / "rlvr" / "run"
    files = [run / "predictions_before.jsonl", run / "evaluations" / "step_000001.jsonl"]
    files += [run.parent / "predictions.jsonl", run.parents[1] / "instruct" / "predictions.jsonl"]
    for path in files:
        answers = read_answers(path)
        assert [answer.sample for answer in answers] == [*range(len(answers) // 7)] * 7
        assert all(0 < answer.reading.expected_confidence < 1 for answer in answers)
        assert all(0.5 < answer.reading.confidence_mass <= 1 for answer in answers)
        by_question = {answer.id: answer.reading for answer in answers}
        assert [answer.reading for answer in answers] == [by_question[answer.id] for answer in answers]
        assert len(set(by_question.values())) == 7
        assert len(read_predictions(path)) == len(answers)  # by the package, which ignores the columns


@pytest.mark.parametrize("own", [["method=rlcr"], ["method=coca", "method.confidence_decimals=4"]])
def test_readings_that_cannot_be_computed_are_refused(own):
    setting = SettingPlan(title="S", run="demo", trained={"own": [*own, READINGS]})
    with pytest.raises(ConfigError, match=READINGS):
        run_config(setting, setting.trained["own"], 0)


def test_files_keep_readings_that_cover_enough(tmp_path):
    answers = [Prediction(str(i), "sums", "q", "r", 0.5, i < 2, 3) for i in range(4)]
    readings = [Reading(0.9, 0.8, mass) for mass in (0.9, 1.0, 1.0)]
    known = [*map(with_reading, answers, readings), with_reading(answers[3], None)]
    write_answers(tmp_path / "answers.jsonl", known)
    assert read_answers(tmp_path / "answers.jsonl") == known
    assert [p.confidence for p in read_as(known, "draw")] == [0.5] * 4
    assert [p.confidence for p in read_as(known, "greedy")] == [0.9] * 3
    assert [p.confidence for p in read_as(known, "expectation")] == [0.8] * 3
    assert read_as([with_reading(answers[0], Reading(0.9, 0.8, 0.94))], "greedy") == []
    assert read_as(answers, "expectation") == []
    rows = (tmp_path / "answers.jsonl").read_text()
    (tmp_path / "broken.jsonl").write_text(rows.replace('"greedy_confidence": 0.9', '"greedy_confidence": 9', 1))
    with pytest.raises(DataError, match=r"broken\.jsonl:1.*greedy_confidence"):
        read_answers(tmp_path / "broken.jsonl")
