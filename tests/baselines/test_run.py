"""Whole baselines on the tiny model: their predictions, and going on after a stop."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from coca_mindspeed import cli
from coca_mindspeed.baselines import AFTER_THE_ANSWER, BASELINES, P_TRUE_PROMPT, VOTES
from coca_mindspeed.baselines.predictors import FitConfig, ProbeConfig, save_probe, train_probe
from coca_mindspeed.baselines.run import BaselineOptions, run_baseline
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.data.records import Record, write_records
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.predictions import read_predictions
from coca_mindspeed.local.respond import answer_probabilities
from coca_mindspeed.utils import directories
from tests.baselines.models_for_tests import target_of, tiny_policy

QUICK = FitConfig(epochs=1, batch=16)
OPTIONS = BaselineOptions(batch=8, samples=3, probe=ProbeConfig(fit=QUICK), assessor=QUICK, show_progress=False)


def run(name, tmp_path, output, *, seed=0, **more):
    target = target_of(tiny_policy(tmp_path / "tiny"), seed)

    def open_assessor(path):
        return tiny_policy(tmp_path / "assessor_start", seed=1) if path is None else tiny_policy(tmp_path / "other", 2)

    records, more["training_records"] = arithmetic_records(20, "evaluate", 0), arithmetic_records(24, "train", 0)
    return run_baseline(name, target, records, tmp_path / output, OPTIONS, open_assessor=open_assessor, **more)


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_writes_predictions_and_goes_on_after_a_stop(tmp_path, name, monkeypatch):
    whole = run(name, tmp_path, "whole")
    records = arithmetic_records(20, "evaluate", 0)
    assert [p.id for p in whole] == [r.id for r in records]
    assert read_predictions(tmp_path / "whole" / "predictions.jsonl") == whole
    assert {p.method for p in whole} == {name}
    if name in VOTES:
        assert all(p.tokens_to_confidence >= 3 for p in whole)
        assert name == "weighted_vote" or all(p.confidence in (0.0, 1 / 3, 2 / 3, 1.0) for p in whole)
    elif name in AFTER_THE_ANSWER:
        assert all(p.tokens_to_confidence == p.tokens > 0 and 0 < p.confidence < 1 for p in whole)
    elif name != "verbalised":
        assert all(p.tokens_to_confidence == 0 and 0 <= p.confidence <= 1 for p in whole)
        assert len({p.confidence for p in whole}) > 1

    # Stopped when the second part of whatever is done in parts is about to be written, then run again.
    written = []

    def dying(path, rows):
        if "part_000001" in path.name:
            raise KeyboardInterrupt
        written.append(path)
        write(path, rows)

    write = directories.write_json_lines
    monkeypatch.setattr(directories, "write_json_lines", dying)
    with pytest.raises(KeyboardInterrupt):
        run(name, tmp_path, "stopped")
    assert written
    assert not (tmp_path / "stopped" / "predictions.jsonl").exists()

    def again(path, rows):
        assert path not in written, f"{path} was done twice"
        write(path, rows)

    monkeypatch.setattr(directories, "write_json_lines", again)
    assert run(name, tmp_path, "stopped") == whole


@pytest.mark.parametrize(("name", "trainer"), [("probe", "train_probe"), ("assessor", "train_assessor")])
def test_the_seed_of_a_predictor_is_that_of_the_baseline(tmp_path, monkeypatch, name, trainer):
    def stop(*arguments):
        seeds.append(arguments[-2])
        raise KeyboardInterrupt

    seeds = []
    monkeypatch.setattr(f"coca_mindspeed.baselines.run.{trainer}", stop)
    for seed in (0, 1, 1):
        with pytest.raises(KeyboardInterrupt):
            run(name, tmp_path, f"seed_{len(seeds)}", seed=seed)
    first, *others = seeds
    assert others[0] == others[1] != first


def test_answers_that_exist_are_not_sampled_again(tmp_path):
    answers = run("verbalised", tmp_path, "answers")
    probability = run("question_probability", tmp_path, "probability", answers=answers)
    assert [(p.response, p.correct) for p in probability] == [(p.response, p.correct) for p in answers]
    assert not (tmp_path / "probability" / "answers").exists()
    for wrong, named in ((answers[1:], "1 of 20"), ([*answers, replace(answers[0], method="rlvr")], "2 rows answer")):
        with pytest.raises(ConfigError, match=named):
            run("question_probability", tmp_path, "other", answers=wrong)


def test_the_probability_of_an_answer_by_hand():
    log_probs = torch.log(torch.tensor([[0.5, 0.5, 0.9, 0.4], [0.25, 1.0, 0.125, 1.0], [0.3, 0.2, 0.5, 1.0]]))
    rollout = SimpleNamespace(log_probs=log_probs, lengths=torch.tensor([4, 3, 2]))
    ends = torch.tensor([[2, 4], [3, 3], [2, 2]])
    stated = SimpleNamespace(stated=torch.tensor([0.7, torch.nan, 0.7]), segment_ends=ends)
    expected = [(0.9 * 0.4) ** (1 / 2), (0.25 * 1.0 * 0.125) ** (1 / 3), None]  # the second states no confidence
    assert answer_probabilities(rollout, stated, ("confidence", "answer")) == [pytest.approx(x) for x in expected]
    first = [(0.5 * 0.5) ** (1 / 2), (0.25 * 1.0 * 0.125) ** (1 / 3), (0.3 * 0.2) ** (1 / 2)]
    assert answer_probabilities(rollout, stated, ("answer", "confidence")) == pytest.approx(first)


def test_p_true_is_the_share_of_one_label_under_the_models_own_logits(tmp_path):
    [answer, *_] = run("p_true", tmp_path, "out")
    policy, record = tiny_policy(tmp_path / "tiny"), arithmetic_records(20, "evaluate", 0)[0]
    said = answer.response.rpartition("</confidence>")[2].strip()
    content = f"Question: {record.question}\nProposed answer: {said}"
    messages = [{"role": "system", "content": P_TRUE_PROMPT}, {"role": "user", "content": content}]
    ids = policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        logits = policy.model(torch.tensor([ids])).logits[0, -1]
    right, wrong = (policy.tokenizer(label, add_special_tokens=False)["input_ids"] for label in "10")
    expected = logits[[*right, *wrong]].softmax(dim=0)[0]
    assert answer.confidence == pytest.approx(float(expected), rel=1e-4)


def test_given_answers_need_their_probability(tmp_path):
    answers = run("answer_logprob", tmp_path, "answers")
    assert run("answer_logprob", tmp_path, "again", answers=answers) == answers
    with pytest.raises(ConfigError, match="1 of 20"):
        run("answer_logprob", tmp_path, "other", answers=[replace(answers[0], answer_probability=None), *answers[1:]])


def test_the_command_line(tmp_path, capsys):
    tiny_policy(tmp_path / "tiny")
    write_records(tmp_path / "data.jsonl", arithmetic_records(6, "evaluate", 0))
    command = ["baseline", "question_probability", "--model", str(tmp_path / "tiny"), "--device", "cpu", "--quiet"]
    command += ["--data", str(tmp_path / "data.jsonl"), "--max-new-tokens", "4", "--dtype", "float32"]
    assert cli.main([*command, "--output", str(tmp_path / "out")]) == 0
    assert len(read_predictions(tmp_path / "out" / "predictions.jsonl")) == 6
    assert json.loads((tmp_path / "out" / "settings.json").read_text())["name"] == "question_probability"
    assert cli.main([*command, "--output", str(tmp_path / "out"), "--seed", "1"]) == 1
    assert "seed=0, found 1" in capsys.readouterr().err
    probe = ["baseline", "probe", *command[2:], "--output", str(tmp_path / "probe")]
    assert cli.main(probe) == 2
    assert "--train" in capsys.readouterr().err
    write_records(tmp_path / "train.jsonl", arithmetic_records(20, "train", 0))
    probe += ["--train", str(tmp_path / "train.jsonl"), "--layer"]
    for layer in ("3", "-4"):  # the tiny model has the embedding and two blocks
        assert cli.main([*probe, layer]) == 2
        assert f"--layer {layer}: expected one from -3 to 2" in capsys.readouterr().err
    # A predictor is not asked about the questions that it was trained on.
    write_records(tmp_path / "train.jsonl", arithmetic_records(6, "evaluate", 0))
    assert cli.main(probe[:-1]) == 1
    assert "--train: 6 of 6 " in capsys.readouterr().err
    assert not (tmp_path / "probe").exists()


@pytest.fixture
def command(tmp_path):
    """A baseline whose results are there."""
    tiny_policy(tmp_path / "tiny")
    write_records(tmp_path / "data.jsonl", arithmetic_records(3, "evaluate", 0))
    words = ["baseline", "verbalised", "--model", str(tmp_path / "tiny"), "--device", "cpu", "--quiet"]
    words += ["--data", str(tmp_path / "data.jsonl"), "--max-new-tokens", "4", "--dtype", "float32"]
    words += ["--output", str(tmp_path / "out")]
    assert cli.main(words) == 0
    return words


def test_results_of_other_questions_or_another_model_are_refused(command, tmp_path, capsys):
    assert cli.main(command) == 0
    write_records(tmp_path / "data.jsonl", arithmetic_records(3, "evaluate", 1))
    assert cli.main(command) == 1
    assert "holds results with content of --data=" in capsys.readouterr().err
    write_records(tmp_path / "data.jsonl", arithmetic_records(3, "evaluate", 0))
    assert cli.main(command) == 0
    tiny_policy(tmp_path / "tiny", seed=3)  # trained further, say, and exported anew
    assert cli.main(command) == 1
    assert "holds results with content of --model=" in capsys.readouterr().err


def test_what_was_trained_before_is_looked_at_before_anything_is_sampled(command, tmp_path, capsys):
    probe = ["baseline", "probe", *command[2:-1], str(tmp_path / "out2"), "--trained", str(tmp_path / "prob")]
    assert cli.main(probe) == 2
    assert "--trained " in capsys.readouterr().err
    states, correct = torch.randn(40, 7), torch.arange(40) % 2 == 0
    save_probe(*train_probe(states, correct, ProbeConfig(fit=QUICK), 0), tmp_path / "prob")
    assert cli.main(probe) == 1
    assert "--trained " in capsys.readouterr().err
    assert not (tmp_path / "out2").exists()
    for name, options in (("probe", []), ("assessor", ["--assessor-model", str(tmp_path / "tiny")])):
        trained = ["baseline", name, *command[2:-1], str(tmp_path / name), "--train", str(tmp_path / "train.jsonl")]
        write_records(tmp_path / "train.jsonl", arithmetic_records(20, "train", 0))
        assert cli.main([*trained, *options]) == 0
        again = ["baseline", name, *command[2:-1], str(tmp_path / f"{name} again")]
        assert cli.main([*again, "--trained", str(tmp_path / name / name)]) == 0
        first, second = (tmp_path / f"{name}{more}" / "predictions.jsonl" for more in ("", " again"))
        assert first.read_bytes() == second.read_bytes()
        assert not (tmp_path / f"{name} again" / name).exists()


def test_a_grader_of_ones_own(command, tmp_path, capsys):
    grader = tmp_path / "own.py"
    grader.write_text("def nothing(record, answer):\n    return False\n")
    own = [*command[:-1], str(tmp_path / "own"), "--grader", f"{grader}:nothing"]
    assert cli.main(own) == 0
    assert {p.correct for p in read_predictions(tmp_path / "own" / "predictions.jsonl")} == {False}
    grader.write_text("def nothing(record, answer):\n    return True\n")
    assert cli.main(own) == 1  # the verdicts would be another grader's
    assert "grader=" in capsys.readouterr().err
    write_records(tmp_path / "data.jsonl", [Record("1", "d", "my kind", "1+1", "2")])
    vote = ["baseline", "majority_vote", *own[2:-3], str(tmp_path / "vote"), *own[-2:]]
    assert cli.main(vote) == 1  # votes compare answers by the graders of the records
    assert "'my kind'" in capsys.readouterr().err
    assert not (tmp_path / "vote").exists()
