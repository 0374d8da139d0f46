"""The reward and advantage stages on hand-computed cases, over a dock that lives in this process."""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from coca_mindspeed.algorithm.boundary import TokenText
from coca_mindspeed.algorithm.response import ResponseParser
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, GradingError, TrainingError
from coca_mindspeed.grading.exact import ExactGrader
from coca_mindspeed.mindspeed import advantage_stage, columns, dock
from coca_mindspeed.mindspeed.advantage_stage import compute_advantages, segment_advantages, segment_lengths
from coca_mindspeed.mindspeed.metrics import batch_metrics, finish, ratio
from coca_mindspeed.mindspeed.reward_worker import RewardWorker, judge
from coca_mindspeed.mindspeed.settings import CocaSettings

NAN = math.nan
# One token of each kind: tags, digits, and a token that straddles the end of the tag.
TOKENS = [b"", b"<confidence>", b"0.5", b"</confidence>", b"</confidence>\n4", b"4", b"7", b"1"]


def _judge(rows: Sequence[Sequence[int]], answers: Sequence[str], **kwargs: Any) -> Any:
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    return judge(
        ids,
        torch.tensor([len(row) for row in rows]),
        [Record(id=str(i), dataset="d", category="math", question="q", answer=a) for i, a in enumerate(answers)],
        text=TokenText(TOKENS),
        parser=kwargs.pop("parser", ResponseParser()),
        grader=ExactGrader(),
        max_confidence_tokens=2,
    )


def test_judging_by_hand() -> None:
    judged = _judge([[1, 2, 3, 5], [1, 2, 4], [1, 2, 3, 6], [5, 5, 5]], ["4", "4", "4", "444"])
    assert judged.correct.tolist() == [True, True, False, True]
    torch.testing.assert_close(judged.confidence, torch.tensor([0.5, 0.5, 0.5, NAN]), equal_nan=True)
    # The straddling token belongs to the confidence; an invalid response lends its first two tokens.
    assert judged.confidence_lengths.tolist() == [3, 3, 3, 2]
    assert judged.texts[1] == "<confidence>0.5</confidence>\n4"
    assert judged.ungradable == 0


def test_an_invalid_confidence_is_never_guessed() -> None:
    judged = _judge([[1, 7, 5, 3], [5, 1, 2, 3], []], ["x", "x", ""])
    assert judged.confidence.isnan().all()
    assert judged.confidence_lengths.tolist() == [2, 2, 0]
    assert judged.correct.tolist() == [False, False, True]


def test_answer_first_responses() -> None:
    judged = _judge([[5, 1, 2, 3]], ["4"], parser=ResponseParser("last"))
    assert (judged.correct.tolist(), judged.confidence.tolist()) == ([True], [0.5])
    assert judged.confidence_lengths.tolist() == [4]  # tokens until the confidence is known


def test_advantages_by_hand() -> None:
    # One group of two: r_a = (1, 0), GESR 0.5, s = (0.5, 0) so r_c = (0, -0.25).
    result = segment_advantages(
        torch.tensor([True, False]),
        torch.tensor([0.5, 0.0]),
        torch.tensor([1, 2]),
        torch.tensor([3, 4]),
        5,
        group_size=2,
        settings=CocaSettings(advantage_eps=0.0),
    )
    up = 1 / math.sqrt(2)  # (x - mean) / sample deviation of two unequal numbers
    expected = torch.tensor([[up, up, up, 0, 0], [-up, -up, -up, -up, 0]])
    torch.testing.assert_close(result.tokens, expected)
    assert result.success_rate.tolist() == [0.5, 0.5]


def test_segments_get_different_advantages() -> None:
    # r_a = (1, 0), s = (0, 0.5): the wrong answer has the better confidence.
    result = segment_advantages(
        torch.tensor([True, False]),
        torch.tensor([0.0, 0.5]),
        torch.tensor([1, 2]),
        torch.tensor([3, 3]),
        3,
        group_size=2,
        settings=CocaSettings(advantage_eps=0.0),
    )
    up = 1 / math.sqrt(2)
    torch.testing.assert_close(result.tokens, torch.tensor([[-up, up, up], [up, up, -up]]))


def test_answer_first_methods_have_one_segment() -> None:
    lengths = torch.tensor([4, 2])
    assert segment_lengths(lengths, CocaSettings(method="rlcr")).tolist() == [0, 0]
    assert segment_lengths(lengths, CocaSettings(method="coca")).tolist() == [4, 2]


def test_unequal_groups_are_an_error() -> None:
    three = torch.ones(3)
    with pytest.raises(TrainingError, match="3 responses are not whole groups of 2"):
        segment_advantages(three.bool(), three, three.long(), three.long(), 1, group_size=2, settings=CocaSettings())


@pytest.mark.parametrize(
    ("indexes", "row"), [([0, 2], 1), ([1, 2], 0), ([0, 1, 3, 2], 2), ([0, 1, 2], None), ([2, 3, 0, 1], None)]
)
def test_broken_groups_are_an_error(indexes: list[int], row: int | None) -> None:
    if indexes == [2, 3, 0, 1]:
        dock.check_groups(indexes, 2)  # groups may come in any order
        return
    with pytest.raises(TrainingError, match="whole groups" if row is None else f"position {row} "):
        dock.check_groups(indexes, 2)


class FakeDock:
    """A transfer dock without Ray: rows become ready as columns are written; ``remote`` calls at once."""

    def __init__(self, rows: int, group: int, shuffle: bool = False) -> None:
        self.data: dict[str, dict[int, Tensor]] = {}
        self.taken: dict[str, set[int]] = {}
        self.metrics: dict[str, list[float]] = {}
        self.rows, self.group, self.shuffle = rows, group, shuffle

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=object.__getattribute__(self, f"_{name}"))

    def _get_experience(
        self, consumer: str, wanted: list[str], count: int, indexes: list[int] | None = None, **_: Any
    ) -> Any:
        taken = self.taken.setdefault(consumer, set())
        if indexes is None:
            groups = range(0, self.rows, self.group)
            starts = [g for g in (reversed(groups) if self.shuffle else groups) if g not in taken]
            ready = [
                g for g in starts if all(r in self.data.get(c, {}) for c in wanted for r in range(g, g + self.group))
            ]
            if len(ready) * self.group < count:
                return None, None
            indexes = [r for g in ready[: count // self.group] for r in range(g, g + self.group)]
        taken.update(indexes)
        return {c: [self.data[c][i] for i in indexes] for c in wanted}, indexes

    def _put_experience(self, data_dict: dict[str, list[Tensor]], indexes: list[int]) -> None:
        for name, rows in data_dict.items():
            assert len(rows) == len(indexes)
            assert all(row.dim() == 1 for row in rows)
            self.data.setdefault(name, {}).update(zip(indexes, rows, strict=True))

    def _all_consumed(self, consumer: str) -> bool:
        return len(self.taken.get(consumer, ())) == self.rows

    def _update_metrics(self, value: dict[str, list[float]], cumulate: bool) -> None:
        assert cumulate
        for name, values in value.items():
            self.metrics.setdefault(name, []).extend(values)


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(target: Any, values: dict[str, Sequence[Tensor]], indexes: Sequence[int]) -> None:
        target.put_experience.remote(data_dict={k: list(v) for k, v in values.items()}, indexes=list(indexes))

    monkeypatch.setattr(dock, "fetch", lambda value, timeout=None: value)
    monkeypatch.setattr(dock, "_unpadded", lambda batch: batch)
    monkeypatch.setattr(advantage_stage, "put", put)


@pytest.fixture
def use_settings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(**fields: Any) -> None:
        settings = SimpleNamespace(coca=CocaSettings(**fields))
        monkeypatch.setattr(advantage_stage, "process_settings", lambda: settings)

    return use


def _judged_dock(shuffle: bool = False) -> FakeDock:
    """Two groups of two, judged."""
    filled = FakeDock(rows=4, group=2, shuffle=shuffle)
    for name, values in {
        "rm_scores": [1.0, 0.0, 1.0, 1.0],
        columns.CONFIDENCE: [0.3, 0.0, 0.9, NAN],
    }.items():
        filled._put_experience({name: [torch.tensor([v]) for v in values]}, [0, 1, 2, 3])
    lengths = [2, 3, 1, 4]
    filled._put_experience(
        {
            "responses": [torch.arange(n) for n in lengths],
            "response_length": [torch.tensor([n], dtype=torch.int32) for n in lengths],
            columns.CONFIDENCE_LENGTH: [torch.tensor([1], dtype=torch.int32)] * 4,
        },
        [0, 1, 2, 3],
    )
    return filled


@pytest.mark.parametrize("guarantee_order", [False, True])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_stage_gives_the_same_whatever_the_dispatch(
    use_settings: Callable[..., None], guarantee_order: bool, count: int, shuffle: bool
) -> None:
    use_settings(advantage_eps=0.0)
    filled = _judged_dock(shuffle)
    samples = compute_advantages(
        filled, count=count, group_size=2, rows=4, guarantee_order=guarantee_order, sample_prompts=1
    )
    up = 1 / math.sqrt(2)
    expected = [[up, up], [-up, -up, -up], [up], [-up, 0, 0, 0]]  # the second group's answers are both right
    for index, row in enumerate(expected):
        torch.testing.assert_close(filled.data["advantages"][index], torch.tensor(row))
        assert filled.data["returns"][index] is not None
    assert [(s["index"], s["correct"], s["confidence"], s["success_rate"]) for s in samples] == [
        (0, True, 0.3, 0.5),
        (1, False, 0.0, 0.5),
    ]
    assert len(filled.metrics["coca/confidence_reward"]) == 4 // count


def test_a_dispatch_that_cuts_groups_is_refused(use_settings: Callable[..., None]) -> None:
    use_settings()
    with pytest.raises(TrainingError, match="adv_dispatch_size 3 does not hold whole groups"):
        compute_advantages(_judged_dock(), count=3, group_size=2, rows=4, guarantee_order=False, sample_prompts=0)


def test_a_stage_whose_rows_never_come_gives_up_and_says_what_it_waited_for(use_settings: Callable[..., None]) -> None:
    use_settings(stall_timeout=0.2)
    with pytest.raises(TrainingError, match="'compute_advantage' has waited 0 s for the columns responses"):
        compute_advantages(FakeDock(4, 2), count=2, group_size=2, rows=4, guarantee_order=False, sample_prompts=0)


def test_batch_metrics_by_hand() -> None:
    correct = torch.tensor([[True, False], [True, True]])
    confidence = torch.tensor([[0.5, 0.0], [0.9, NAN]])
    coca = CocaSettings()
    metrics = finish(
        batch_metrics(
            correct,
            confidence,
            torch.tensor([1, 1, 1, 1]),
            torch.tensor([2, 3, 1, 4]),
            coca.training_method,
            stage=0,
            invalid_reward=-1.0,
        )
    )
    expected = {
        "coca/confidence_reward": (0 - 0.25 - 0.01 - 1) / 4,
        "coca/answer_reward": 0.75,
        "coca/gesr": 0.75,
        "coca/invalid_share": 0.25,
        "coca/groups_without_variance": 0.0,
        "coca/groups_without_answer_variance": 0.5,
        "coca/confidence_length": 1.0,
        "coca/answer_length": 1.5,
        "coca/confidence": 1.4 / 3,
        "coca/brier": (0.25 + 0 + 0.01) / 3,
        "coca/auroc": 1.0,
        "coca/batch_ece": (0.5 + 0 + 0.1) / 3,
    }
    assert metrics == pytest.approx(expected, abs=1e-6)


def test_ratios_are_divided_after_averaging() -> None:
    # Two microbatches, 1 of 2 tokens and 1 of 8 clipped: 2 / 10, not the mean of 1/2 and 1/8.
    parts = [ratio("clip", 1, 2), ratio("clip", 1, 8)]
    averaged = {name: sum(part[name] for part in parts) / 2 for name in parts[0]}
    assert finish({**averaged, "other": 3.0}) == {"clip": pytest.approx(0.2), "other": 3.0}
    assert finish(ratio("undefined", 0.0, 0.0)) == {}


def test_a_reward_worker_that_could_not_start_says_why_when_it_is_used() -> None:
    worker = RewardWorker()
    with pytest.raises(ConfigError, match="is not set"):
        worker.initialize(None, None, None)
    with pytest.raises(GradingError, match="could not be initialised: COCA_MINDSPEED_PROCESS is not set"):
        worker.compute_rm_score()
    with pytest.raises(GradingError, match="could not be initialised: COCA_MINDSPEED_PROCESS is not set"):
        worker.judge_rows({}, [], "eval.jsonl")
