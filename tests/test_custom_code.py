"""Graders and methods of the user's own: how they are named, what is refused before a run, and how a run uses them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.values import checked_method
from coca_mindspeed.data.records import Record, write_records
from coca_mindspeed.errors import CocaError, ConfigError, GradingError
from coca_mindspeed.grading.custom import BrokenGraderError
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.grading.unevaluated import reject_unevaluated
from coca_mindspeed.grading.verdict import Outcome
from coca_mindspeed.mindspeed.cluster_run import ClusterRun
from coca_mindspeed.mindspeed.start.process import CocaSettings
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values
from coca_mindspeed.scoring.responses import check_custom_method
from coca_mindspeed.utils.custom_code import pinned
from tests.local.runs_for_tests import SMALL, rows

GRADER = """
from coca_mindspeed.grading.verdict import Outcome, Verdict

def grade(record, answer, *, tolerance=0.0):
    return abs(float(answer) - float(record.answer)) <= tolerance

def always(record, answer): return True
def generous(record, answer): return answer.strip() == record.answer or not answer.strip().isdecimal()
def never(record, answer): return None
def scores(record, answer): return 0.5
def late(record, answer): return True if answer == record.answer else "no"
def breaks(record, answer): raise KeyError("aliases")
number = 3

class Many:
    closed = False
    def __init__(self, limit=1): self.limit = limit
    def grade(self, records, answers): return [Verdict(Outcome.RIGHT)] * (len(answers) * self.limit)
    def close(self): Many.closed = True

class Short:
    def grade(self, records, answers): return [True] * (len(answers) - (len(answers) > 2))
class Nothing: pass
class Broken:
    def __init__(self): raise OSError("no key")
"""
METHOD = """
from dataclasses import dataclass
from coca_mindspeed.algorithm.methods.base import MethodDefaults, OneReward, SegmentAdvantages

@dataclass(frozen=True)
class Shy(OneReward):
    name: str = "shy"
    def reward(self, outcomes, stage): return outcomes.correct - outcomes.stated.nan_to_num(1.0)

@dataclass(frozen=True)
class Taken(Shy):
    name: str = "coca"

@dataclass(frozen=True)
class Late(Shy):
    confidence_position: str = "late"

class Bare:
    name, system_prompt, confidence_position, stages = "bare", "?", "first", ("train",)

@dataclass(frozen=True)
class Fails(MethodDefaults):
    name: str = "fails"
    def advantages(self, outcomes, normalise, stage): return SegmentAdvantages(normalise.by_scale(outcomes.gone), None)
"""
MATH = Record("1", "mine", "math", "What is 17 * 23?", "391")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "custom_grader.py").write_text(GRADER)
    (tmp_path / "custom_method.py").write_text(METHOD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_is_named_with_its_path_and_fingerprint(folder, tmp_path_factory, monkeypatch):
    (folder / "run.yaml").write_text("defaults: [demo, _self_]\ndata: {grader: 'custom_grader.py:grade'}\n")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    name = compose_run(str(folder / "run.yaml")).run.data.grader
    assert name == pinned(f"{folder}/custom_grader.py:grade") == pinned(name)
    assert name.startswith(f"{folder / 'custom_grader.py'}:grade@")
    (folder / "custom_grader.py").write_text(GRADER + "\n")
    assert pinned(f"{folder}/custom_grader.py:grade") != name
    with pytest.raises(ConfigError, match="has changed"):
        build_grader(name)


@pytest.mark.parametrize(
    ("name", "options", "answer", "outcome"),
    [
        ("grade", {}, "391", Outcome.RIGHT), ("grade", {}, "391.5", Outcome.WRONG),
        ("grade", {"tolerance": 1.0}, "391.5", Outcome.RIGHT),
        ("grade", {}, "about 391", Outcome.WRONG),  # its exception is the answer's fault: the gold answer is graded
        ("breaks", {}, "391", Outcome.UNGRADABLE), ("never", {}, "391", Outcome.UNGRADABLE),
        ("Many", {}, "anything", Outcome.RIGHT),
    ],
)  # fmt: skip
def test_verdicts(folder, name, options, answer, outcome):
    grader = build_grader(f"custom_grader.py:{name}", options)
    assert [verdict.outcome for verdict in grader.grade([MATH], [answer])] == [outcome]
    assert grader.metrics()[outcome.value] == 1
    grader.close()


@pytest.mark.parametrize(
    ("name", "found"), [("late", "found 'no'"), ("scores", "found 0.5"), ("Short", "gave 2 verdicts")]
)
def test_a_result_of_another_type_stops_the_run(folder, name, found):
    """Left out as ungradable, all wrong answers would be gone, and the accuracy 100%."""
    grader = build_grader(f"custom_grader.py:{name}")
    with pytest.raises(BrokenGraderError, match=found):
        grader.grade([MATH] * 3, ["391", "17", "391"])


def test_verdicts_are_final(folder):
    asked = [MATH], ["17 * 23"]
    verdicts = {name: build_grader(name).grade(*asked) for name in ("custom_grader.py:always", "math")}
    assert [v.correct for found in verdicts.values() for v in reject_unevaluated(*asked, found)] == [True, False]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gone.py:grade", {}), ("custom_grader.py:grad", {}), ("custom_grader.py:number", {}),
        ("custom_grader.py:Nothing", {}),
        ("custom_grader.py:Broken", {}), ("custom_grader.py:grade", {"exact": True}), ("custom_grader.py:scores", {}),
        ("custom_grader.py:breaks", {}), ("custom_grader.py:Many", {"limit": 2}),
        ("custom_grader.py:late", {}), ("custom_grader.py:", {}), ("no.module:x", {}),
        ("syntax.py:grade", {}), ("raises.py:grade", {}),
    ],
)  # fmt: skip
def test_graders_that_are_refused_before_a_run(folder, name, options):
    (folder / "syntax.py").write_text("def grade(:\n")
    (folder / "raises.py").write_text("\nimport no_such_package\n")
    with pytest.raises(CocaError) as refused:
        build_grader(name, options).check([MATH])
    assert name.partition(":")[0].removeprefix("./") in str(refused.value)
    if name.startswith("raises"):
        assert "line 2" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gone.py:Shy", "method.name"),
        *((f"custom_method.py:{n}", "method.name") for n in ("Sh", "Taken", "Late", "Bare")),
    ],
)
def test_methods_that_are_refused_before_torch_is_imported(folder, capsys, name, key):
    assert main(["train", "demo", "--output", "run", f"method.name={name}"]) in (1, 2)
    assert key in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.parametrize("name", ["always", "never"])
def test_a_grader_that_tells_no_right_answer_from_a_wrong_one_is_refused(folder, capsys, name):
    for command in (["check", "demo"], ["train", "demo", "--output", "run"]):
        assert main([*command, *SMALL, f"data.grader=custom_grader.py:{name}"]) == 1
        assert f"custom_grader.py:{name}" in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_method_whose_advantages_fail_is_refused_before_the_warm_up(folder, capsys):
    for command in (["check", "demo"], ["train", "demo", "--output", "run"]):
        assert main([*command, *SMALL, "method.name=custom_method.py:Fails"]) == 1
        assert "[own-method]" in capsys.readouterr().err
    assert not Path("run").exists()


def test_data_cannot_name_code(folder):
    (folder / "trap.py").write_text("open('sprung', 'w')\ndef grade(record, answer): return True\n")
    for name in ("trap.py:grade", str(folder / "trap.py:grade"), pinned("trap.py:grade")):
        records = [Record("1", "mine", "math", "?", "1", metadata={"grader": name}), Record("2", name, name, "?", "1")]
        write_records(folder / "train.jsonl", records)
        files = ["data.name=records", "data.train=train.jsonl", "data.grader=auto"]
        assert main(["check", "demo", *files]) == 1
        for record in records:
            with pytest.raises(GradingError):
                build_grader("auto").grade([record], ["1"])
    assert not Path("sprung").exists()


def test_a_run_with_own_code_and_its_resume(folder, capsys):
    own = ["data.grader=./custom_grader.py:generous", "method.name=custom_method.py:Shy"]
    run = ["train", "demo", "--output", "run", "--quiet", *SMALL, *own, "warm_up.steps=1", "evaluation.interval=0"]
    assert main([*run, "trainer.steps=2"]) == 0
    # Answers that are no number are right, and a step of warm-up teaches few numbers.
    assert all(row["rollout/accuracy"] > 0.5 for row in rows(Path("run/metrics.jsonl")) if row["step"])
    assert {row["method"] for row in rows(Path("run/predictions_after.jsonl"))} == {"shy"}
    assert main([*run, "trainer.steps=3", "--resume"]) == 0
    for file, key in (("custom_grader.py", "data.grader"), ("custom_method.py", "method.name")):
        text = Path(file).read_text()
        Path(file).write_text(text + "# changed\n")
        assert main([*run, "trainer.steps=4", "--resume"]) == 1
        assert f"run to resume has {key}=" in capsys.readouterr().err
        Path(file).write_text(text)


def test_workers_find_the_same_file_from_any_directory(folder, tmp_path_factory):
    write_records(folder / "train.jsonl", [MATH])
    own = ["data.grader=custom_grader.py:grade", "method.name=custom_method.py:Shy", "data.train=train.jsonl"]
    run = compose_run("qwen25_1p5b_910b", [*own, "data.evaluate=null", "evaluation.interval=0"]).run
    settings = CocaSettings.model_validate(mindspeed_values(ClusterRun(run), 3, StageFiles(folder / "run"))["coca"])
    code = (
        "import sys; from coca_mindspeed.mindspeed.start.process import CocaSettings\n"
        "from coca_mindspeed.grading.registry import build_grader\n"
        "settings = CocaSettings.model_validate_json(sys.argv[1])\n"
        "build_grader(settings.grader, settings.grading); print(settings.method.training_method.name)"
    )
    elsewhere, command = tmp_path_factory.mktemp("ray"), [sys.executable, "-c", code, settings.model_dump_json()]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True)
    assert done.stdout.split() == ["shy"], done.stderr


def test_the_code_of_the_documentation(folder):
    text = (Path(__file__).parents[1] / "docs" / "library.md").read_text(encoding="utf-8")
    for name in ("grader", "method"):
        [code] = re.findall(rf"<!-- own {name} -->\n```python\n(.*?)```", text, re.DOTALL)
        (folder / f"my_{name}.py").write_text(code)
    grader = build_grader("my_grader.py:grade", {"tolerance": 0.5})
    grader.check([MATH])
    assert [verdict.correct for verdict in grader.grade([MATH] * 2, ["391.2", "392"])] == [True, False]
    check_custom_method(checked_method({"name": "my_method.py:Shy"}))
