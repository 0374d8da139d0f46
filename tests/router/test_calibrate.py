"""The command `calibrate`: its maps against scikit-learn, what it certifies and refuses, where its file may be used."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.metrics import calibration_metrics
from coca_mindspeed.evaluation.predictions import Prediction, write_predictions
from coca_router.calibrate import cross_fitted, fit_map
from coca_router.calibration import prompt_hash, read_calibration
from coca_router.cli import main
from coca_router.config import read_serving_config, tier_policies
from coca_router.decision import Budget, decide


def overconfident(n, seed=0):
    rng = np.random.default_rng(seed)
    s = rng.uniform(0.02, 0.98, n).round(3)
    return s, rng.random(n) < s**2


def predictions(n, seed=0, **more):
    return [
        Prediction(f"{seed}-{i}", "d", "q", "r", float(a), bool(b), 8, **{"model": "m", **more})
        for i, (a, b) in enumerate(zip(*overconfident(n, seed), strict=True))
    ]


@pytest.fixture
def calibrate(tmp_path, monkeypatch):
    """Run the command in an empty directory on rows of predictions; return its exit code."""
    monkeypatch.chdir(tmp_path)

    def run(rows, *options):
        write_predictions(tmp_path / "a.jsonl", rows)
        try:
            return main(["calibrate", "a.jsonl", "--output", "map.json", *options])
        except SystemExit as end:  # an option out of its range
            return end.code

    return run


def test_the_map_calibrates_other_answers_and_the_labels_choose_its_kind(calibrate, tmp_path):
    fresh, correct = overconfident(600, 1)
    for labels, kind in ((600, "platt"), (2000, "isotonic")):
        assert calibrate(predictions(labels), "--risk", "0.3", "--confidence", "0.9") == 0
        calibration = read_calibration(tmp_path / "map.json")
        assert (calibration.curve.kind, calibration.labels) == (kind, labels)
        after = np.array([calibration.recalibrate(s) for s in fresh])
        before, now = (calibration_metrics(c, correct).values["ece"] for c in (fresh, after))
        assert now < before / 2
    assert calibration.certificate.threshold is not None


def serving_config(printed, tmp_path):
    """The configuration of `serve` with the printed tiers."""
    tiers = printed.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "serving.yaml").write_text(f"backends: {{m: {{url: 'http://h/v1', model: m}}}}\n{tiers}")
    return read_serving_config(tmp_path / "serving.yaml")


@pytest.mark.parametrize("risk", [[], ["--risk", "0.001"]])
def test_a_tier_with_the_map_is_suggested(risk, calibrate, tmp_path, capsys):
    """It answers where an answer is more likely right than wrong; so too where nothing is certified."""
    s, y = overconfident(400)
    assert calibrate(predictions(400), *risk) == 0
    [policy] = tier_policies(serving_config(capsys.readouterr().out, tmp_path))
    accepted = np.array([decide(policy.recalibrate(c), policy.rule, Budget(1)).action == "answer" for c in s])
    assert y[accepted].mean() > 0.5 > y[~accepted].mean()


@pytest.mark.parametrize("risk", [[], ["--risk", "0.5"]])
def test_no_tier_is_suggested_where_the_answer_comes_first(risk, calibrate, tmp_path, capsys):
    for response, suggested in (("<confidence>0.9</confidence> 4", True), ("4 <confidence>0.9</confidence>", False)):
        assert calibrate([replace(p, response=response) for p in predictions(400)], *risk) == 0
        printed = capsys.readouterr().out
        assert ("```yaml" in printed) == suggested
        assert (str(tmp_path / "map.json") in printed) == suggested  # `serve` may run elsewhere


@pytest.mark.parametrize("plain", [True, False])
def test_the_answers_probability_is_calibrated_and_certified_alike(plain, calibrate, tmp_path, capsys):
    rows = [
        replace(p, answer_probability=p.confidence, confidence=None if plain else 0.5, tokens_to_confidence=None)
        for p in predictions(600)
    ]
    assert calibrate(rows, "--source", "answer_logprob", "--risk", "0.3") == 0
    found = read_calibration(tmp_path / "map.json")
    stated = [replace(p, confidence=p.answer_probability) for p in rows]
    assert calibrate(stated, "--risk", "0.3") == 0
    same = read_calibration(tmp_path / "map.json")
    assert (found.curve, found.certificate) == (same.curve, same.certificate)
    assert (found.identity.source, same.identity.source) == ("answer_logprob", "stated")
    assert (found.identity.prompt_sha256 == prompt_hash("")) == plain
    assert calibrate(rows, "--source", "answer_logprob") == 0
    [policy] = tier_policies(serving_config(capsys.readouterr().out.rpartition("cross-fitted")[2], tmp_path))
    assert policy.pinned.source == "answer_logprob"


@pytest.mark.parametrize("wrong", [[], [7]])
def test_labels_that_are_nearly_all_right_are_certified(wrong, calibrate, tmp_path, capsys):
    """The easiest set to certify is the hardest to fit or to cross-fit a map to."""
    rows = [Prediction(str(i), "d", "q", "r", 0.9 + i % 10 / 100, i not in wrong, 8, model="m/1") for i in range(300)]
    assert calibrate(rows, "--risk", "0.05", "--sampling", '{"top_p": 0.9}') == 0
    found = read_calibration(tmp_path / "map.json")
    assert (found.identity.model, found.identity.sampling) == ("m/1", {"top_p": 0.9})
    assert (found.certificate.threshold, found.curve is None) == (0.0, not wrong)  # a certificate needs no map
    printed = capsys.readouterr().out.replace("backend: m-1", "backend: m")
    [tier] = serving_config(printed, tmp_path).tiers
    assert (tier.name, tier.certificate) == ("m-1", str(tmp_path / "map.json"))


@pytest.fixture
def calibrate_file(tmp_path, monkeypatch):
    """Run the command in an empty directory on a file with this text; return its exit code."""
    monkeypatch.chdir(tmp_path)

    def run(name, text, *options):
        (tmp_path / name).write_text(text)
        return main(["calibrate", name, "--model", "m", "--output", "map.json", *options])

    return run


def csv(header, verdict):
    """120 rows of question, answer, prediction (wrong in each third) and confidence, by their columns."""
    rows = [f"q{i},{i},{i + (i % 3 == 0)},{0.9 - 0.4 * (i % 3 == 0):g}" for i in range(120)]
    return "\n".join([header, *(f"{row},{i % 3 != 0}" if verdict else row for i, row in enumerate(rows))])


GOLD = "\n".join(json.dumps({"id": str(i), "question": f"q{i}", "answer": str(i), "dataset": "d"}) for i in range(120))
RESPONSES = "\n".join(
    json.dumps({"id": str(i), "response": f"<confidence>{0.9 - 0.4 * (i % 3 == 0)}</confidence>{i + (i % 3 == 0)}"})
    for i in range(120)
)
# Files that `evaluate` reads: name, text and options.
READ = [
    ("a.csv", csv("question,answer,prediction,confidence", False), []),
    ("a.csv", csv("question,answer,prediction,p", False), ["--columns", '{"confidence": "p"}']),
    ("a.csv", csv("question,gold,response,confidence,correct", True), []),
    ("a.csv", csv("question,answer,prediction,confidence", False), ["--grader", "exact"]),
    ("a.jsonl", RESPONSES, ["--gold", "gold.jsonl"]),
]


@pytest.mark.parametrize(("name", "text", "options"), READ)
def test_it_takes_the_files_that_evaluate_takes(name, text, options, calibrate_file, tmp_path):
    (tmp_path / "gold.jsonl").write_text(GOLD)
    assert calibrate_file(name, text, *options) == 0
    calibration = read_calibration(tmp_path / "map.json")
    assert calibration.labels == 120
    assert calibration.recalibrate(0.9) == pytest.approx(1, abs=0.01)
    assert calibration.recalibrate(0.5) == pytest.approx(0, abs=0.01)


def test_it_takes_a_directory_of_one_file(tmp_path, capsys):
    for name in ("predictions", "predictions_after"):
        write_predictions(tmp_path / "d" / f"{name}.jsonl", predictions(120))
        code = main(["calibrate", str(tmp_path / "d"), "--output", str(tmp_path / "map.json")])
        assert code == (0 if name == "predictions" else 1)
    err = capsys.readouterr().err
    assert all(f"{name}.jsonl" in err for name in ("predictions", "predictions_after"))


@pytest.mark.parametrize(("labels", "warned"), [(99, True), (100, False)])
def test_a_map_from_few_labels_is_warned_of(labels, warned, calibrate, capsys):
    assert calibrate(predictions(labels)) == 0
    assert ("warning: 99 labels" in capsys.readouterr().err) == warned


ALL_RIGHT = [replace(p, correct=True) for p in predictions(30)]
REFUSED = {
    "temperature": (predictions(30), ["--sampling", '{"temperature": 1}'], 2, "--sampling"),
    "text": (predictions(30), ["--sampling", '{"top_p": "x"}'], 2, "top_p"),
    "boolean": (predictions(30), ["--sampling", '{"top_p": true}'], 2, "top_p"),
    "two models": (predictions(30) + predictions(30, 1, model="n"), ["--model", "m"], 2, "(m, n)"),
    "no model": (predictions(30, model=None), [], 2, "--model"),
    "two samples": ([*predictions(30), replace(predictions(1)[0], sample=1)], ["--risk", "0.3"], 1, "'0-0'"),
    "all right": (ALL_RIGHT, [], 1, "map"),
    "no confidence": ([replace(p, confidence=None) for p in ALL_RIGHT], [], 1, "a.jsonl"),
    "no log-prob": (predictions(30), ["--source", "answer_logprob"], 1, "answer_probability"),
    "prompt": (predictions(30), ["--system-prompt", "absent.txt"], 1, "absent.txt"),
    "risk": (predictions(30), ["--risk", "1.5"], 2, "--risk"),
    "confidence": (predictions(30), ["--confidence", "1"], 2, "--confidence"),
    "nothing to grade": (predictions(30), ["--grader", "exact"], 2, "--grader"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_their_key(name, calibrate, tmp_path, capsys):
    rows, options, code, named = REFUSED[name]
    assert calibrate(rows, *options) == code
    assert named in capsys.readouterr().err
    assert not (tmp_path / "map.json").exists()


def test_a_broken_file_is_refused(calibrate, tmp_path):
    path = tmp_path / "map.json"
    assert calibrate(predictions(300)) == 0
    content = json.loads(path.read_text())
    for broken in ("{}", "no", json.dumps({**content, "version": 1})):
        path.write_text(broken)
        with pytest.raises(ConfigError, match=r"map\.json: "):
            read_calibration(path)
    with pytest.raises(ConfigError, match="absent: "):
        read_calibration(tmp_path / "absent")


def test_the_logistic_map_has_the_largest_likelihood():
    s, y = overconfident(800)
    curve = fit_map("platt", s, y)

    def loss(weights):
        score = weights[0] * np.log(s / (1 - s)) + weights[1]
        return float(np.sum(np.logaddexp(0, score) - y * score))

    best = minimize(loss, np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-10})
    assert loss(curve.coefficients) == pytest.approx(best.fun, abs=1e-3)
    found = curve(np.array([0.3, np.nan]))
    assert found[0] == pytest.approx(1 / (1 + np.exp(-best.x[0] * np.log(0.3 / 0.7) - best.x[1])), abs=1e-3)
    assert np.isnan(found[1])


@pytest.mark.parametrize("kind", ["platt", "isotonic"])
def test_no_map_ever_falls(kind):
    s, y = overconfident(300)
    for labels in (y, ~y):
        curve = fit_map(kind, s, labels)
        values = curve(np.linspace(0, 1, 200))
        assert (np.diff(values) >= -1e-12).all()
        assert ((values >= 0) & (values <= 1)).all()
    separable = fit_map(kind, np.array([0.1, 0.2, 0.8, 0.9]), np.array([False, False, True, True]))
    assert np.isfinite(separable(np.array([0.0, 0.5, 1.0]))).all()
    with pytest.raises(ValueError, match="all equal"):
        fit_map(kind, s, np.ones(300, bool))


def test_cross_fitting_never_shows_a_question_its_own_labels():
    s, y = overconfident(400)
    ids = [str(i // 4) for i in range(400)]
    before = cross_fitted("isotonic", s, y, ids)
    flipped = y.copy()
    flipped[:4] = ~flipped[:4]  # all samples of one question
    assert before[:4] == pytest.approx(cross_fitted("isotonic", s, flipped, ids)[:4])
    assert calibration_metrics(before, y).values["ece"] < calibration_metrics(s, y).values["ece"] / 2
    with pytest.raises(ValueError, match="folds"):
        cross_fitted("platt", s[:8], y[:8], ids[:8])
