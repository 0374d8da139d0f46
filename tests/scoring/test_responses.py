"""Scoring of sampled responses with hand-made tokens."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from coca_mindspeed.algorithm.boundary import TokenText
from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.verdict import ExactGrader, Outcome, Verdict
from coca_mindspeed.scoring.metrics import rollout_metrics, values
from coca_mindspeed.scoring.responses import ResponseScorer, predictions
from coca_mindspeed.scoring.rollout import Graded, Sampled, Scored

# One token of each kind: tags, digits, and a token that straddles the end of the tag.
TOKENS = [b"", b"<confidence>", b"0.5", b"</confidence>", b"</confidence>\n4", b"4", b"7", b"1"]


class Fussy:
    """A grader that cannot grade an empty answer."""

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        return [Verdict(Outcome.UNGRADABLE if not answer else Outcome.WRONG) for answer in answers]

    def close(self) -> None: ...


def score(rows: Sequence[Sequence[int]], answers: Sequence[str], **changed: Any) -> Graded:
    """Each of ``answers`` is the gold answer of a group of responses."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    records = [Record(id=str(i), dataset="d", category="math", question="q", answer=a) for i, a in enumerate(answers)]
    parts = {"method": method_settings(), "text": TokenText(TOKENS), "grader": ExactGrader(), **changed}
    parts["method"] = replace(parts["method"], max_confidence_tokens=2)
    lengths = torch.tensor([len(row) for row in rows])
    return ResponseScorer(**parts)(Sampled(token_ids=ids, lengths=lengths), records)


def test_by_hand():
    scored = score([[1, 2, 3, 5], [1, 2, 4], [1, 2, 3, 6], [5, 5, 5]], ["4", "4", "4", "444"])
    assert scored.correct.tolist() == [1, 1, 0, 1]
    assert scored.stated.tolist()[:3] == [0.5, 0.5, 0.5]
    assert math.isnan(scored.stated[3])
    # The straddling token belongs to the confidence; an invalid response has its first two tokens.
    assert scored.confidence_lengths.tolist() == [3, 3, 3, 2]
    assert scored.texts[1] == "<confidence>0.5</confidence>\n4"


def test_an_invalid_confidence_is_never_guessed():
    scored = score([[1, 7, 5, 3], [5, 1, 2, 3], []], ["x", "x", ""])
    assert scored.stated.isnan().all()
    assert scored.confidence_lengths.tolist() == [2, 2, 0]
    assert scored.correct.tolist() == [0, 0, 1]


def test_the_responses_of_a_group_have_its_record():
    scored = score([[1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 3, 6], [1, 2, 3, 7]], ["4", "7"])
    assert [record.id for record in scored.records] == ["0", "0", "1", "1"]
    assert scored.correct.tolist() == [1, 0, 1, 0]
    for answers in (["4", "7", "1"], []):
        with pytest.raises(ValueError, match="4 responses"):
            score([[1, 2, 3, 5]] * 4, answers)


def test_answer_first_responses():
    scored = score([[5, 1, 2, 3]], ["4"], method=method_settings("rlcr"))
    assert (scored.correct.tolist(), scored.stated.tolist()) == ([1], [0.5])
    assert scored.confidence_lengths.tolist() == [4]  # tokens until the confidence is known


@pytest.mark.parametrize("position", ["first", "last", "both"])
def test_thoughts_belong_to_the_answers_segment_and_are_measured(position):
    """A tag of the thought that is merged with its neighbours, as byte-level BPE does, a thought that stays open."""
    tokens = [*TOKENS, b"<think>", b"so 7", b"</think", b">4"]
    stated, thought, closed, before, after = [1, 2, 3], [9, 9], [10, 11], position != "last", position != "first"
    rows = [
        [8, *stated * before, *thought, *closed, *stated * after],
        [*stated * before, *closed, *stated * after],
        [*stated * before, *thought, *thought],
    ]
    settings = method_settings({"first": "coca", "last": "rlcr", "both": "caliber"}[position], thinking=True)
    scored = score(rows, ["4", "4", "7"], text=TokenText(tokens), method=settings)
    assert scored.answers == ["4", "4", ""]
    assert scored.correct.tolist() == [1, 1, 0]
    start = 3 * before
    assert scored.thought_ends.tolist() == [start + 5, start + 2, 0]
    if before:
        assert scored.segment_ends[:, 0].tolist() == [4, 3, 3]  # the opening tag belongs to the confidence
    credited = Scored.from_columns(scored.columns()).give_credit(CreditRule(settings, settings.checked_stage(0)), 3)
    metrics = values(rollout_metrics(credited))
    assert metrics["response/open_thought_share"] == 1 / 3
    assert metrics["response/thought_length"] == (4 + 2 + 4) / 3 if before else (5 + 2 + 4) / 3
    masks = credited.masks["answer"]
    assert masks[:, start + 1].tolist() == [True] * 3
    assert not any(
        "thought" in name
        for name in values(
            rollout_metrics(score([[1, 2, 3, 5]] * 2, ["4"]).give_credit(CreditRule(method_settings()), 2))
        )
    )


def test_predictions_hold_both_confidences_of_a_response():
    tokens = [*TOKENS, b"0.9"]
    rows = [[1, 2, 3, 5, 1, 8, 3], [1, 2, 3, 6], [5, 1, 8, 3]]
    scored = score(rows, ["4", "4", "4"], text=TokenText(tokens), method=method_settings("caliber"))
    found = [(p.confidence, p.confidence_after, p.correct) for p in predictions(scored)]
    assert found == [(0.5, 0.9, True), (0.5, None, False), (None, 0.9, True)]
    assert {p.confidence_after for p in predictions(score([[1, 2, 3, 5]], ["4"]))} == {None}


def test_a_confidence_is_kept_as_it_was_stated():
    """Through float32, 0.3 would come back as 0.30000001192092896 and fall into the next bin."""
    tokens = [b"", b"<confidence>0.3</confidence>", b"4"]
    assert score([[1, 2]], ["4"], text=TokenText(tokens)).stated.tolist() == [0.3]


def test_ungradable_is_counted_and_not_right():
    scored = score([[1, 2, 3], [1, 2, 3, 5]], ["4", "4"], grader=Fussy())
    assert str(scored.correct.tolist()) == "[nan, 0.0]"
