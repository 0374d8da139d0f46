"""Reports: self-contained, safe against what models write, readable as Markdown, and looked at in a browser."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.evaluation.predictions import Prediction, write_predictions
from coca_mindspeed.evaluation.report import most_miscalibrated, shorten, write_report
from coca_mindspeed.evaluation.scoreboard import Run
from coca_mindspeed.utils.console import markdown_table

DATASETS = ("gsm8k", "math500", "aime24", "aime25", "mbpp_sanitized", "humaneval", "simpleqa", "triviaqa")
HOSTILE = "<script>document.title='hacked'</script><img src=http://example.org/x.png> | pipe {{ 7*7 }}"
MARKUP = "![x](http://example.org/y.png) [y](http://example.org) <i>z</i> **b** `c` &lt; _d_ 数学 \\ ~~~"


def predictions(dataset, n, seed, method=None, bias=0.0):
    rng = np.random.default_rng(seed)
    difficulty = rng.random(n)
    right = rng.random(n) < difficulty
    stated = np.round(np.clip(difficulty + bias, 0, 1), 2)
    rows = []
    for i in range(n):
        question, response = f"question {i} {HOSTILE}", f"<confidence>{stated[i]}</confidence> {HOSTILE}"
        confidence, tokens = (None, None) if i % 40 == 0 else (float(stated[i]), 10)
        named = (f"{i} {HOSTILE}", dataset, question, response, confidence, bool(right[i]), tokens)
        rows.append(Prediction(*named, method=method, gold="42"))
    return rows


def make_run(folder, name, datasets, n, method=None, bias=0.0, steps=20):
    rows = [p for seed, d in enumerate(datasets) for p in predictions(d, n, seed, method, bias)]
    write_predictions(folder / name / "predictions.jsonl", rows)
    keys = ("reward/confidence", "reward/answer", "rollout/ece", "response/length")
    metrics = [{"step": i, **dict.fromkeys(keys, 1 / i)} for i in range(1, steps + 1)]
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return folder / name


class References(HTMLParser):
    """Everything that a page refers to, its tags and its text."""

    def __init__(self):
        super().__init__()
        self.tags, self.links, self.images, self.text = [], [], 0, ""

    def handle_data(self, data):
        self.text += data

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        self.images += tag == "img"
        self.links += [values[key] for key in ("src", "href", "action", "srcset", "data") if key in values]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    paths = [
        make_run(folder, "coca", ("gsm8k", "aime24", "mine"), 120, "coca"),
        make_run(folder, "a|b <i>", ("gsm8k", "aime24"), 120, "rlvr", bias=0.2),
    ]
    output = folder / "report"
    arguments = [*map(str, paths), "--output", str(output)]
    assert main(["report", *arguments]) == 0
    return output


def test_page_refers_to_nothing_outside_itself(report):
    text = (report / "report.html").read_text()
    parsed = References()
    parsed.feed(text)
    assert parsed.images == 1 + 3 * 2  # training; two pictures for each of three data sets
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in parsed.links)
    assert not {"script", "link", "iframe", "object", "i"} & set(parsed.tags)
    assert not [part for part in ("url(", "@import", "<script") if part in text]
    # Text of models stays text.
    for shown in (rf"question \d+ {re.escape(HOSTILE)}", re.escape("a|b <i>")):
        assert re.search(shown, parsed.text)


def test_names_are_text(tmp_path):
    rows = [Prediction(MARKUP, MARKUP, MARKUP, f"```\n{MARKUP}", 0.9, i % 2 == 0, None, sample=i) for i in range(4)]
    page, _ = write_report([Run(MARKUP, rows)], tmp_path)
    parsed = References()
    parsed.feed(page.read_text())
    assert parsed.images == 2
    assert all(link.startswith(("data:image/png;base64,iVBOR", "#section-")) for link in parsed.links)
    assert not {"i", "em", "s"} & set(parsed.tags)
    parts = (
        "Reliability: {}\n",
        "Risk and coverage: {}\n",
        "Error by threshold: {}\n",
        "{0}: {0} {0}\n",
        "```\n{}",  # a response
    )
    assert [part for part in parts if part.format(MARKUP) not in parsed.text] == []


def test_best_is_bold_in_markdown_and_pictures_are_there(report):
    text = (report / "report.md").read_text()
    table = text[text.index("### ECE") :].split("###")[1]
    rows = [line for line in table.splitlines() if line.startswith("| coca")]
    assert rows[0].count("**") == 0  # ECE's wide intervals decide nothing
    brier = text[text.index("### Brier") :].split("###")[1]
    first = next(line for line in brier.splitlines() if line.startswith("| coca"))
    assert first.count("**") == 4 + 2  # gsm8k, aime24 and their mean; alone on its own set, it is not the best
    assert "a\\|b" in table
    for name in re.findall(r"\((figures/[^)]+)\)", text):
        assert (report / name).read_bytes().startswith(b"\x89PNG")
    assert rows[0].count("ECE if calibrated: 0.") == 4
    assert (report / "report.html").read_text().count("ECE if calibrated: 0.") == 4 + 3
    table = text[text.index("### Error by threshold: mine") :].split("###")[1]
    assert " accepted)" in table


def test_one_data_set_has_one_table_with_metrics_as_columns(tmp_path):
    runs = [Run(label, predictions("mine", 80, 0, bias=bias)) for label, bias in (("good", 0.0), ("bad", 0.3))]
    text = write_report(runs, tmp_path)[1].read_text()
    header = ["run", "accuracy ↑", "AUROC ↑", "ECE ↓", "Brier ↓", "SR ↑", "TTC ↓"]
    assert header in [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    [good] = [line for line in text.splitlines() if line.startswith("| good")][:1]
    assert [cell.strip().startswith("**") for cell in good.split("|")[2:8]] == [*[False] * 3, True, False, False]


def test_samples_are_the_most_miscalibrated():
    rows = [
        Prediction("a", "d", "q", "r", 0.9, False, 1),
        Prediction("b", "d", "q", "r", 0.9, True, 1),
        Prediction("c", "d", "q", "x" * 5000, 0.0, True, 1),
        Prediction("e", "d", "q", "r", None, False, None),
    ]
    samples = most_miscalibrated(Run("x", rows), 2)
    assert [p.id for p in samples] == ["c", "a"]
    shown = shorten(samples[0].response)
    assert "3800 characters left out" in shown
    assert len(shown) < 1300


def test_a_run_that_is_still_training_has_its_curves(tmp_path):
    run = Run("new", [], [{"step": 1, "reward/answer": 0.5}])
    paths = write_report([run], tmp_path)
    assert [p.name for p in (tmp_path / "figures").iterdir()] == ["training.png"]
    assert "## Results" not in paths[1].read_text()
    assert all("data.evaluate" in path.read_text() for path in paths)  # why there are no results


def test_markdown_table_escapes_and_aligns():
    assert markdown_table(["a", "b"], [["x|y", "1\n2"]]) == "| a    | b   |\n|------|-----|\n| x\\|y | 1 2 |\n"
    assert markdown_table(["a", ""], [["x", 10]], numbers=(1,)) == "| a |    |\n|---|---:|\n| x | 10 |\n"
