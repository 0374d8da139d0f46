"""`coca-mindspeed evaluate`: from files to metrics, intervals and tables."""

import gzip
import json
import re
import shlex
from dataclasses import replace

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.data.records import Record, write_records
from coca_mindspeed.evaluation.predictions import (
    Prediction,
    read_predictions,
    rows_by_field,
    validation_file,
    write_predictions,
)
from coca_mindspeed.evaluation.scoreboard import read_runs
from tests.tables import read_table
from tests.tokenizers_for_tests import qwen_like


@pytest.fixture
def files(tmp_path):
    pairs = [(0.9, True), (0.8, False), (0.2, False), (0.7, True), (None, True)]
    for name, shift in (("one", 0.0), ("two", -0.1)):
        rows = [
            Prediction(str(i), dataset, "q", "r", None if s is None else s + shift, y, 10, tokens=30)
            for dataset in ("gsm8k", "aime24")
            for i, (s, y) in enumerate(pairs)
        ]
        write_predictions(tmp_path / f"{name}.jsonl", rows)
    return tmp_path


def evaluate(*arguments):
    return main(["evaluate", *map(str, arguments)])


def table(text):
    """The cells of each row of the tables in ``text``."""
    return [re.split(r" *\| *", line)[1:-1] for line in text.splitlines() if line.startswith("|")]


def test_a_report_with_pictures(files, capsys):
    pytest.importorskip("matplotlib")
    assert evaluate(files / "one.jsonl", "--output", files / "out", "--report") == 0
    assert {path.name for path in (files / "out").iterdir()} >= {"report.html", "report.md", "figures", "metrics.json"}
    for options in (["--report"], ["--report", "--output", files / "other", "--bins", "20"]):
        assert evaluate(files / "one.jsonl", *options) == 2
    assert not (files / "other").exists()


def test_predictions(files, capsys):
    out = files / "out"
    assert evaluate(files / "one.jsonl", "--output", out, "--method", "coca") == 0
    printed = capsys.readouterr().out
    assert (out / "metrics.md").read_text() == printed
    assert "| math (mean) |" in printed
    result = json.loads((out / "metrics.json").read_text())
    gsm8k = result["results"]["coca"]["gsm8k"]
    assert gsm8k["n"] == 5
    assert gsm8k["metrics"]["accuracy"]["estimate"] == pytest.approx(0.6)
    assert gsm8k["metrics"]["auroc"]["estimate"] == pytest.approx(0.75)
    assert gsm8k["metrics"]["success_rate"]["low"] <= 0.8 <= gsm8k["metrics"]["success_rate"]["high"]
    assert result["results"]["coca"]["math"]["mean_of"] == ["gsm8k", "aime24"]
    assert {p.method for p in read_predictions(out / "predictions.jsonl")} == {"coca"}
    beside = gsm8k["ece_if_calibrated"]
    assert 0 < beside["mean"] < beside["p95"] < 1
    [row] = [cells for cells in table(printed) if cells[:3] == ["ECE if calibrated", "coca", "gsm8k"]]
    assert row[4:] == [f"{beside['mean']:.3f}", f"95% below {beside['p95']:.3f}"]
    shown = {cells[0].split()[0]: cells[4:] for cells in table(printed) if cells[1:4] == ["coca", "gsm8k", "5"]}
    assert list(shown) == ["accuracy", "AUROC", "ECE", "Brier", "SR", "TTC"]
    for name in ("auroc", "ece", "brier"):
        found = gsm8k["metrics"][name]
        assert shown[{"brier": "Brier"}.get(name, name.upper())][1] == f"{found['low']:.3f} to {found['high']:.3f}"
    assert max(len(line) for line in printed.splitlines() if line.startswith("|")) <= 100
    # What it wrote can be read again, with the same result.
    assert evaluate(out / "predictions.jsonl", "--output", files / "again") == 0
    assert json.loads((files / "again" / "metrics.json").read_text()) == result


def test_confidences_behind_their_answers_are_noticed(tmp_path, capsys):
    write_records(tmp_path / "gold.jsonl", [Record("1", "d", "math", "?", "42")])
    (tmp_path / "r.jsonl").write_text('{"id": "1", "response": "It is 42. <confidence> 0.9 </confidence>"}')
    command = (tmp_path / "r.jsonl", "--gold", tmp_path / "gold.jsonl", "--output", tmp_path)
    assert evaluate(*command) == 0
    assert "--position last" in capsys.readouterr().err
    assert evaluate(*command, "--position", "last") == 0
    assert "--position" not in capsys.readouterr().err
    # Graded rows take no such option, and get no such advice.
    row = {"id": "1", "response": "It is 42. <confidence> 0.9 </confidence>", "confidence": None, "correct": True}
    (tmp_path / "graded.jsonl").write_text(json.dumps(row))
    assert evaluate(tmp_path / "graded.jsonl") == 0
    assert "--position" not in capsys.readouterr().err


def test_ungradable_answers_are_left_out_and_counted(files, capsys):
    """Differences pair what could be graded on both sides."""
    rows = read_predictions(files / "one.jsonl")
    changed = [replace(p, correct=None) if p.dataset == "gsm8k" and p.id in "01" else p for p in rows]
    write_predictions(files / "some.jsonl", changed)
    out = files / "out"
    arguments = ("--output", out, "--against", files / "two.jsonl")
    assert evaluate(files / "some.jsonl", *arguments) == 0
    result = json.loads((out / "metrics.json").read_text())
    cells = result["results"]["some"]
    counts = [(cells[name]["n"], cells[name]["ungradable"]) for name in ("gsm8k", "aime24", "math")]
    assert counts == [(3, 2), (5, 0), (8, 2)]
    assert cells["gsm8k"]["metrics"]["accuracy"]["estimate"] == pytest.approx(2 / 3)
    assert result["differences"]["some/gsm8k"]["n"] == 3
    assert "2 of 5" in capsys.readouterr().err
    assert [p.correct for p in read_predictions(out / "predictions.jsonl")] == [p.correct for p in changed]
    write_predictions(files / "none.jsonl", [replace(p, correct=None) for p in rows])
    assert evaluate(files / "none.jsonl", *arguments) == 1


def test_the_confidence_after_the_answer_is_reported_beside_the_first(files, capsys):
    """A rate of valid ones of its own; predictions without a second confidence have no such table."""
    write_records(files / "gold.jsonl", [Record(i, "sums", "math", "1+1", "2") for i in "abcd"])
    said = {
        "a": "2 <confidence>1</confidence>",
        "b": "3 <confidence>0</confidence>",
        "c": "2",
        "d": "2 <confidence>1</confidence>",
    }
    lines = [json.dumps({"id": i, "response": f"<confidence>0.5</confidence> {text}"}) for i, text in said.items()]
    (files / "r.jsonl").write_text("\n".join(lines))
    graded = ("--gold", files / "gold.jsonl", "--grader", "exact", "--output", files / "out")
    assert evaluate(files / "r.jsonl", *graded, "--position", "both") == 0
    for again in (False, True):  # what it wrote holds the second confidence too
        found = json.loads((files / "out" / "metrics.json").read_text())["results"]["r"]["sums"]
        assert found["metrics"]["brier"]["estimate"] == 0.25
        assert {"auroc": 1.0, "ece": 0.0, "brier": 0.0, "success_rate": 0.75}.items() <= found["after_answer"].items()
        assert "Confidence after the answer" in capsys.readouterr().out
        assert again or evaluate(files / "out" / "predictions.jsonl", "--output", files / "out") == 0
    assert evaluate(files / "one.jsonl", "--output", files / "out") == 0
    assert "Confidence after the answer" not in capsys.readouterr().out


def test_a_difference_says_on_how_many_questions_it_is(files, capsys):
    """Two of five questions of one data set, none of the other: no figure may pass for one of the whole."""
    one = [p for p in read_predictions(files / "one.jsonl") if p.dataset == "gsm8k"]
    write_predictions(files / "some.jsonl", [*one[:2], replace(one[0], id="new")])
    out = files / "out"
    arguments = (files / "two.jsonl", "--output", out, "--against", files / "some.jsonl")
    assert evaluate(*arguments) == 0
    printed = capsys.readouterr().out
    compared = printed[printed.index("Difference to some.jsonl") :].split("\n\n")[1]
    rows = [cells for cells in table(compared) if cells[2] == "gsm8k"]
    assert {cells[3] for cells in rows} == {"2 of 5 and 3"}
    others = [cells[3:] for cells in table(compared) if cells[2] == "aime24"]
    assert others == [["0 of 5 and 0", "--", "--"]] * len(rows) == [["0 of 5 and 0", "--", "--"]] * 6
    assert max(map(len, compared.splitlines())) <= 100
    found = json.loads((out / "metrics.json").read_text())["differences"]
    gsm8k = found["two/gsm8k"]
    assert [gsm8k[key] for key in ("n", "n_run", "n_against")] == [2, 5, 3]
    assert gsm8k["brier"]["estimate"] == pytest.approx((0.04 + 0.49) / 2 - (0.01 + 0.64) / 2)
    assert found["two/aime24"] == {"n": 0, "n_run": 5, "n_against": 0}


def test_responses_are_graded(files, capsys):
    write_records(files / "gold.jsonl", [Record("a", "sums", "math", "1+1", "2")])
    (files / "own.py").write_text("def roman(record, answer):\n    return answer.strip() == 'I' * int(record.answer)\n")
    graded = ("--output", files / "out")
    gold = ("--gold", files / "gold.jsonl")
    for said, options, correct in (
        ("\\boxed{2}", ("--grader", "exact"), False),
        ("\\boxed{2}", ("--grader", "auto"), True),
        ("the answer is 2", ("--grader-options", '{"math": {"boxed_only": true}}'), False),
        ("II", ("--grader", f"{files}/own.py:roman"), True),
    ):
        (files / "r.jsonl").write_text(json.dumps({"id": "a", "response": f"<confidence>1</confidence> {said}"}))
        assert evaluate(files / "r.jsonl", *graded, *gold, *options) == 0
        [row] = read_predictions(files / "out" / "predictions.jsonl")
        assert (row.correct, row.confidence) == (correct, 1.0)
    for decimals, confidence in ((1, None), (2, 0.25)):
        (files / "r.jsonl").write_text(json.dumps({"id": "a", "response": "<confidence>0.25</confidence> 2"}))
        assert evaluate(files / "r.jsonl", *graded, *gold, "--decimals", decimals) == 0
        assert read_predictions(files / "out" / "predictions.jsonl")[0].confidence == confidence
    assert evaluate(files / "r.jsonl", *graded, *gold, "--grader", "math", "--grader-options", '{"second": 5}') == 1
    assert "'seconds'" in capsys.readouterr().err
    for option, value in (("--grader-options", "[5]"), ("--grader", "absent.py:roman"), ("--grader", "mathe")):
        with pytest.raises(SystemExit):
            evaluate(files / "r.jsonl", *graded, *gold, option, value)
        assert f"{option}: " in capsys.readouterr().err


MAPPED = '{"confidence": "p", "correct": "right", "dataset": "kind"}'


def write_theirs(path, count, right=lambda i: i % 2):
    """A CSV with columns of its own; even answers are stated less surely than odd ones."""
    lines = [f"{0.8 if i % 2 else 0.3},{80 if i % 2 else 30},{int(right(i))},quiz,m" for i in range(count)]
    path.write_text("\n".join(["p,pct,right,kind,model", *lines]))


@pytest.mark.parametrize(
    ("count", "right", "reasons"),
    [
        (120, lambda i: i % 2, []),
        (60, lambda i: i % 2, ["60 labels"]),
        (120, lambda i: i % 4 > 1, ["AUROC"]),
        (20, lambda i: False, ["20 labels", "AUROC is undefined"]),
    ],
)
def test_somebody_elses_csv(tmp_path, capsys, count, right, reasons):
    """Without an id, and with columns of other names; a threshold, or why the confidence is not shown to be usable."""
    write_theirs(tmp_path / "theirs.csv", count, right)
    assert evaluate(tmp_path / "theirs.csv", "--columns", MAPPED, "--output", tmp_path / "out") == 0
    [(label, sets)] = json.loads((tmp_path / "out" / "metrics.json").read_text())["results"].items()
    assert (label, {name: found["n"] for name, found in sets.items()}) == ("m", {"quiz": count})
    lines = capsys.readouterr().out.splitlines()
    usable = [line for line in lines if "not shown to be usable" in line]
    assert len(usable) == bool(reasons)
    assert all(reason in line for line in usable for reason in reasons)
    suggested = [line for line in lines if line.startswith("m: ")]
    assert [line.startswith("m: from 0.8 on") for line in suggested] == [True] * (not reasons)


def test_files_without_a_model_are_runs_of_their_own(files):
    rows = read_predictions(files / "one.jsonl")
    write_predictions(files / "sub" / "one.jsonl", rows)
    write_predictions(files / "named.jsonl", [replace(p, model="tiny") for p in rows])
    paths = [files / name for name in ("one.jsonl", "two.jsonl", "sub/one.jsonl", "named.jsonl")]
    assert evaluate(*paths, "--output", files / "out") == 0
    results = json.loads((files / "out" / "metrics.json").read_text())["results"]
    assert list(results) == ["one #1", "two", "one #2", "tiny"]
    assert {name: results[name]["gsm8k"]["n"] for name in results} == dict.fromkeys(results, 5)
    assert evaluate(files / "out" / "predictions.jsonl", "--output", files / "again") == 0
    assert json.loads((files / "again" / "metrics.json").read_text())["results"] == results
    data_sets = [[p for p in rows if p.dataset == name] for name in ("gsm8k", "aime24")]
    for name, part in zip("ab", data_sets, strict=True):
        write_predictions(files / f"{name}.jsonl", part)
    parts = (files / "a.jsonl", files / "b.jsonl")
    assert evaluate(*parts, "--method", "coca", "--output", files / "out") == 0
    assert list(json.loads((files / "out" / "metrics.json").read_text())["results"]) == ["coca"]


ROW = '{"id": 1, "question": "1+1?", "answer": "2", "prediction": "2", "confidence": 0.5}'
FILES = {
    "ungraded.jsonl": '{"id": 1, "response": "2"}',
    "ungraded.csv": "prediction,answer\n2,2\n",
    "no_gold.jsonl": f"{ROW}\n\n{ROW.replace('1,', '2,', 1).replace(chr(34) + '2' + chr(34), chr(34) * 2, 1)}\n",
    "misspelt.jsonl": '{"predicton": "2", "answer": "2", "question": "1+1?"}',
    "unnamed.csv": "id,Confidence,correct\n1,0.5,1\n",
    "mixed.jsonl": '{"correct": 1}\n{"conf": 0.5, "correct": 1}',
    "null.jsonl": '{"question": "1+1?", "answer": null, "prediction": "2", "truth": true}',
    "half.jsonl": f"{ROW}\n{ROW.replace('}', chr(44) + chr(34) + 'correct' + chr(34) + ': false}')}",
    "prompt.jsonl": '{"prompt": "1+1?", "answer": "2", "response": "2"}',
    "percent.jsonl": '{"id": 1, "confidence": "95%", "correct": 1}',
    "quoted.jsonl": '{"id": 1, "confidence": "0.9", "correct": 1}',
    "late_id.jsonl": '{"confidence": 0.9, "correct": 1}\n{"id": 1, "confidence": 0.9, "correct": 1}',
    "list.jsonl": '{"question": "1+1?", "answer": "2", "prediction": [3]}',
    "no_answer.csv": "question,answer,prediction\n1+1?,2,2\n2+2?,,4\n",
    "no_gold.csv": 'id,question,answer,prediction\n1,"1\n+1?",2,2\n2,2+2?,\\frac{1}{,4\n',
}


@pytest.mark.parametrize(("code", "arguments", "named"), read_table(__file__, "evaluate_errors.tsv"))
def test_errors(files, capsys, code, arguments, named, monkeypatch):
    write_predictions(files / "other.jsonl", [Prediction("x", "other", "q", "r", 0.5, True, 1)])
    one = read_predictions(files / "one.jsonl")
    both = [replace(p, method=method) for method in ("coca", "rlvr") for p in one]
    write_predictions(files / "two_methods.jsonl", both)
    write_theirs(files / "theirs.csv", 3)
    for name, text in FILES.items():
        (files / name).write_text(text)
    (files / "empty_folder").mkdir()
    (files / "opencompass" / "results").mkdir(parents=True)
    monkeypatch.chdir(files)
    try:
        found = evaluate(*shlex.split(arguments), "--output", "out")
    except SystemExit as stopped:
        found = stopped.code
    assert found == int(code)
    assert named in capsys.readouterr().err
    assert not (files / "out").exists()


@pytest.mark.parametrize("place", ["one.jsonl", "one.jsonl/out"])
def test_an_output_that_cannot_be_made_is_refused_before_the_work(files, capsys, monkeypatch, place):
    monkeypatch.setattr("coca_mindspeed.cli.evaluate.PredictionSource", None)
    for command in ("evaluate", "report"):
        assert main([command, str(files / "two.jsonl"), "--output", str(files / place)]) == 1
        assert f"--output {files / place}: " in capsys.readouterr().err


def test_a_run_directory_is_evaluated_by_one_plain_command(files, capsys):
    run = files / "mine"
    rows = read_predictions(files / "one.jsonl")
    write_predictions(run / "predictions_before.jsonl", rows)
    write_predictions(run / "predictions_after.jsonl", [replace(p, method="coca") for p in rows])
    assert evaluate(run, "--output", files / "out") == 0
    printed = capsys.readouterr().out
    assert "| mine before " in printed
    assert "| mine after coca " in printed
    found = read_predictions(files / "out" / "predictions.jsonl")
    assert {(p.model, p.method) for p in found} == {("mine before", None), ("mine after", "coca")}
    assert evaluate(files / "out" / "predictions.jsonl", "--output", files / "again") == 0
    assert capsys.readouterr().out == printed
    # What the lines say themselves stands.
    write_predictions(run / "predictions_after.jsonl", [replace(p, method="joint", model="tiny") for p in rows])
    assert evaluate(run, "--output", files / "out") == 0
    assert "| tiny joint " in capsys.readouterr().out
    after = run / "predictions_after.jsonl"
    assert evaluate(files / "one.jsonl", "--against", after, "--output", files / "out") == 0
    assert evaluate(files / "one.jsonl", "--against", run, "--output", files / "out") == 1
    assert "(mine before, tiny joint)" in capsys.readouterr().err


OWN = {"question": "1+1?", "answer": "2", "prediction": "It is \\boxed{2}.", "confidence": 0.9}
WRONG = {**OWN, "question": "2+2?", "answer": "4", "confidence": 0.2}


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_rows_with_their_own_gold_answers_are_graded(tmp_path, capsys, suffix):
    path = tmp_path / f"mine{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, (OWN, WRONG))))
    else:
        rows = [OWN.keys(), OWN.values(), WRONG.values()]
        path.write_text("\n".join(("," if suffix == ".csv" else "\t").join(map(str, row)) for row in rows))
    assert evaluate(path) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name]  # without --output nothing is written
    assert evaluate(path, "--output", tmp_path / "out") == 0
    found = read_predictions(tmp_path / "out" / "predictions.jsonl")
    assert [(p.id, p.question, p.gold, p.confidence, p.correct) for p in found] == [
        ("0", "1+1?", "2", 0.9, True),
        ("1", "2+2?", "4", 0.2, False),
    ]
    printed = capsys.readouterr()
    assert all(name in printed.err for name in ("metrics.json", "metrics.md", "predictions.jsonl"))
    assert max(len(line) for line in printed.out.splitlines() if line.startswith("|")) < 160


def write_lines(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def graded(out, *arguments):
    assert evaluate(*arguments, "--output", out) == 0
    return read_predictions(out / "predictions.jsonl")


def test_rows_with_gold_answers_are_records(tmp_path, capsys):
    """Their aliases count, and numbers are text, as in files of records; other columns are named."""
    aliases = {"aliases": ["Cairo", "Al-Qahirah"]}
    rows = [
        {"question": "Capital?", "answer": "Cairo", "prediction": "Al-Qahirah", "metadata": aliases},
        {"id": 7, "question": "6*7?", "answer": 42.0, "prediction": 42, "aliases": ["24"]},
    ]
    found = graded(tmp_path / "out", write_lines(tmp_path / "mine.jsonl", *rows))
    assert [(p.id, p.gold, p.response, p.correct) for p in found] == [
        ("0", "Cairo", "Al-Qahirah", True),
        ("7", "42", "42", True),
    ]
    assert "without effect: aliases\n" in capsys.readouterr().err
    path = write_lines(tmp_path / "graded.jsonl", {"id": 7, "gold": 2.5, "confidence": 1, "correct": 1})
    assert read_predictions(path)[0].gold == "2.5"


def test_responses_keep_their_method_model_seed_and_sample(tmp_path, capsys):
    """Two models of one file are two runs, and samples are numbered in each."""
    said = {"coca": ("2", "2"), "rlvr": ("3", "2")}
    rows = [
        {"question": "1+1?", "answer": "2", "id": "a", "response": text, "confidence": 0.5, "method": method, "seed": 3}
        for method, texts in said.items()
        for text in texts
    ]
    [*found] = graded(tmp_path / "out", write_lines(tmp_path / "mine.jsonl", *rows, {**rows[0], "sample": 7}))
    assert [(p.method, p.seed, p.sample, p.correct) for p in found] == [
        *(("coca", 3, 0, True), ("coca", 3, 1, True)),
        *(("rlvr", 3, 0, False), ("rlvr", 3, 1, True), ("coca", 3, 7, True)),
    ]
    results = json.loads((tmp_path / "out" / "metrics.json").read_text())["results"]
    assert {run: sets["all"]["metrics"]["accuracy"]["estimate"] for run, sets in results.items()} == {
        "coca": 1.0,
        "rlvr": 0.5,
    }
    models = [{**row, "model": f"m{i}"} for i, row in enumerate(rows)]
    found = graded(tmp_path / "out", write_lines(tmp_path / "m.jsonl", *models))
    assert [(p.model, p.sample) for p in found] == [(f"m{i}", 0) for i in range(4)]
    assert "without effect" not in capsys.readouterr().err


def test_each_model_answers_all_questions_of_the_gold_file(tmp_path, capsys):
    gold = tmp_path / "gold.jsonl"
    write_records(gold, [Record(name, "d", "math", "1+1", "2") for name in "ab"])
    rows = [{"id": name, "response": "2", "model": model} for model, ids in (("x", "ab"), ("y", "a")) for name in ids]
    assert evaluate(write_lines(tmp_path / "r.jsonl", *rows), "--gold", gold) == 1
    assert "model 'y' to 1 of 2 questions" in capsys.readouterr().err


def test_fields_of_responses_that_have_no_effect_are_named(tmp_path, capsys):
    """Beside a file of gold answers, a row's own question and gold answer are not used."""
    gold = tmp_path / "gold.jsonl"
    write_records(gold, [Record("a", "d", "math", "1+1", "2")])
    row = {"id": "a", "question": "?", "gold": "3", "dataset": "e", "response": "2", "prediction": "3", "model": "m"}
    [found] = graded(tmp_path / "out", write_lines(tmp_path / "r.jsonl", row), "--gold", gold)
    assert (found.gold, found.dataset, found.model, found.correct) == ("2", "d", "m", True)
    assert "r.jsonl: fields without effect: dataset, gold, prediction, question\n" in capsys.readouterr().err


def test_responses_without_an_answer_are_counted(tmp_path, capsys):
    rows = [{"question": "1+1?", "answer": "2", "response": text, "confidence": 0.5} for text in ("2", "", " \n", "2")]
    found = graded(tmp_path / "out", write_lines(tmp_path / "mine.jsonl", *rows))
    assert [p.correct for p in found] == [True, False, False, True]
    assert f"2 of 4 responses hold no answer and count as wrong, the first is {tmp_path}/mine.jsonl:2" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["mine.jsonl.gz", "mine.jsonl.GZ", "mine.gz", "mine.csv.gz", "graded.jsonl.gz"])
def test_compressed_files_are_unpacked(tmp_path, capsys, name):
    rows = [{**row, "correct": True} for row in (OWN, WRONG)] if name.startswith("graded") else [OWN, WRONG]
    text = "\n".join(map(json.dumps, rows))
    if ".csv" in name:
        text = "\n".join(",".join(map(str, row)) for row in (OWN.keys(), OWN.values(), WRONG.values()))
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()))
    assert [p.confidence for p in graded(tmp_path / "out", path)] == [0.9, 0.2]
    for damaged in (path.read_bytes()[:-9], path.read_bytes()[:20] + b"?" * 20):
        path.write_bytes(damaged)
        assert evaluate(path) == 1
        assert f"{path}: cannot be read: " in capsys.readouterr().err


def test_files_of_the_same_questions_are_paired(tmp_path, capsys):
    first = write_lines(tmp_path / "first.jsonl", OWN, WRONG)
    second = tmp_path / "second.csv"
    second.write_text("confidence,correct,id\n0.4,1,0\n0.3,1,1\n")
    third = write_lines(tmp_path / "third.jsonl", WRONG, OWN)  # in another order
    assert evaluate(first, "--against", second, "--output", tmp_path / "out") == 0
    [difference] = json.loads((tmp_path / "out" / "metrics.json").read_text())["differences"].values()
    assert (difference["n"], difference["accuracy"]["estimate"]) == (2, -0.5)
    assert "warning: 2 of 2 questions" not in capsys.readouterr().err
    assert evaluate(first, third) == 0
    assert "warning: 2 of 2 questions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "options", "warned"),
    [
        ({"conf": 0.9}, (), "'conf'"),
        ({"confidence": None}, (), "'confidence'"),
        ({"conf": 0.9}, ("--columns", '{"confidence": "conf"}'), ""),
        ({"response": "<confidence> 0.5 </confidence> 2"}, (), ""),
    ],
)
def test_a_file_that_states_no_confidence_is_noticed(tmp_path, capsys, change, options, warned):
    """One row may lack what another one has."""
    row = {"question": "1+1?", "answer": "2", "response": "2"}
    assert evaluate(write_lines(tmp_path / "mine.jsonl", row, row | change), *options) == 0
    error = capsys.readouterr().err
    assert ("valid confidence" in error) == bool(warned)
    assert warned in error


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ([], '{"factual": {"match": "contains"}}'),
        (["--grader", "factual"], '{"match": "contains"}'),
        (["--grader-options", '{"factual": {"match": "contains"}}'], ""),
        (["--grader", "factual", "--grader-options", '{"match": "contains"}'], ""),
    ],
)
def test_a_looser_comparison_is_recommended_only_if_it_is_not_used(tmp_path, capsys, options, advice):
    row = {"question": "Capital of Egypt?", "answer": "Cairo", "prediction": "Not Cairo, or is it?", "confidence": 0.5}
    assert evaluate(write_lines(tmp_path / "mine.jsonl", row), *options) == 0
    error = capsys.readouterr().err
    assert ("contains" in error) == bool(advice)
    assert f"'{advice}'" in error or not advice


def test_tokens_are_counted_to_a_confidence_of_the_response_alone(tmp_path):
    """Not to one beside it, which the response did not need."""
    qwen_like().save_pretrained(tmp_path / "tokenizer")
    row = {"question": "1+1?", "answer": "2", "response": "<confidence> 0.7 </confidence> 2"}
    path = write_lines(tmp_path / "mine.jsonl", row, {**row, "confidence": 0.4})
    inside, beside = graded(tmp_path / "out", path, "--tokenizer", tmp_path / "tokenizer")
    assert (inside.confidence, beside.confidence) == (0.7, 0.4)
    assert inside.tokens_to_confidence is not None
    assert beside.tokens_to_confidence is None


def test_a_column_that_is_named_for_a_field_is_no_other_field(tmp_path):
    """Neither the one of its name, nor is a column of the field's name read."""
    row = {"id": "0", "confidence": 0.5, "correct": 1, "dataset": "a", "model": "b"}
    path = write_lines(tmp_path / "mine.jsonl", row)
    [(_, found)] = rows_by_field(path, {"model": "dataset"})
    assert found == {"id": "0", "confidence": 0.5, "correct": 1, "model": "a"}


def test_columns_of_responses_may_have_other_names(tmp_path):
    rows = [{"q": "1+1?", "gold answer": "2", "said": "<confidence> 0.7 </confidence> 2", "note": "x"}]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = '{"question": "q", "gold": "gold answer", "response": "said"}'
    assert evaluate(tmp_path / "mine.jsonl", "--columns", columns, "--output", tmp_path / "out") == 0
    [found] = read_predictions(tmp_path / "out" / "predictions.jsonl")
    assert (found.confidence, found.correct) == (0.7, True)


@pytest.mark.parametrize(
    ("written", "steps", "labels", "notes"),
    [
        # verl's layout, MindSpeed-RL's, two stages
        ("validation", (0, 50, 100), ["step_000000", "step_000100"], 1),
        ("stage0/validation", (0, 50), ["stage0 step_000000", "stage0 step_000050"], 0),
        ("stage0/validation stage1/validation", (50,), ["stage0 step_000050", "stage1 step_000050"], 0),
        ("validation", (999_999, 1_000_000), ["step_999999", "step_1000000"], 0),
    ],
)
def test_the_first_and_the_newest_validation_of_a_cluster_run_are_evaluated(
    written, steps, labels, notes, files, capsys
):
    run, rows = files / "mine", [replace(p, method="coca") for p in read_predictions(files / "one.jsonl")]
    for folder in written.split():
        for step in steps:
            write_predictions(validation_file(run / folder, step), rows)
    assert evaluate(run, "--output", files / "out") == 0
    found = read_predictions(files / "out" / "predictions.jsonl")
    assert list(dict.fromkeys(p.model for p in found)) == [f"mine {label}" for label in labels]
    assert capsys.readouterr().err.count("note: ") == notes
    assert [each.label for each in read_runs([run])] == [f"mine {label}" for label in labels]
    folder = run / written.split()[0]
    assert evaluate(folder, "--output", files / "all") == 0
    models = {p.model for p in read_predictions(files / "all" / "predictions.jsonl")}
    assert models == {f"validation step_{step:06d}" for step in steps}
