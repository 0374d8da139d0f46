"""``coca-mindspeed train``: the held-out questions before and after, and the report."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.local import train as train_module
from coca_mindspeed.local.evaluation import HeldOut
from tests.local.runs_for_tests import SMALL, killed, rows


def train(output: Path, *more: str) -> int:
    return main(["train", "demo", "seed=1", "--output", str(output), "--quiet", *SMALL, *more])


@pytest.fixture
def evaluated(monkeypatch, no_pictures) -> list[int]:
    """The number of questions of each evaluation outside the steps."""
    counts: list[int] = []
    evaluate = HeldOut.evaluate

    def counted(self, records, *more, **named):
        counts.append(len(records))
        return evaluate(self, records, *more, **named)

    monkeypatch.setattr(HeldOut, "evaluate", counted)
    return counts


@pytest.fixture(scope="module")
def printed() -> io.StringIO:
    return io.StringIO()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, printed):
    output = tmp_path_factory.mktemp("whole") / "run"
    with contextlib.redirect_stdout(printed):
        assert train(output) == 0
    return output


def test_a_run_shows_before_and_after(whole, printed):
    output = whole
    summary = json.loads((output / "summary.json").read_text())
    assert list(summary) == ["seed", "method", "before", "after", "questions", "seconds"]
    assert summary["before"]["n"] == summary["after"]["n"] == 35
    assert sorted(summary["seconds"]) == ["evaluate", "total", "train", "warm_up"]
    [first, *others] = rows(output / "metrics.jsonl")
    assert first["step"] == 0
    # evaluation.questions=20: the baseline is on the questions of the later evaluations.
    before = [row["correct"] for row in rows(output / "predictions_before.jsonl")]
    assert first["eval/accuracy"] == sum(before[:20]) / 20
    assert set(first) - {"step"} == {key for key in others[-1] if key.startswith(("eval/", "held_out/"))}
    for name in ("first_sight", "repeated", "held_out"):
        for key in ("accuracy", "confidence", "gap_error"):
            assert f"{name}/{key}" in others[-1]
    assert others[-1]["rollout/times_asked"] >= 1
    report = (output / "report.md").read_text()
    for picture in ("reliability.png", "training_curves.png", "gap.png"):
        assert f"({picture})" in report
        assert (output / picture).read_bytes().startswith(b"\x89PNG")
    page = (output / "report.html").read_text()
    assert page.count(' src="') == page.count('src="data:image/png;base64,iVBOR') == 4  # one of the risk
    assert "### Error by threshold: arithmetic" in report
    shown = printed.getvalue()
    assert str(output / "report.html") in shown
    assert f"coca-router serve --model {output / 'model'}" in shown


def test_report_makes_the_page_of_a_run_again(whole, tmp_path, monkeypatch):
    run = shutil.copytree(whole, tmp_path / "run")
    names = [str(path.relative_to(run)) for path in run.rglob("*") if path.suffix in (".html", ".md", ".png")]
    assert len(names) == 6
    for name in names:
        (run / name).unlink()
    monkeypatch.chdir(tmp_path)
    for output, options in ((run, []), (tmp_path / "elsewhere", ["--output", "elsewhere"])):
        assert main(["report", str(run), *options]) == 0
        assert [name for name in names if (output / name).read_bytes() != (whole / name).read_bytes()] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "run"]
    (run / "summary.json").unlink()  # as while it trains
    assert main(["report", str(run)]) == 0
    assert "### Training" in (run / "report.md").read_text()


def test_a_demo_is_the_same_run_without_the_baseline_row(whole, finished_demo):
    for name in ("predictions_before.jsonl", "predictions_after.jsonl", "model/model.safetensors"):
        assert (finished_demo / name).read_bytes() == (whole / name).read_bytes()
    baseline, rest = (whole / "metrics.jsonl").read_bytes().split(b"\n", 1)
    assert b'"step": 0' in baseline
    assert (finished_demo / "metrics.jsonl").read_bytes() == rest


def test_no_final_questions_no_evaluation(tmp_path, evaluated):
    output = tmp_path / "run"
    assert train(output, "evaluation.final_questions=0") == 0
    assert evaluated == []
    assert rows(output / "metrics.jsonl")[0]["step"] == 1
    assert not [name for name in ("summary.json", "report.md", "predictions_before.jsonl") if (output / name).exists()]
    assert train(output, "--resume") == 0  # the model before the training is gone
    assert evaluated == [35]
    summary = json.loads((output / "summary.json").read_text())
    assert list(summary) == ["seed", "method", "after", "questions", "seconds"]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_resumed_run_keeps_its_baseline(tmp_path, whole, monkeypatch, evaluated, checkpoint):
    output, update, steps = tmp_path / "run", train_module.update_policy, []

    def stopped(*arguments):
        steps.append(1)
        if len(steps) == 2:  # the first checkpoint is that of step 2
            raise KeyboardInterrupt
        return update(*arguments)

    if checkpoint:
        killed(whole, output)
    else:
        with monkeypatch.context() as patched:
            patched.setattr(train_module, "update_policy", stopped)
            assert train(output) == 130
    seconds = json.loads((output / "seconds.json").read_text())
    (output / "seconds.json").write_text(json.dumps({**seconds, "warm_up": 1000.0}))
    assert train(output, "--resume") == 0
    assert evaluated == ([35] if checkpoint else [35, 35])
    for name in ("metrics.jsonl", "predictions_before.jsonl", "predictions_after.jsonl", "model/model.safetensors"):
        assert (output / name).read_bytes() == (whole / name).read_bytes()
    seconds = json.loads((output / "summary.json").read_text())["seconds"]
    assert seconds["warm_up"] > 1000
    assert seconds["total"] == pytest.approx(sum(seconds[name] for name in ("warm_up", "evaluate", "train")))


def test_a_baseline_of_other_settings_is_not_kept(tmp_path, whole, monkeypatch, evaluated):
    output = tmp_path / "run"

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(train_module, "update_policy", stopped)
        assert train(output, "warm_up.lr=1e-4") == 130
        assert train(output, "evaluation.final_questions=7") == 130
    assert train(output, "--resume") == 0
    assert evaluated == [35, 7, 35, 35]
    assert (output / "predictions_before.jsonl").read_bytes() == (whole / "predictions_before.jsonl").read_bytes()
