"""Maps against scikit-learn, domains, cross-fitting, and the refusal of a map that belongs elsewhere."""

import json
from dataclasses import replace

import numpy as np
import pytest

from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.predictions import Prediction, read_predictions, write_predictions
from coca_router import maps
from coca_router.cli import main
from coca_router.config import read_serving_config, tier_policies
from coca_router.decision import Budget, decide
from coca_router.maps import (
    Identity,
    cross_fitted,
    fit_map,
    prompt_hash,
    read_certificate,
    read_map,
    write_map,
)

IDENTITY = Identity(model="m", prompt_sha256=prompt_hash("p"), temperature=1.0, data_sha256="d")


def overconfident(n, seed=0):
    rng = np.random.default_rng(seed)
    s = rng.uniform(0.02, 0.98, n).round(3)
    return s, rng.random(n) < s**2


def predictions(n, seed=0):
    return [
        Prediction(f"{seed}-{i}", "d", "q", "r", float(a), bool(b), 8, model="m")
        for i, (a, b) in enumerate(zip(*overconfident(n, seed), strict=True))
    ]


def test_domains_are_shrunk_to_the_global_map():
    s, y = overconfident(1000)
    rng = np.random.default_rng(1)
    other = rng.random(300) < s[:300]
    confidence, correct = np.concatenate([s, s[:300]]), np.concatenate([y, other])
    domains = ["a"] * 1000 + ["b"] * 300
    fitted = fit_map(confidence, correct, domains, IDENTITY, kind="platt", shrinkage=100)
    own, whole = fitted.domains["b"].curve, fitted.curve
    at = np.array([0.6])
    assert fitted.apply(at, ["b"]) == pytest.approx(0.75 * own(at) + 0.25 * whole(at))
    assert fitted.apply(at, ["unknown"]) == pytest.approx(whole(at))
    assert fitted.apply_one(0.6, None) == pytest.approx(float(whole(at)[0]))
    # Of too few labels, or of one kind only, there is no map of its own.
    few = fit_map(confidence, correct, ["a"] * 1290 + ["c"] * 10, IDENTITY)
    assert set(few.domains) == {"a"}


def test_cross_fitting_never_shows_a_question_its_own_labels():
    s, y = overconfident(400)
    ids = [str(i // 4) for i in range(400)]
    before = cross_fitted(s, y, ["d"] * 400, ids, IDENTITY, kind="isotonic")
    flipped = y.copy()
    flipped[:4] = ~flipped[:4]  # all samples of one question
    after = cross_fitted(s, flipped, ["d"] * 400, ids, IDENTITY, kind="isotonic")
    assert before[:4] == pytest.approx(after[:4])
    assert calibration_metrics(before, y).values["ece"] < calibration_metrics(s, y).values["ece"] / 2
    with pytest.raises(DataError, match="folds"):
        cross_fitted(s[:8], y[:8], ["d"] * 8, ids[:8], IDENTITY)


def test_a_map_is_refused_where_it_does_not_belong(tmp_path):
    s, y = overconfident(300)
    path = tmp_path / "map.json"
    fitted = fit_map(s, y, ["d"] * 300, IDENTITY)
    write_map(path, fitted)
    assert read_map(path) == fitted
    fitted.identity.require("m", "p", 1.0, where="x")
    for wrong in (("n", "p", 1.0), ("m", "q", 1.0), ("m", "p", 0.7)):
        with pytest.raises(ConfigError, match="x: "):
            fitted.identity.require(*wrong, where="x")
    for broken in ("{}", "no", json.dumps({**fitted.model_dump(mode="json"), "version": 2})):
        path.write_text(broken)
        with pytest.raises(ConfigError, match=r"map\.json: "):
            read_map(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_map(tmp_path / "absent")


def test_the_command(tmp_path, capsys):
    data, fresh, path = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "map.json"
    write_predictions(data, predictions(600, 0))
    write_predictions(fresh, predictions(600, 1))
    assert main(["calibrate", str(data), "--output", str(path), "--risk", "0.3", "--confidence", "0.9"]) == 0
    printed = capsys.readouterr().out
    assert "beta map from 600 labels" in printed
    assert read_map(path).certificate.threshold is not None
    out = tmp_path / "out.jsonl"
    assert main(["calibrate", str(fresh), "--apply", str(path), "--output", str(out)]) == 0

    def ece(rows):
        return calibration_metrics(np.array([p.confidence for p in rows]), np.array([p.correct for p in rows])).values[
            "ece"
        ]

    before, after = ece(read_predictions(fresh)), ece(read_predictions(out))
    assert after < before / 2
    capsys.readouterr()
    part, again = tmp_path / "part.jsonl", tmp_path / "again.jsonl"
    write_predictions(part, [*read_predictions(fresh), *read_predictions(data)[:7]])
    write_predictions(again, [*predictions(600, 0), replace(predictions(1, 0)[0], sample=1)])
    for more, message in (
        ([str(part), "--apply", str(path)], "7 of these 607"),
        ([str(again), "--risk", "0.3"], "'0-0'"),
        ([str(data), "--apply", str(path)], "600 of these 600"),
        ([str(fresh), "--apply", str(path), "--temperature", "0.5"], "temperature 1.0"),
        ([str(fresh), "--apply", str(path), "--model", "other"], "model 'm'"),
    ):
        assert main(["calibrate", *more, "--output", str(tmp_path / "x")]) == 1
        assert message in capsys.readouterr().err


def serving_config(printed, tmp_path):
    """The configuration of `serve` with the printed tiers."""
    tiers = printed.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "serving.yaml").write_text(f"backends: {{m: {{url: 'http://h/v1', model: m}}}}\n{tiers}")
    return read_serving_config(tmp_path / "serving.yaml")


@pytest.mark.parametrize("risk", [[], ["--risk", "0.001"]])
def test_a_tier_with_the_map_is_suggested(risk, tmp_path, capsys):
    """It answers where an answer is more likely right than wrong; so too where nothing is certified."""
    s, y = overconfident(400)
    write_predictions(tmp_path / "a.jsonl", predictions(400))
    assert main(["calibrate", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "map.json"), *risk]) == 0
    config = serving_config(capsys.readouterr().out, tmp_path)
    [policy] = tier_policies(config)
    accepted = np.array([decide(policy.recalibrate(c, "d"), policy.rule, Budget(1)).action == "answer" for c in s])
    assert y[accepted].mean() > 0.5 > y[~accepted].mean()


@pytest.mark.parametrize("risk", [[], ["--risk", "0.5"]])
def test_no_tier_is_suggested_where_the_answer_comes_first(risk, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for response, suggested in (("<confidence>0.9</confidence> 4", True), ("4 <confidence>0.9</confidence>", False)):
        write_predictions(tmp_path / "a.jsonl", [replace(p, response=response) for p in predictions(400)])
        assert main(["calibrate", "a.jsonl", "--output", "map.json", *risk]) == 0
        printed = capsys.readouterr().out
        assert ("```yaml" in printed) == suggested
        assert (str(tmp_path / "map.json") in printed) == suggested  # `serve` may run elsewhere


@pytest.mark.parametrize("wrong", [[], [7]])
def test_labels_that_are_nearly_all_right_are_certified(wrong, tmp_path, capsys):
    """The easiest set to certify is the hardest to fit or to cross-fit a map to."""
    rows = [Prediction(str(i), "d", "q", "r", 0.9 + i % 10 / 100, i not in wrong, 8, model="m") for i in range(300)]
    write_predictions(tmp_path / "a.jsonl", rows)
    command = ["calibrate", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "map.json"), "--risk", "0.05"]
    assert main([*command, "--sampling", '{"top_p": 0.9}']) == 0
    printed = capsys.readouterr().out
    assert ("no cross-fitted figures" in printed) == bool(wrong)
    identity, certificate = read_certificate(tmp_path / "map.json")
    assert (identity.model, identity.sampling, certificate.threshold) == ("m", {"top_p": 0.9}, 0.0)
    [tier] = serving_config(printed, tmp_path).tiers
    assert (tier.name, tier.certificate) == ("m", str(tmp_path / "map.json"))
    if not wrong:  # there is a certificate and no map
        with pytest.raises(ConfigError):
            read_map(tmp_path / "map.json")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--sampling", '{"temperature": 1}'], "temperature"),
        (["--sampling", '{"top_p": "x"}'], "top_p"),
        (["--sampling", '{"top_p": true}'], "top_p"),
        (["--model", "m0"], "(m0, m1)"),  # predictions of several models have no common map
    ],
)
def test_usage(options, named, tmp_path, capsys):
    rows = [replace(p, model=f"m{i % 2}") if "--model" in options else p for i, p in enumerate(predictions(30))]
    write_predictions(tmp_path / "a.jsonl", rows)
    assert main(["calibrate", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "x"), *options]) == 2
    assert named in capsys.readouterr().err


def test_the_figures_are_of_maps_of_the_kinds_that_are_saved(monkeypatch):
    """1,000 labels have an isotonic map, domains of 400 to 150 of them beta and Platt's."""
    s, y = overconfident(1000)
    domains = [name for name, count in (("a", 400), ("b", 300), ("c", 150), ("d", 150)) for _ in range(count)]
    saved = fit_map(s, y, domains, IDENTITY)
    kinds = []
    fit = maps.fit_map
    monkeypatch.setattr(maps, "fit_map", lambda *a, **k: kinds.append(fit(*a, **k)) or kinds[-1])
    cross_fitted(s, y, domains, list(map(str, range(1000))), IDENTITY)
    assert len(kinds) == 5
    for fitted in kinds:
        assert fitted.curve.kind == saved.curve.kind == "isotonic"
        assert {n: d.curve.kind for n, d in fitted.domains.items()} == {
            n: d.curve.kind for n, d in saved.domains.items()
        }
    assert {d.curve.kind for d in saved.domains.values()} == {"beta", "platt"}
