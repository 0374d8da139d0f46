"""What ``make bench-check`` calls slower or larger, by numbers made by hand."""

import pytest

from benchmarks import check as bench
from benchmarks.check import BASELINES, FIGURES, Comparison, Figure, check, compare, read_baselines

SPEED, SIZE = "times as fast", "MiB"


@pytest.mark.parametrize(
    ("kind", "before", "now", "problem"),
    [
        (SPEED, 2.29, 2.00, None),
        (SPEED, 2.32, 2.00, "16% slower"),
        (SPEED, 2.0, 1.0, "100% slower"),
        (SPEED, 1.0, 9.0, None),
        (SIZE, 1000.0, 1049.0, None),
        (SIZE, 1000.0, 1061.0, "6% larger"),
        (SIZE, 1000.0, 100.0, None),
        (SPEED, None, 2.0, "has no baseline"),
        (SIZE, 1000.0, None, "is measured no more"),
    ],
)
def test_what_is_worse(kind, before, now, problem):
    assert Comparison("it", kind, before, now).problem == problem


@pytest.fixture
def two_figures(monkeypatch):
    """Figures that take their values from lists, one value a measurement."""
    values = {"fast": [], "large": []}
    kinds = {"fast": SPEED, "large": SIZE}
    figures = {name: Figure(kinds[name], lambda rounds, name=name: values[name].pop(0)) for name in values}
    monkeypatch.setattr(bench, "FIGURES", figures)
    return values


def run_check(baselines):
    return check(baselines, {"machine": "another"}, lambda names: bench.measured(names, 1))


def test_what_is_worse_once_is_measured_again(two_figures, capsys):
    two_figures["fast"], two_figures["large"] = [1.0, 1.9], [100.0]
    assert run_check({"fast": 2.0, "large": 100.0}) == 0
    assert two_figures == {"fast": [], "large": []}
    said = capsys.readouterr().out
    assert "the baselines' machine: another; here: {" in said
    two_figures["fast"], two_figures["large"] = [1.9], [108.0, 107.0]
    assert run_check({"fast": 2.0, "large": 100.0}) == 1
    assert "7% larger" in capsys.readouterr().out
    two_figures["fast"], two_figures["large"] = [1.9], [100.0]
    assert run_check({"fast": 2.0, "old": 1.0}) == 1
    said = capsys.readouterr().out
    assert "has no baseline" in said
    assert "is measured no more" in said


def test_the_committed_baselines_are_of_the_figures_that_are_measured():
    figures, content = read_baselines(BASELINES)
    assert list(figures) == list(FIGURES)
    assert {name: entry["kind"] for name, entry in content["figures"].items()} == {
        name: figure.kind for name, figure in FIGURES.items()
    }
    assert content["packages"]["torch"]
    compare(figures, figures, {})
