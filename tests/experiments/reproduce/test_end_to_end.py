"""A whole reproduction of a few steps, stopped in the middle and gone on with."""

import csv
from pathlib import Path

import pytest

from coca_mindspeed.evaluation.predictions import read_predictions
from experiments.__main__ import main
from experiments.reproduce import work_queue as schedule
from experiments.reproduce.cells import cells_of
from experiments.reproduce.plan import read_plan

PLAN = Path(__file__).with_name("tiny_plan.yaml")


@pytest.mark.slow
def test_a_tiny_reproduction(tmp_path, capsys, monkeypatch):
    output, report = tmp_path / "out", tmp_path / "report"
    command = ["reproduce", "--plan", str(PLAN), "--seeds", "1", "--jobs", "1"]
    command += ["--output", str(output), "--report", str(report)]
    cells = cells_of(read_plan(PLAN), [0])
    run_cell = schedule.run_cell

    def stop_at_joint(place, cell):
        if cell.name == "joint":
            raise KeyboardInterrupt
        return run_cell(place, cell)

    monkeypatch.setattr(schedule.run_cells, "__defaults__", (stop_at_joint,))
    assert main(command) == 130
    done = {cell: (cell.directory(output) / "cell.json").stat().st_mtime_ns for cell in cells if cell.done(output)}
    assert 0 < len(done) < len(cells)
    monkeypatch.setattr(schedule.run_cells, "__defaults__", (run_cell,))
    assert main(command) == 0
    assert all(cell.done(output) for cell in cells)
    assert all((cell.directory(output) / "cell.json").stat().st_mtime_ns == when for cell, when in done.items())

    said = {
        c.name: read_predictions(c.directory(output) / "predictions.jsonl") for c in cells[:13] if c.kind != "start"
    }
    answers = [(p.id, p.response, p.correct) for p in said["rlvr"]]
    for name in ("rlvr+question_prob", "rlvr+probe", "rlvr+assessor"):  # RLVR's answers, another's confidence
        assert [(p.id, p.response, p.correct) for p in said[name]] == answers
        assert {p.method for p in said[name]} == {name}
    assert {p.category for p in said["coca"]} == {"math", "code", "factual"}
    for table in (
        "claims",
        "short_main",
        "short_answer_first",
        "short_segment_against_joint",
        "short_choices",
        "short_sequential",
        "short_sequential_curves",
        "short_samples",
        "long_answer_first",
        "long_samples",
    ):
        for suffix in ("md", "csv", *(["png"] if not table.endswith("_samples") else [])):
            assert (report / f"{table}.{suffix}").is_file(), f"{table}.{suffix}"
    with (report / "short_main.csv").open() as file:
        methods = {row["method"] for row in csv.DictReader(file)}
    assert methods == {"instruct", "rlvr", "rlvr+question_prob", "rlvr+probe", "rlvr+assessor", "coca"}

    capsys.readouterr()
    assert main([*command[:-4], "--output", str(output), "--report-only", "--seeds", "2"]) == 0
    assert "seed 1, coca" in (output / "report" / "README.md").read_text()
    other = tmp_path / "other.yaml"
    other.write_text(PLAN.read_text().replace("samples: 3", "samples: 4"))
    assert main(["reproduce", "--plan", str(other), "--output", str(output), "--report-only"]) == 1
    assert "choose another directory" in capsys.readouterr().err
