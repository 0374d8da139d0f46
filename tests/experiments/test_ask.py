"""The table of the adapter's figures, by hand."""

from pathlib import Path

from coca_mindspeed.evaluation.predictions import Prediction, read_predictions
from experiments.ask import HEADER, table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results" / "ask"


def test_the_published_table_is_that_of_the_answers():
    files = (RESULTS / f"{name}.jsonl" for name in ("predictions", "untrained"))
    assert table(*map(read_predictions, files)) in (RESULTS / "README.md").read_text(encoding="utf-8")


def test_the_adapter_is_small():
    assert (ROOT / "examples" / "ask" / "adapter_model.safetensors").stat().st_size <= 6_000_000


def answers(rows):
    """Predictions of ``(dataset, category, confidence, correct)``."""
    return [
        Prediction(str(i), dataset, f"{i}?", "", confidence, correct, None, category=category)
        for i, (dataset, category, confidence, correct) in enumerate(rows)
    ]


def test_figures_by_hand():
    """Pooled, 4.5 of 6 pairs are in order (a tie is half); within, 1 of 1 and .5 of 2: (2 * 1 + 3 * .25) / 5."""
    adapted = answers(
        [
            ("capitals", "trained", 0.9, True),
            ("capitals", "trained", 0.4, False),
            ("sums", "far", 0.5, True),
            ("sums", "far", 0.5, False),
            ("sums", "far", 0.8, False),
        ]
    )
    untrained = answers([(p.dataset, p.category, None, i == 0) for i, p in enumerate(adapted)])
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(adapted, untrained).splitlines()]
    assert tuple(lines[0]) == HEADER
    rows = {row[0]: dict(zip(HEADER, row, strict=True)) for row in lines[2:]}
    assert list(rows) == ["all", "trained", "far"]
    every = rows["all"]
    assert (every["n"], every["mean confidence"]) == ("5", "0.62")
    assert every["right"].startswith("40.0% (")
    assert every["untrained"].startswith("20.0% (")
    assert every["difference"].startswith("+20.0% (")
    assert every["AUROC"].startswith("0.750 (")
    assert every["within kinds"].startswith("0.550 (")
    assert rows["far"]["AUROC"].startswith("0.250 (")
