"""The study of questions that are reserved for the confidence: every arm, and its table."""

import pytest

from coca_mindspeed.data.records import read_records
from coca_mindspeed.data.reserved import is_reserved
from coca_mindspeed.evaluation.predictions import Prediction, write_predictions
from coca_mindspeed.utils.files import write_json
from experiments.confidence_share.arms import ARMS, STUDIES, Study, run_arm
from experiments.confidence_share.report import interval, report
from experiments.miniature import repeated_progression_records


def _questions():
    return tuple(
        repeated_progression_records(size, split, 0) for size, split in ((40, "train"), (40, "train"), (8, "evaluate"))
    )


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    output = tmp_path_factory.mktemp("study")
    settings = (
        "warm_up.steps=2",
        "warm_up.batch=4",
        "trainer.steps=1",
        "rollout.prompts=4",
        "rollout.max_new_tokens=12",
    )
    STUDIES["tiny"] = Study("demo", settings, tuple(ARMS), 2, _questions)
    try:
        for arm in ARMS:
            run_arm("tiny", arm, 0, output)
    finally:
        del STUDIES["tiny"]
    return output / "tiny"


def test_the_warm_up_and_the_rest_have_no_reserved_question(study):
    [questions] = study.glob("seed_0/rest_alone/train.jsonl")
    rest = list(read_records(questions))
    assert rest
    assert not any(is_reserved(record, 0.25, 0) for record in rest)
    assert {path.name for path in study.glob("starts/seed_*")} == {
        f"seed_0_share_{s}" for s in ("0", "0.1", "0.25", "0.5")
    }


def test_the_table_has_a_row_for_every_arm_and_map(study):
    rows = [line.split("|")[1].strip() for line in report(study).splitlines() if line.startswith("|")]
    assert set(ARMS) <= set(rows)


def test_a_map_of_the_reserved_answers_by_hand(tmp_path):
    """Half of the answers with .9 and a quarter of those with .4 are right: the map says so, and its Brier score is
    (8 x .25 + 4 x (.25 x .5625 + .75 x .0625)) / 12.
    """
    answers = [(0.9, right) for right in (True, False) * 4] + [(0.4, right) for right in (True, False, False, False)]
    rows = [
        Prediction(str(i), "data", "q", "", confidence=s, correct=right, tokens_to_confidence=5)
        for i, (s, right) in enumerate(answers)
    ]
    arm = tmp_path / "seed_0" / "rest_alone"
    arm.mkdir(parents=True)
    for part in ("held_out", "trained", "reserved"):
        write_predictions(arm / f"{part}.jsonl", rows)
    write_json(arm / "done.json", {"machine": "a machine"})
    [row] = [line for line in report(tmp_path).splitlines() if line.startswith("| rest alone, isotonic")]
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[3:7] == ["0.417", "0.417", "0.000", f"{(8 * 0.25 + 4 * 0.1875) / 12:.3f}"]


def test_the_interval_of_paired_differences():
    mean, low, high = interval([0.1, 0.2, 0.3])
    assert mean == pytest.approx(0.2)
    assert high - mean == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-6)  # t with two degrees of freedom
    assert mean - low == pytest.approx(high - mean)
