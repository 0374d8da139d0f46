"""Tables, intervals and verdicts from cells made by hand."""

import csv
import itertools
import json
import math
import re
import subprocess

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_rel

from coca_mindspeed.baselines.resumable import claim_directory
from coca_mindspeed.cli import main
from coca_mindspeed.evaluation.predictions import Prediction, prediction_to_json
from coca_mindspeed.reproduce import work_queue as schedule
from coca_mindspeed.reproduce.by_question import by_question_table
from coca_mindspeed.reproduce.cells import cells_of
from coca_mindspeed.reproduce.claims import Claim, claims, claims_table, sequential_claims, sequential_phases
from coca_mindspeed.reproduce.comparisons import comparison_table, comparisons, entries
from coca_mindspeed.reproduce.plan import Plan
from coca_mindspeed.reproduce.provenance import source_commit
from coca_mindspeed.reproduce.report import sequential_table, write_report
from coca_mindspeed.reproduce.results import collect, holm, mean_differs, mean_interval, spread
from tests.reproduce.cells_for_tests import PLAN, finish, finished


def test_spread_leaves_undefined_seeds_out_and_says_how_many_are_left():
    found = spread([1.0, math.nan, 3.0])
    assert (found.mean, found.values) == (2.0, (1.0, 3.0))
    assert found.deviation == pytest.approx(math.sqrt(2))
    assert found.show("ece") == "2.000 ± 1.414 (n = 2)"
    assert spread([1.0, 3.0]).show("ece") == "2.000 ± 1.414"
    assert math.isnan(spread([1.0]).deviation)
    assert spread([0.0745]).show("ece") == "0.075"  # halves up, as in all tables
    assert spread([math.nan]).show("ece") == "--"


def test_the_interval_is_the_paired_t_test_of_scipy():
    random = np.random.default_rng(0)
    ours, theirs = random.normal(0.1, 0.02, 5), random.normal(0.3, 0.05, 5)
    expected = ttest_rel(ours, theirs).confidence_interval(0.95)
    found = mean_interval((ours - theirs).tolist())
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert math.isnan(mean_interval([1.0]).low)


@pytest.mark.parametrize(
    ("values", "bound", "verdict"),
    [
        ([0.20, 0.21, 0.22], 0.0, "holds"),
        ([-0.20, -0.21, -0.22], 0.0, "does not hold"),
        ([-0.01, 0.0, 0.02], 0.0, "not decided"),
        ([0.5], 0.0, "not decided"),  # one seed decides nothing
        ([math.nan, math.nan], 0.0, "no figures"),
        ([0.95, 0.951, 0.95], 0.92, "holds"),
        ([0.1, 0.1], 0.0, "not decided"),  # two shares of as many questions agree by chance
        ([0.0, 0.0, 0.0], -0.02, "not decided"),  # nothing was right in either
    ],
)
def test_verdicts(values, bound, verdict):
    assert Claim("c", values, bound).verdict() == verdict


def test_categories_are_plain_means_over_data_sets_with_undefined_ones_left_out(tmp_path):
    results = finished(tmp_path, 1, coca=[{"accuracy": 0.6, "auroc": 0.9}])
    assert results.value("short", "coca", 0, "math", "accuracy") == pytest.approx(0.6)
    assert results.value("short", "coca", 0, "math", "auroc") == 0.9
    assert results.categories("short") == ["math", "factual"]


def test_the_main_table(tmp_path):
    results = finished(tmp_path, coca=[{"ece": 0.01}, {"ece": 0.03}, {"ece": 0.02}])
    main = comparisons(PLAN, "short")[0]
    assert list(main.methods) == ["instruct", "rlvr", "coca"]
    table = comparison_table(main, entries(results, "short", main))
    assert table.header == ("method", "metric", "math", "factual", "paper: math", "paper: factual")
    row = {(r[0], r[1]): r[2:] for r in table.rows}
    assert row["coca", "ECE ↓"][:2] == ("0.020 ± 0.010", "0.020 ± 0.010")
    assert row["instruct", "accuracy ↑"][0] == "50.0% ± 0.0"
    assert row["coca", "ECE ↓"][2] == "0.10"  # the paper's figure stands beside ours, as it prints it
    [ece] = [
        r
        for r in csv.DictReader(table.csv().splitlines())
        if (r["method"], r["metric"], r["category"]) == ("coca", "ece", "math")
    ]
    assert [float(ece[f"seed_{i}"]) for i in range(3)] == [0.01, 0.03, 0.02]


def test_a_seed_without_a_value_keeps_its_column_and_is_counted(tmp_path):
    undefined = {"auroc": None}
    results = finished(tmp_path, coca=[{"auroc": 0.9}, undefined, {"auroc": 0.7}])
    main = comparisons(PLAN, "short")[0]
    table = comparison_table(main, entries(results, "short", main))
    [printed] = [row for row in table.rows if row[:2] == ("coca", "AUROC ↑")]
    assert printed[2] == "0.800 ± 0.141 (n = 2)"
    [auroc] = [
        r
        for r in csv.DictReader(table.csv().splitlines())
        if (r["method"], r["metric"], r["category"]) == ("coca", "auroc", "math")
    ]
    assert (auroc["n"], auroc["seed_0"], auroc["seed_1"], auroc["seed_2"]) == ("2", "0.9", "", "0.7")


def test_ece_stands_beside_that_of_a_calibrated_model(tmp_path):
    results = finished(tmp_path, 2)
    for comparison in comparisons(PLAN, "short"):
        table = comparison_table(comparison, entries(results, "short", comparison))
        for above, below in itertools.pairwise(table.rows):
            if above[1] == "ECE ↓":
                assert below[:2] == (above[0], "ECE if calibrated")
                # Nine answers that say 0.5: mean |9/2 - right| / 9 of a fair coin.
                expected = sum(math.comb(9, k) * abs(4.5 - k) / 9 / 2**9 for k in range(10))
                assert float(below[2].split(" ")[0]) == pytest.approx(expected, abs=0.01)
                assert below[3] == "--"  # no prediction of facts was kept


def test_claims_say_what_the_cells_say(tmp_path):
    results = finished(
        tmp_path,
        coca=[
            {"ece": e, "accuracy": a, "tokens_to_confidence": 6.0}
            for e, a in ((0.02, 0.45), (0.03, 0.46), (0.01, 0.44))
        ],
        majority_voting=[{"tokens_to_confidence": 160.0 + seed} for seed in range(3)],
        rlcr=[{"tokens_to_confidence": 10.0 + seed / 10} for seed in range(3)],
    )
    verdicts = {claim.text: claim.verdict() for claim in claims(results, PLAN)}
    assert verdicts["short answers, math: coca has a lower ECE than rlvr (by)"] == "holds"
    by = next(c for c in claims(results, PLAN) if "lower ECE than instruct" in c.text)
    assert by.values == pytest.approx([0.28, 0.27, 0.29])
    assert verdicts["short answers, math: coca keeps accuracy within 2 points of rlvr (difference)"] == "does not hold"
    assert verdicts["short answers: coca's TTC is at least 92% below majority_voting's (share saved)"] == "holds"
    assert verdicts["short answers: coca's TTC is at least 92% below rlcr's (share saved)"] == "does not hold"
    lost = next(c for c in claims(results, PLAN) if "half its accuracy" in c.text)
    assert lost.values == pytest.approx([1 - 0.2 / 0.6] * 3)
    assert "| claim" in claims_table(claims(results, PLAN)).markdown()


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, math.nan]) == pytest.approx([0.03, 0.06, 0.06, math.nan], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_p_is_scipys_and_agrees_with_the_interval():
    random = np.random.default_rng(0)
    for bound in (-0.1, 0.0, 0.2):
        values = random.normal(0.1, 0.1, 5)
        assert mean_differs(values.tolist(), bound) == pytest.approx(ttest_1samp(values, bound).pvalue)
        interval = mean_interval(values.tolist())
        assert (mean_differs(values.tolist(), bound) < 0.05) == (not interval.low <= bound <= interval.high)
    assert math.isnan(mean_differs([0.1], 0.0))


def test_seeds_that_agree_decide_only_what_cannot_differ_by_chance(tmp_path):
    tied = [0.65 - 0.63, 0.66 - 0.64, 0.02]  # the same share of questions, but for the rounding of floats
    for values, bound in (([0.96] * 5, 0.92), ([0.92] * 5, 0.92), (tied, 0.0), ([0.0] * 2, 0.0)):
        assert math.isnan(mean_differs(values, bound))
        found = mean_interval(values)
        assert found.estimate == pytest.approx(values[0])
        assert math.isnan(found.low)
        assert math.isnan(found.high)
    assert (mean_differs([0.96] * 5, 0.92, exact=True), mean_differs([0.92] * 5, 0.92, exact=True)) == (0.0, 1.0)
    exact = mean_interval([0.96] * 5, exact=True)
    assert (exact.low, exact.high) == (pytest.approx(0.96), pytest.approx(0.96))
    # Methods that answer nothing rightly, and a confidence of as many tokens in every seed.
    ours = {"accuracy": 0.1, "tokens_to_confidence": 0.1}
    results = finished(tmp_path, 2, rlvr=[{"accuracy": 0.1}] * 2, coca=[ours] * 2)
    found = claims(results, PLAN)
    table = claims_table(found)
    shown = {row[0]: row[1:] for row in table.rows}
    accuracy = shown["short answers, math: coca keeps accuracy within 2 points of rlvr (difference)"]
    assert accuracy == ("+0.000", "--", "-0.02", "2 of 2", "--", "--", "not decided", "not decided")
    saved = shown["short answers: coca's TTC is at least 92% below rlcr's (share saved)"]
    assert saved[-2:] == ("holds", "holds")
    assert {claim.text for claim in found if claim.exact} == {text for text in shown if "TTC" in text}


def test_what_has_nothing_to_lose_has_no_figures(tmp_path):
    """Sequential training whose first stage ends with no right answer."""
    results = finished(tmp_path, 2)
    for seed in range(2):
        path = results.cells["short", "sequential", seed].directory(tmp_path) / "run" / "metrics.jsonl"
        rows = [json.loads(line) | {"reward/answer": 0.0} for line in path.read_text().splitlines()]
        rows[-1]["reward/confidence"] = None  # undefined in a step, as JSON has it
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lost, gained, _ = sequential_claims(results, "short", "here")
    assert all(math.isnan(value) for value in lost.values)
    assert lost.verdict() == "no figures"
    assert gained.values == pytest.approx([0.3] * 2)
    assert "no figures" in claims_table([lost]).markdown()
    [accuracy] = [row for row in sequential_table(results, PLAN, "short", [0, 1]).rows if row[0] == "accuracy"]
    assert accuracy[1:] == ("0.000 ± 0.000",) * 3


def test_no_tokens_to_save_is_no_share(tmp_path):
    found = claims(finished(tmp_path, 1, majority_voting=[{"tokens_to_confidence": 0.0}]), PLAN)
    [saved] = [c for c in found if "TTC" in c.text and "majority" in c.text]
    assert saved.verdict() == "no figures"


def test_verdicts_are_corrected_for_the_number_of_claims():
    weak = [0.1, 0.2, 0.3, 0.25, 0.05]  # p about .02
    alone = claims_table([Claim("weak", weak)])
    assert alone.rows[0][-2:] == ("holds", "holds")
    among = claims_table([Claim("weak", weak), *(Claim(f"noise {i}", [-0.1, 0.1, 0.05]) for i in range(4))])
    assert among.rows[0][-2:] == ("holds", "not decided")
    assert "corrects for the 5 claims" in among.note
    [row] = [r for r in csv.DictReader(among.csv().splitlines()) if r["claim"] == "weak"]
    assert float(row["p_holm"]) == pytest.approx(5 * float(row["p"]))
    assert (row["alone"], row["corrected"], row["seeds_above"]) == ("holds", "not decided", "5.0")
    assert among.rows[0][4] == "5 of 5"


def test_a_share_is_never_said_to_exceed_one():
    claim = Claim("share lost", [0.96, 0.999, 0.995], 0.5, most=1.0)
    assert claim.interval().high == 1.0
    assert mean_interval(claim.values).high > 1.0
    assert "+1.000" in claims_table([claim]).rows[0][2]


def test_shares_of_the_papers_claims_end_at_one(tmp_path):
    for claim in claims(finished(tmp_path), PLAN):
        assert ("share" in claim.text) == (claim.most == 1.0), claim.text


def test_finished_cells_are_rendered_again_without_training(tmp_path, monkeypatch, capsys):
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN.model_dump_json())
    output = tmp_path / "out [x] $_"
    claim_directory(output, {"plan": PLAN.model_dump(mode="json")})
    for cell in cells_of(PLAN, range(2)):
        finish(output, cell)
    times = {path: path.stat().st_mtime_ns for path in output.rglob("cell.json")}
    monkeypatch.setattr(schedule.run_cells, "__defaults__", (lambda *_: pytest.fail("trained"),))
    command = ["reproduce", "--plan", str(plan), "--seeds", "2", "--jobs", "1", "--output", str(output)]
    for number in range(2):
        report = tmp_path / f"report {number} [/x]"
        assert main([*command, "--report", str(report)]) == 0
        assert "0 to run" in capsys.readouterr().out
    pages = [sorted((tmp_path / f"report {n} [/x]").iterdir()) for n in range(2)]
    assert [p.name for p in pages[0]] == [p.name for p in pages[1]]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*pages, strict=True))
    assert times == {path: path.stat().st_mtime_ns for path in output.rglob("cell.json")}


def test_sequential_phases_are_means_at_the_ends_of_the_stages(tmp_path):
    results = finished(tmp_path, 1)
    start, accuracy, confidence = sequential_phases(results, "short", 0)
    assert start == accuracy
    assert (accuracy["reward/answer"], confidence["reward/answer"]) == (pytest.approx(0.6), pytest.approx(0.2))
    assert (accuracy["response/length"], confidence["response/length"]) == (10.0, 5.0)


def test_the_report_has_every_table_three_times_and_names_what_is_missing(tmp_path):
    cells = cells_of(PLAN, range(2))
    for cell in cells:
        if (cell.name, cell.seed) != ("coca", 1):
            finish(tmp_path, cell)
    results = collect(tmp_path, cells)
    tables = write_report(results, PLAN, tmp_path / "report", "coca-mindspeed reproduce --seeds 2")
    names = {t.name for t in tables}
    assert names >= {"claims", "short_main", "short_answer_first", "short_segment_against_joint", "short_samples"}
    texts = {name for name in names if name.endswith("_samples")}  # nobody reads responses in a picture
    for name in names:
        for suffix in ("md", "csv", "png"):
            file = tmp_path / "report" / f"{name}.{suffix}"
            assert file.is_file() == (suffix != "png" or name not in texts), file
    page = (tmp_path / "report" / "README.md").read_text()
    assert "Not finished yet" in page
    assert "short, seed 1, coca" in page
    assert "coca-mindspeed reproduce --seeds 2" in page
    assert all((f"({name}.png)" in page) == (name not in texts) for name in names)


def test_the_report_names_the_machines_of_its_cells_and_not_the_one_that_writes_it(tmp_path):
    cells = cells_of(PLAN, range(1))
    for number, cell in enumerate(cells):
        finish(tmp_path, cell)
        if number == 0:
            continue  # of before it was written down
        path = cell.directory(tmp_path) / "cell.json"
        machines = ["B, 4 cores", "A, 2 cores"] if number == 1 else ["A, 2 cores"]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"machines": machines}))
    write_report(collect(tmp_path, cells), PLAN, tmp_path / "report", "command")
    said = (tmp_path / "report" / "README.md").read_text()
    assert "minutes of work in all; A, 2 cores; B, 4 cores; a machine that was not written down." in said


def test_the_report_explains_the_plus_of_a_commit_only_where_there_is_one(tmp_path):
    (cell,) = cells_of(PLAN, range(1))[:1]
    finish(tmp_path, cell)
    path = cell.directory(tmp_path) / "cell.json"
    for commits, expected in (
        (["abc", "def+"], "Cells were run at `abc`, `def+` (`+`: with changes that were not committed).\n"),
        (["abc"], "Cells were run at `abc`.\n"),
    ):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"sources": commits}))
        write_report(collect(tmp_path, [cell]), PLAN, tmp_path / "report", "command")
        assert expected in (tmp_path / "report" / "README.md").read_text()


def test_the_reports_commit_says_where_the_source_differs_from_it(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    package, results = tmp_path / "package", tmp_path / "runs"
    for file in (
        package / "local" / "sampler.py",
        package / "reproduce" / "report.py",
        tmp_path / "configs" / "a.yaml",
    ):
        file.parent.mkdir(parents=True)
        file.write_text("as committed")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "all")
    results.mkdir()
    (results / "cell.json").write_text("{}")
    clean = source_commit(package)
    assert re.fullmatch("[0-9a-f]{12}", clean)
    for file in (package / "local" / "sampler.py", tmp_path / "configs" / "a.yaml"):
        file.write_text("changed")
        assert source_commit(package) == f"{clean}+", file
        file.write_text("as committed")
    assert source_commit(tmp_path / "no" / "package") == "unknown"


def test_paired_claims_are_over_the_seeds_that_both_have(tmp_path):
    cells = cells_of(PLAN, range(3))
    for cell in cells:
        if (cell.name, cell.seed) != ("instruct", 1):
            finish(tmp_path, cell, ece=0.1 * (cell.seed + 1))
    results = collect(tmp_path, cells)
    assert results.seeds("short", "coca", "instruct") == [0, 2]
    claim = next(c for c in claims(results, PLAN) if "lower ECE than instruct" in c.text)
    assert len(claim.values) == 2


def test_a_difference_is_over_the_data_sets_on_which_both_have_the_metric(tmp_path):
    """One family without a right answer would otherwise be in one mean and not in the other."""
    results = finished(tmp_path, 1)
    ours, theirs = (results.summaries["short", m, 0]["datasets"] for m in ("coca", "instruct"))
    ours["sums"]["auroc"], ours["products"]["auroc"] = 0.6, None
    theirs["sums"]["auroc"], theirs["products"]["auroc"] = 0.5, 0.9
    [claim] = [c for c in claims(results, PLAN) if "math: coca has a higher AUROC than instruct" in c.text]
    assert claim.values == pytest.approx([0.1])  # and not .6 - .7
    theirs["sums"]["auroc"] = None
    [claim] = [c for c in claims(results, PLAN) if "math: coca has a higher AUROC than instruct" in c.text]
    assert math.isnan(claim.values[0])


def test_seeds_that_are_not_finished_are_told_from_undefined_ones(tmp_path):
    cells = cells_of(PLAN, range(3))
    for cell in cells:
        if cell.name != "rlvr" and (cell.name, cell.seed) != ("coca", 1):
            finish(tmp_path, cell, ece=0.01 * (cell.seed + 1))
    results = collect(tmp_path, cells)
    main = comparisons(PLAN, "short")[0]
    table = comparison_table(main, entries(results, "short", main))
    row = {(r[0], r[1]): r[2] for r in table.rows}
    assert row["coca", "ECE ↓"] == "0.020 ± 0.014 (n = 2)"
    assert row["instruct", "ECE ↓"] == "0.020 ± 0.010"
    assert row["rlvr", "ECE ↓"] == row["rlvr", "ECE if calibrated"] == "not run"


def test_two_seeds_are_said_to_decide_little(tmp_path):
    assert "With 2 seeds" in claims_table([Claim("c", [0.1, 0.2])]).note
    assert "can hardly decide" not in claims_table([Claim("c", [0.1, 0.2, 0.3, 0.2])]).note


def test_what_is_ours_is_corrected_apart_from_what_is_the_papers(tmp_path):
    content = json.loads(PLAN.model_dump_json())
    content["settings"]["short"]["trained"]["coca, started"] = ["method=coca", "confidence_start.questions=20"]
    plan = Plan.model_validate(content)
    cells = cells_of(plan, range(2))
    for cell in cells:
        finish(tmp_path, cell, ece=0.01 * (cell.seed + 1))
    results = collect(tmp_path, cells)
    assert not any("started" in claim.text for claim in claims(results, plan))
    tables = {t.name: t for t in write_report(results, plan, tmp_path / "report", "command")}
    assert all("coca, started" in row[0] for row in tables["claims_started"].rows)
    assert not any("sequential" in row[0] for row in tables["claims_started"].rows)


def test_question_by_question_as_the_library_of_intervals_says(tmp_path):
    cells = [cell for cell in cells_of(PLAN, range(2)) if cell.name in ("coca", "instruct")]
    for cell in cells:
        finish(tmp_path, cell)
        said = []
        for i in range(40):
            sure = 0.9 if i % 2 else 0.1
            stated = sure if cell.name == "coca" else 0.95
            said.append(Prediction(str(i), "sums", f"{i}+1", "x", stated, bool(i % 2) ^ (i % 10 == cell.seed), 6,
                                   category="math"))  # fmt: skip
        (cell.directory(tmp_path) / "predictions.jsonl").write_text(
            "".join(json.dumps(prediction_to_json(p)) + "\n" for p in said)
        )
    table = by_question_table(collect(tmp_path, cells), PLAN, "short")
    assert table is not None
    [row] = list(csv.DictReader(table.csv().splitlines()))
    assert (row["method"], row["rival"], row["category"], row["questions"]) == ("coca", "instruct", "math", "40.0")
    # Both say the same answers; of 80, four were turned over in each seed.
    assert float(row["accuracy_difference"]) == 0
    right = [bool(i % 2) ^ (i % 10 == seed) for seed in range(2) for i in range(40)]
    brier = [((0.9 if i % 2 else 0.1) - r) ** 2 - (0.95 - r) ** 2
             for (i, r) in zip([*range(40), *range(40)], right, strict=True)]  # fmt: skip
    assert float(row["brier_difference"]) == pytest.approx(sum(brier) / 80)
    assert float(row["brier_low"]) < float(row["brier_difference"]) < float(row["brier_high"]) < 0
    assert "all 8 hold together" in table.note  # two categories, four metrics, one pair


def test_a_plan_without_coca_itself_begins_with_what_it_has(tmp_path):
    """The demo's: claims of a method that is not there would be an empty table."""
    content = json.loads(PLAN.model_dump_json())
    content["settings"]["short"]["trained"] = {"coca, started": ["method=coca", "confidence_start.questions=20"]}
    plan = Plan.model_validate(content)
    cells = cells_of(plan, range(1))
    for cell in cells:
        finish(tmp_path, cell)
    tables = write_report(collect(tmp_path, cells), plan, tmp_path / "report", "command")
    assert tables[0].name == "claims_started"
    assert tables[0].rows
    assert "claims" not in {table.name for table in tables}
