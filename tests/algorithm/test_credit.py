"""From judged responses to advantages of segments: by hand, method by method."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.methods import METHODS, method_settings

UP = 1 / math.sqrt(2)  # (x - mean) / sample deviation of two unequal numbers
N = math.nan


def credit(correct, stated, method="coca", log_probs=None, stated_after=None, **choices):
    rule = CreditRule(method_settings(method, **{"advantage_eps": 0.0, **choices}), 0)
    stated, after = (None if s is None else torch.tensor([s], dtype=torch.float64) for s in (stated, stated_after))
    return rule(torch.tensor([correct]).double(), stated, log_probs, stated_after=after)


def test_by_hand():
    """One group of two: r_a = (1, 0), GESR 0.5, s = (0.5, 0), so r_c = (0, -0.25)."""
    result = credit([True, False], [0.5, 0.0])
    for advantage in (result.segments["confidence"], result.segments["answer"]):
        torch.testing.assert_close(advantage.values, torch.tensor([[UP, -UP]]))
        assert advantage.varies.tolist() == [True]
    assert result.gesr.tolist() == [[0.5]]
    assert result.confidence_reward.tolist() == [[0.0, -0.25]]


def test_confidence_reward_is_the_brier_score_whatever_the_method_rewards():
    for name in METHODS:
        result = credit([True, False], [0.5, N], name, invalid_reward=-2.0, stated_after=[0.5, 0.5])
        assert result.confidence_reward.tolist() == [[0.0, -2.0]]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("correct", torch.zeros(shape)) for shape in ((3, 0), (3, 1), (0, 1), (0, 0), (2,))),
        ("correct", torch.zeros(1, 2, dtype=torch.bool)),
        ("correct", torch.tensor([[0.5, 1.0]])),
        ("stated", torch.zeros(1, 3)),
        ("stated", torch.zeros(1, 2, dtype=torch.int64)),
        ("stated", torch.zeros(1, 2, device="meta")),
        *(("stated", torch.tensor([[value, 0.5]])) for value in (-0.01, 1.01, math.inf)),
    ],
)
def test_wrong_arguments_are_refused_by_name(name, value):
    given = {"correct": torch.zeros(1, 2), "stated": torch.zeros(1, 2), name: value}
    with pytest.raises(ValueError, match=f"^{name} should "):
        CreditRule(method_settings())(**given)


def test_an_ungradable_answer_is_no_member_of_its_group():
    """r_a = (1, 0, -), so GESR is 1/2; s = (.5, 0, 1), so r_c = (0, -.25, -)."""
    result = credit([1, 0, N], [0.5, 0.0, 1.0])
    for advantage in (result.segments["confidence"], result.segments["answer"]):
        torch.testing.assert_close(advantage.values, torch.tensor([[UP, -UP, 0]]))
    assert result.gesr.tolist() == [[0.5]]
    assert str(result.confidence_reward.tolist()) == "[[-0.0, -0.25, nan]]"
    assert result.kept.tolist() == [True]


@pytest.mark.parametrize("correct", [[1, N, N], [N, N, N]])
def test_a_group_of_fewer_than_two_gradable_answers_is_dropped(correct):
    result = credit(correct, [0.9, 0.1, 0.5])
    for advantage in (result.segments["confidence"], result.segments["answer"]):
        assert not advantage.values.any()
        assert advantage.varies.tolist() == result.kept.tolist() == [False]
    assert result.gesr.isnan().all()
    assert result.confidence_reward.isnan().all()


def test_an_invalid_response_is_not_compared_with_the_valid_ones():
    """GESR is 1/2.  s = (.5, 0, -, -): Brier 0 and -.25 among the valid; valid = (1, 1, 0, 0), deviation 1/sqrt(3)."""
    given = ([True, False, True, False], [0.5, 0.0, N, N])
    form = 0.5 * math.sqrt(3)
    separate = credit(*given)
    torch.testing.assert_close(
        separate.segments["confidence"].values, torch.tensor([[UP + form, form - UP, -form, -form]])
    )
    assert separate.confidence_reward.tolist() == [[0.0, -0.25, -1.0, -1.0]]
    # the paper's form: (0, -.25, -1, -1) has mean -.5625 and squared deviations .316406, .097656 and twice .191406
    literal = credit(*given, separate_format=False).segments["confidence"].values
    deviation = math.sqrt(0.796875 / 3)
    torch.testing.assert_close(literal, torch.tensor([[0.5625, 0.3125, -0.4375, -0.4375]]) / deviation)


@pytest.mark.parametrize(
    ("confidence", "expected"),
    [
        ([0.2, math.nan], [UP, -UP]),  # one valid response has nothing to be compared with
        ([math.nan, math.nan], [0, 0]),
        ([0.2, 0.2], [0, 0]),
    ],
)
def test_groups_with_fewer_than_two_valid_responses(confidence, expected):
    result = credit([True, True], confidence)
    torch.testing.assert_close(result.segments["confidence"].values, torch.tensor([expected], dtype=torch.float32))
    assert result.segments["confidence"].varies.tolist() == [any(expected)]


def test_the_entropy_bonus_is_earned_by_rare_confidences():
    """GESR 1/2; s = (.5, 0), r_c = (0, -.25); log pi = (-1, -5): with .1 the rewards are (.1, .25).

    With the third response GESR is 2/3, and the rewards are (-1/36 + .1, -4/9 + .5).
    """
    given = ([True, False], [0.5, 0.0])
    log_probs = torch.tensor([[-1.0, -5.0]])
    for bonus, expected in ((0.0, [UP, -UP]), (0.1, [-UP, UP]), (0.0625, [0, 0])):
        result = credit(*given, log_probs=log_probs, entropy_bonus=bonus)
        torch.testing.assert_close(result.segments["confidence"].values, torch.tensor([expected], dtype=torch.float32))
        assert result.confidence_reward.tolist() == [[0.0, -0.25]]
    invalid = credit([1, 0, 1], [0.5, 0.0, N], log_probs=torch.tensor([[-1.0, -5.0, -9.0]]), entropy_bonus=0.1)
    form = 2 / 3 / math.sqrt(1 / 3)
    torch.testing.assert_close(
        invalid.segments["confidence"].values, torch.tensor([[form / 2 + UP, form / 2 - UP, -form]])
    )
    # With .1 the rewards are (.1, .25), which are centred with the bonus.
    for scale, expected in (("none", 0.075), ("batch", 1.0)):
        found = (
            credit(*given, log_probs=log_probs, entropy_bonus=0.1, advantage_scale=scale).segments["confidence"].values
        )
        torch.testing.assert_close(found, torch.tensor([[-expected, expected]]))
    with pytest.raises(ValueError, match=r"^entropy_bonus: .*\bcoca only"):
        credit(*given, method="joint", log_probs=log_probs, entropy_bonus=0.1)
    with pytest.raises(ValueError, match="log_probs"):
        credit(*given, entropy_bonus=0.1)


def test_credit_for_a_segment_that_a_response_has_not_is_refused():
    method = SimpleNamespace(
        **{name: getattr(METHODS["coca"], name) for name in ("name", "confidence_position", "stages")}
    )
    method.advantages = lambda outcomes, normalise, stage: {"thought": normalise.within_group(outcomes.correct)}
    with pytest.raises(ValueError, match=r"'thought'.* confidence, answer"):
        CreditRule(method_settings(method))(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]]))


def test_nearly_equal_confidences_are_divided_by_the_least_deviation_too():
    """Rewards -(.5 - p)^2 at p = .5 +- 1e-4 and 1: centred they are +-5e-9, half of the least deviation."""
    correct, stated = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5 + 1e-4]], dtype=torch.float64)
    found = CreditRule(method_settings("coca", advantage_scale="batch"))(correct, stated)
    expected = 5e-9 / (5e-9 + 1e-8)
    torch.testing.assert_close(found.segments["confidence"].values, torch.tensor([[expected, -expected]]))
    assert found.values_by_segment()["confidence"] is found.segments["confidence"].values


def test_the_scale_by_hand():
    """GESR 1/2, 1 and 0; Brier rewards (0, -.25), (-.01, -.36) and (-.09, -.09); centred +-.125, +-.175 and 0.

    The deviation of the step is over all six, sqrt((2 * .125^2 + 2 * .175^2) / 6).  Answers keep the group's scale.
    """
    correct = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    stated = torch.tensor([[0.5, 0.0], [0.9, 0.4], [0.3, 0.3]], dtype=torch.float64)
    deviation = math.sqrt((2 * 0.125**2 + 2 * 0.175**2) / 6)
    for scale, divisor in (("group", None), ("batch", deviation), ("none", 1.0)):
        rule = CreditRule(method_settings("coca", advantage_eps=0.0, advantage_scale=scale))
        found = rule(correct, stated)
        first, second = (UP, UP) if divisor is None else (0.125 / divisor, 0.175 / divisor)
        expected = [[first, -first], [second, -second], [0, 0]]
        torch.testing.assert_close(found.segments["confidence"].values, torch.tensor(expected, dtype=torch.float32))
        torch.testing.assert_close(found.segments["answer"].values, torch.tensor([[UP, -UP], [0, 0], [0, 0]]))
        assert found.segments["confidence"].varies.tolist() == [True, True, False]
        assert found.deviation == pytest.approx(deviation if scale == "batch" else 0.0, abs=1e-7)


@pytest.mark.parametrize(
    ("method", "reward"),
    [("rlvr", [[1, 0], [1, 1]]), ("joint", [[1, -0.25], [0.99, 0.64]]), ("rlcr", [[0.75, 0], [0.99, 0.64]])],
)
def test_the_one_reward_of_a_method_has_the_scale(method, reward):
    correct = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    stated = torch.tensor([[0.5, 0.0], [0.9, 0.4]], dtype=torch.float64)
    centred = [[(a - b) / 2, (b - a) / 2] for a, b in reward]
    deviation = math.sqrt(sum(d * d for row in centred for d in row) / 4)
    found = CreditRule(method_settings(method, advantage_scale="batch"))(correct, stated)
    torch.testing.assert_close(found.segments["answer"].values, torch.tensor(centred, dtype=torch.float32) / deviation)
    assert torch.equal(found.segments["confidence"].values, found.segments["answer"].values)


def test_members_that_take_part_and_no_others_make_the_deviation():
    """Group 1: two valid of four, one invalid, one ungradable.  Group 2 is dropped.  Group 3: one valid."""
    correct = torch.tensor([[1, 0, 1, N], [1, N, N, N], [1.0] * 4])
    stated = torch.tensor([[0.5, 0.0, N, 0.9], [0.1, 0.9, 0.5, 0.2], [0.2, N, N, N]], dtype=torch.float64)
    found = CreditRule(method_settings("coca", advantage_eps=0.0, advantage_scale="batch"))(correct, stated)
    # GESR 2/3 in the first group: -(1/6)^2 and -(2/3)^2, so d = +-(4/9 - 1/36) / 2
    d = (4 / 9 - 1 / 36) / 2
    assert found.deviation == pytest.approx(math.sqrt(2 * d * d / 3), abs=1e-7)
    form = 2 / 3 / math.sqrt(1 / 3)
    brier = math.sqrt(3 / 2)
    expected = [form / 2 + brier, form / 2 - brier, -form, 0]
    torch.testing.assert_close(found.segments["confidence"].values[0], torch.tensor(expected, dtype=torch.float32))
    assert not found.segments["confidence"].values[1].any()


def step(groups=24, size=5):
    draw = torch.Generator().manual_seed(3)
    correct = (torch.rand(groups, size, generator=draw) < 0.4).double()
    stated = torch.rand(groups, size, generator=draw, dtype=torch.float64)
    stated[torch.rand(groups, size, generator=draw) < 0.2] = math.nan
    correct[torch.rand(groups, size, generator=draw) > 0.9] = math.nan
    return correct, stated


def in_parts(rule, given, parts):
    """Advantages of a step whose groups are spread over processes that share one deviation."""
    correct, stated = given
    sums = []

    def run(reduce):
        for rows in parts:
            yield rule(correct[rows], stated[rows], reduce=reduce)

    list(run(lambda *own: sums.append(own) or own))
    total = math.fsum(squares for squares, _ in sums), sum(count for _, count in sums)
    found = torch.cat([part.segments["confidence"].values for part in run(lambda *_: total)])
    return found[torch.cat(parts).argsort()]


@pytest.mark.parametrize("method", ["coca", "joint", "rlcr"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_split_or_another_order_of_a_step_changes_nothing(method, scale):
    rule, given = CreditRule(method_settings(method, advantage_scale=scale)), step()
    whole = in_parts(rule, given, [torch.arange(24)])
    assert torch.equal(in_parts(rule, given, [torch.randperm(24)]), whole)
    for sizes in ([12, 12], [1, 3, 20], [1] * 24):
        torch.testing.assert_close(in_parts(rule, given, list(torch.randperm(24).split(sizes))), whole)


@pytest.mark.filterwarnings("error")
def test_a_step_without_members_still_takes_part_in_the_sum():
    seen = []
    rule = CreditRule(method_settings("coca", advantage_scale="batch"))
    reduce = lambda *own: seen.append(own) or own  # noqa: E731
    found = rule(torch.full((1, 2), N), torch.full((1, 2), 0.5), reduce=reduce)
    assert seen == [(0.0, 0)]
    assert not found.segments["confidence"].values.any()


def normalised(rewards, size, ddof, eps):
    """Advantages of one group from ``{member: reward}``, a number a response; 0 for those that are no members."""
    if len(rewards) < 2 or max(rewards.values()) - min(rewards.values()) <= 1e-9:
        return [0.0] * size
    mean = sum(rewards.values()) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards.values()) / (len(rewards) - ddof))
    return [(rewards[i] - mean) / (deviation + eps) if i in rewards else 0.0 for i in range(size)]


def oracle(method, correct, confidence, gradable, invalid_reward, ddof, eps, separate_format):
    """Advantages of one group by plain arithmetic: (confidence, answer), a number a response."""
    size = len(correct)
    members = [i for i, counts in enumerate(gradable) if counts]
    if len(members) < 2:
        return [0.0] * size, [0.0] * size
    p = sum(correct[i] for i in members) / len(members)
    answer = {i: float(correct[i]) for i in members}
    invalid = {i for i in members if math.isnan(confidence[i])}

    def brier(i, target):
        return invalid_reward if i in invalid else -((confidence[i] - target) ** 2)

    score = {i: brier(i, p) for i in members}
    if method == "coca" and separate_format:
        valid = normalised({i: score[i] for i in members if i not in invalid}, size, ddof, eps)
        form = normalised({i: float(i not in invalid) for i in members}, size, ddof, eps)
        return [a + b for a, b in zip(valid, form, strict=True)], normalised(answer, size, ddof, eps)
    rewards = {
        "coca": (score, answer),
        "rlvr": (answer, answer),
        "joint": ({i: answer[i] + score[i] for i in members},) * 2,
        "rlcr": ({i: answer[i] + brier(i, answer[i]) for i in members},) * 2,
    }[method]
    return tuple(normalised(reward, size, ddof, eps) for reward in rewards)


@given(
    st.integers(2, 7).flatmap(
        lambda group: st.lists(
            st.tuples(
                st.lists(st.booleans(), min_size=group, max_size=group),
                st.lists(st.sampled_from([0.0, 0.13, 0.5, 0.77, 1.0, math.nan]), min_size=group, max_size=group),
                st.lists(st.booleans(), min_size=group, max_size=group),
            ),
            min_size=1,
            max_size=5,
        )
    ),
    st.sampled_from(["coca", "rlvr", "joint", "rlcr"]),
    st.sampled_from([0, 1]),
    st.booleans(),
)
def test_against_plain_arithmetic(groups, method, ddof, separate_format):
    correct, confidence, gradable = (torch.tensor(part) for part in zip(*groups, strict=True))
    keys = {"advantage_ddof": ddof, "advantage_eps": 0.05, "separate_format": separate_format}
    rule = CreditRule(method_settings(method, invalid_reward=-1.5, **keys))
    found = rule(correct.double().masked_fill(~gradable, N), confidence.double())
    for row, group in enumerate(groups):
        expected = oracle(method, *group, -1.5, ddof, 0.05, separate_format)
        for name, wanted in zip(("confidence", "answer"), expected, strict=True):
            assert found.segments[name].values[row].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
