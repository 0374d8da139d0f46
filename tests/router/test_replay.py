"""Routing replayed: every number against the plain way of computing it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.predictions import Prediction, read_predictions, write_predictions
from coca_router.cli import main
from coca_router.config import read_serving_config, tier_policies
from coca_router.decision import Budget, decide
from coca_router.replay import join_tiers, setting_of_share, threshold_curve, thresholds_of


def drawn(n, seed, *, skill=0.5, tokens=40, invalid=0.05, informative=True):
    """Predictions of a model whose confidence is its chance of being right."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        chance = float(np.clip(rng.beta(2 * skill, 2 * (1 - skill)), 0.01, 0.99))
        stated = round(chance if informative else float(rng.random()), 2)
        valid = rng.random() >= invalid
        length = int(rng.integers(tokens // 2, tokens * 2))
        rows.append(Prediction(str(i), "sums", "q", "r", stated if valid else None, bool(rng.random() < chance),
                               min(8, length) if valid else None, tokens=length))  # fmt: skip
    return rows


def tiers_of(n=200, prices=(1.0, 5.0), **more):
    return join_tiers({"small": drawn(n, 1, skill=0.5, **more), "large": drawn(n, 2, skill=0.85)}, prices)


def test_every_threshold_equals_plain_routing():
    three = {"s": drawn(40, 1), "m": drawn(40, 2, skill=0.7), "l": drawn(40, 3, skill=0.9)}
    prices = [1.0, 4.0, 9.0]
    tiers = join_tiers(three, prices)
    for answer_first in (False, True):
        curve = threshold_curve(tiers, answer_first=answer_first)
        for row, threshold in enumerate(thresholds_of(tiers)):
            for i in range(40):
                cost, said = 0.0, [three[name][i] for name in three]
                for p, price in zip(said, prices, strict=True):
                    stops = p is said[-1] or (p.confidence is not None and p.confidence >= threshold)
                    opening = min(p.tokens, 32) if p.confidence is None else p.tokens_to_confidence
                    cost += price * (p.tokens if stops or answer_first else opening)
                    if stops:
                        break
                assert curve.cost[row, i] == pytest.approx(cost)
                assert curve.correct[row, i] == p.correct
                assert curve.last[row, i] == (p is said[-1])


def test_references_by_hand(tmp_path, capsys):
    """Four questions: the small tier costs 10 and is right on two, the large one 100 and right on three."""
    right = {"small": [1, 1, 0, 0], "large": [1, 0, 1, 1]}
    files = []
    for name, verdicts in right.items():
        stated = [0.9, 0.8, 0.2, 0.1] if name == "small" else [0.5] * 4
        rows = zip(stated, verdicts, strict=True)
        files.append(tmp_path / f"{name}.jsonl")
        answers = [Prediction(str(i), "d", "q", "r", s, bool(y), 2, tokens=10) for i, (s, y) in enumerate(rows)]
        write_predictions(files[-1], answers)
    assert main(["route", *map(str, files), "--prices", "1,10", "--output", str(tmp_path / "r.json")]) == 0
    figures = json.loads((tmp_path / "r.json").read_text())["stated"]
    assert figures["best_single"] == {"name": "large", "quality": 0.75, "cost": 100.0}
    assert figures["oracle"] == {"name": "oracle", "quality": 1.0, "cost": (10 + 10 + 100 + 100) / 4}
    [half] = [row for row in figures["settings"] if row["share"] == 0.5]
    assert (half["quality"], half["cost"]) == (1.0, (10 + 10 + 102 + 102) / 4)
    assert half["gain"] == pytest.approx(1 / 0.75 - 1)
    assert half["gap"] == 0.0
    assert half["random_mix"] == pytest.approx(0.5 + 0.25 * (56 - 10) / 90)
    [none] = [row for row in figures["settings"] if row["share"] == 0.0]
    assert (none["random_mix"], none["gain"], none["gap"]) == (0.5, pytest.approx(-1 / 3), 0.5)
    assert max(len(line) for line in capsys.readouterr().out.splitlines() if line.startswith("|")) <= 100


def test_the_command_and_its_refusals(tmp_path, capsys):
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    write_predictions(small, drawn(120, 1))
    write_predictions(large, drawn(120, 2, skill=0.85))
    command = ["route", str(small), str(large), "--output", str(tmp_path / "route.json")]
    assert main(command) == 0
    found = json.loads((tmp_path / "route.json").read_text())
    shares = [row["share"] for row in found["stated"]["settings"]]
    assert shares == sorted(shares)
    assert all(row["cost"] <= row["answer_first_cost"] for row in found["stated"]["settings"])
    write_predictions(large, drawn(119, 2))
    for arguments, message, code in (
        (command, "every tier should answer the same questions", 1),
        (["route", str(small), str(small)], "two different files", 2),
        ([*command, "--prices", "1"], "--prices: expected 2 numbers", 2),
    ):
        assert main(arguments) == code
        assert message in capsys.readouterr().err
    uncounted = [Prediction("1", "d", "q", "r", 0.5, True, 3)]
    with pytest.raises(DataError, match="has no 'tokens'"):
        join_tiers({"a": uncounted, "b": uncounted}, [1, 2])


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_the_printed_policy_sends_the_share(share, tmp_path, capsys):
    small, large = tmp_path / "small\nmodel.jsonl", tmp_path / "large.jsonl"
    write_predictions(small, drawn(400, 1))
    write_predictions(large, [replace(p, confidence=None, tokens_to_confidence=None) for p in drawn(400, 2, skill=0.9)])
    command = ["route", str(small), str(large), "--output", str(tmp_path / "route.json")]
    assert main([*command, "--share", str(share)]) == 0
    found = json.loads((tmp_path / "route.json").read_text())["stated"]["share"]
    assert found["low"] <= found["share"] <= found["high"]
    assert abs(found["share"] - share) < 0.06  # 5% are invalid, and so escalated; 101 confidences
    config = tmp_path / "serving.yaml"
    config.write_text(capsys.readouterr().out.partition("```yaml\n")[2].partition("```")[0])
    serving = read_serving_config(config)
    assert [tier.name for tier in serving.tiers] == ["small", "large"]
    [rule, _] = [policy.rule for policy in tier_policies(serving)]
    escalated = [decide(p.confidence, rule, Budget(1)).action == "escalate" for p in read_predictions(small)]
    assert np.mean(escalated) == pytest.approx(found["share"])  # as the proxy decides


@pytest.mark.parametrize("plain", [False, True])
def test_both_sources_are_compared_on_the_same_answers(plain, tmp_path, capsys):
    """The probability of an answer costs the whole answer of each tier that is asked."""
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    rng = np.random.default_rng(5)
    rows = [
        replace(p, answer_probability=float(np.clip(0.5 * p.correct + 0.5 * rng.random(), 0, 1)),
                **({"confidence": None, "tokens_to_confidence": None} if plain else {}))
        for p in drawn(300, 1)
    ]  # fmt: skip
    write_predictions(small, rows)
    write_predictions(large, [replace(p, confidence=None, tokens_to_confidence=None) for p in drawn(300, 2, skill=0.9)])
    command = ["route", str(small), str(large), "--output", str(tmp_path / "route.json"), "--share", "0.3"]
    assert main([*command, "--prices", "1,10"]) == 0
    found = json.loads((tmp_path / "route.json").read_text())
    assert set(found) >= {"answer_logprob"} | (set() if plain else {"stated"})
    assert ("stated" in found) != plain
    share = found["answer_logprob"]["share"]
    escalated = [p.answer_probability < share["threshold"] for p in rows]
    assert share["share"] == pytest.approx(np.mean(escalated))
    last = [10 * p.tokens * e for p, e in zip(read_predictions(large), escalated, strict=True)]
    assert (
        share["cost"] == share["answer_first_cost"] == pytest.approx(np.mean([p.tokens for p in rows]) + np.mean(last))
    )
    config = tmp_path / "serving.yaml"
    config.write_text(capsys.readouterr().out.rpartition("```yaml\n")[2].partition("```")[0])
    tier = read_serving_config(config).tiers[0]
    assert (tier.confidence.source, tier.states_confidence) == ("answer_logprob", not plain)


def test_the_interval_of_a_share_covers():
    """The threshold is chosen on 200 questions; the share on all others is in its 95% interval."""
    others = tiers_of(20_000)
    covered = 0
    for seed in range(40):
        tiers = join_tiers({"s": drawn(200, 100 + seed), "l": drawn(200, 900 + seed, skill=0.85)}, (1.0, 5.0))
        found = setting_of_share(tiers, 0.3)
        stated = others.confidence[0]
        truth = float((np.isnan(stated) | (stated < found.threshold)).mean())
        covered += found.low <= truth <= found.high
    assert covered >= 34  # binomial: 0.95 gives fewer with a chance of 1 in 200
