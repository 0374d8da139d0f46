"""Names from data are text wherever they are shown: terminal, pictures, pages and tables."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from coca_mindspeed.cli import main
from coca_mindspeed.cli.watch import dashboard
from coca_mindspeed.evaluation.plots import plot_text, png_bytes, reliability_diagram, training_curves
from coca_mindspeed.evaluation.predictions import Prediction, outcomes, write_predictions
from coca_mindspeed.utils.console import one_line

NAMES = [
    "[bold]run[/x]",
    "$_",
    "a $x_1 b",
    "_hidden",
    "\x1b[2Jgone",
    "\u202ereversed",
    "[/]",
    "$\\frac$",
    "lone \ud800",
    "東京 👩\u200d🚀",
]


def rows(**fields):
    return [Prediction(str(i), "d", "q", "r", 0.8, i % 2 == 0, 6, **fields) for i in range(6)]


@pytest.mark.filterwarnings("error")  # "Glyph missing from font"
def test_names_in_a_picture_are_drawn():
    figure = reliability_diagram({name: outcomes(rows()) for name in NAMES})
    assert png_bytes(figure, dpi=30)
    for axes, name in zip(figure.axes, NAMES, strict=False):
        assert axes.get_title().startswith(plot_text(name))
    curves = training_curves({name: [{"step": 1, "reward/answer": 0.5}] for name in NAMES})
    assert len(curves.legends[0].get_texts()) == len(NAMES)  # a label that begins with _ would be left out
    assert png_bytes(curves, dpi=30)
    assert plot_text("größer, Ωμέγα $x 東 🚀") == "größer, Ωμέγα \\$x \\u6771 \\U0001f680"
    assert one_line("東 🚀") == "東 🚀"


def test_a_directory_with_markup_in_its_name_can_be_watched(tmp_path, capsys):
    for name in ("run[", "[bold]"):
        directory = tmp_path / name / "x]"
        directory.mkdir(parents=True)
        (directory / "metrics.jsonl").write_text('{"step": "[/red]", "reward/answer": 0.5}\n')
        assert main(["watch", str(directory), "--once"]) == 0
        assert "x], step [/red]" in capsys.readouterr().out
    # The closing tag that rich takes for markup: run[/x], as a path of two directories.
    (tmp_path / "run[" / "x]" / "metrics.jsonl").unlink()
    stream = io.StringIO()
    Console(width=300, file=stream).print(dashboard(tmp_path / "run[" / "x]")[0])
    assert "run[/x]" in stream.getvalue()


def test_evaluate_prints_no_terminal_escape(tmp_path, capsys):
    [row, *_] = rows(model="\x1b[2Jgone\ud800\n# x", method="[/x]")
    values = [(dataset, i, 0.9 if i % 3 else 0.2) for dataset in "de" for i in range(100)]
    found = [replace(row, dataset=d, id=str(i), confidence=s, correct=s > 0.5 or i == 0) for d, i, s in values]
    write_predictions(tmp_path / "p.jsonl", found)
    assert main(["evaluate", str(tmp_path / "p.jsonl"), "--output", str(tmp_path / "o")]) == 0
    for text in (capsys.readouterr().out, (tmp_path / "o" / "metrics.md").read_text()):
        assert "\x1b" not in text
        for shown in ("| {}", "\n{}: from 0.9 on"):  # tables, suggested threshold
            assert shown.format("\\x1b[2Jgone\\ud800 # x [/x]") in text
