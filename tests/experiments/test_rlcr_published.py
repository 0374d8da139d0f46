"""The table of RLCR's published outputs: of a small file of our own, and of the publishers' where it is there."""

import json
from itertools import product
from pathlib import Path

import pytest

from coca_mindspeed.errors import DataError
from experiments.rlcr_published import AGAINST, TRAINED, read_published, tables
from tests.shared_data import shared_data

RESULTS = Path(__file__).parents[2] / "experiments" / "results" / "rlcr_published" / "README.md"


def small(path, methods=(TRAINED, *AGAINST)):
    """Forty answers of each method: RLCR states .9 for right and .1 for wrong ones, the others .5."""
    rows = [
        {
            "dataset": "d",
            "method": name,
            "row": row,
            "confidence": 0.5 if name != TRAINED else 0.9 if row % 2 else 0.1,
            "correct": row % 2,
        }
        for name, row in product(methods, range(40))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_figures_and_differences_of_a_small_file(tmp_path):
    text = tables(read_published(small(tmp_path / "p.jsonl")))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    figures = {cells[2]: cells[3:] for cells in rows if cells[1] == "40"}
    assert [figures[TRAINED][i].split()[0] for i in range(4)] == ["50.0%", "1.000", "0.100", "0.010"]
    assert [figures["Base"][i].split()[0] for i in range(4)] == ["50.0%", "0.500", "0.000", "0.250"]
    differences = {cells[1]: cells[2:] for cells in rows if cells[0] == "d" and cells[1] in AGAINST}
    assert [cell.split()[0] for cell in differences["Base"]] == ["+0.0%", "+0.500", "+0.100", "-0.240"]


def test_a_file_of_other_methods_or_fields_is_refused(tmp_path):
    with pytest.raises(DataError, match="RLCR"):
        tables(read_published(small(tmp_path / "p.jsonl", AGAINST)))
    (tmp_path / "other.jsonl").write_text('{"dataset": "d", "method": "RLCR"}\n')
    with pytest.raises(DataError, match=r"other\.jsonl:1: .*'row'"):
        read_published(tmp_path / "other.jsonl")


@pytest.mark.published
def test_the_page_has_the_table_of_the_published_file():
    assert tables(read_published(shared_data("rlcr_predictions.jsonl.gz"))) in RESULTS.read_text(encoding="utf-8")
