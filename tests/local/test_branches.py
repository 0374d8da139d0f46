"""Responses that have begun alike are one row of the decoder, and draw for themselves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.local import sampler
from coca_mindspeed.local.policy import load_policy
from coca_mindspeed.local.sampler import NextStep, SharedRows
from tests.local.models_for_tests import write_random_model

CPU = torch.device("cpu")


def column(*tokens):
    return torch.tensor(tokens)[:, None]


def all_of(count):
    return torch.ones(count, dtype=torch.bool)


def test_by_hand():
    """Two prompts with four responses each."""
    branches = SharedRows(2, 4, CPU)
    assert branches.row_of.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    # All begin alike: nothing is copied, and two rows run.
    keep, repeat, token = branches.go_on(all_of(8), column(*[7] * 8))
    assert (keep, repeat) == (None, None)
    assert token.tolist() == [[7], [7]]
    # The second group parts in three ways: one goes on in the row, two copies of it come behind the others.
    keep, repeat, token = branches.go_on(all_of(8), column(5, 5, 5, 5, 6, 3, 6, 9))
    assert keep is None
    assert repeat.tolist() == [1, 1]
    assert token.tolist() == [[5], [3], [6], [9]]
    assert branches.row_of.tolist() == [0, 0, 0, 0, 2, 1, 2, 3]
    # One that ends leaves its row to the others; two rows are left empty, and so the others move together.
    going = torch.tensor([True, True, True, True, True, False, False, False])
    keep, repeat, token = branches.go_on(going, column(1, 1, 1, 1, 9, 0, 0, 0))
    assert keep.tolist() == [0, 2]
    assert repeat is None
    assert token.tolist() == [[1], [9]]
    assert branches.row_of.tolist() == [0, 0, 0, 0, 1]
    # Rows that part while others end: all in one go, the row 0 twice.
    going = torch.tensor([True, True, False, True, False])
    keep, repeat, token = branches.go_on(going, column(4, 2, 0, 2, 0))
    assert keep.tolist() == [0, 0]
    assert repeat is None
    assert token.tolist() == [[2], [4]]
    assert branches.row_of.tolist() == [1, 0, 0]


def test_few_empty_rows_stay():
    branches = SharedRows(20, 1, CPU)
    going = all_of(20)
    going[3] = False
    keep, repeat, token = branches.go_on(going, column(*range(100, 120)))
    assert (keep, repeat) == (None, None)
    assert [row for row in token[:, 0].tolist() if row] == [n for n in range(100, 120) if n != 103]
    assert branches.row_of.tolist() == [n for n in range(20) if n != 3]


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_row_is_what_its_responses_have_said(data):
    prompts, group = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    said = [(f"prompt {n // group}",) for n in range(prompts * group)]  # of the responses that go on
    rows = [(f"prompt {n}",) for n in range(prompts)]  # of the decoder
    branches = SharedRows(prompts, group, CPU)
    vocabulary = st.sampled_from([0, 3, 151_935])
    for _ in range(data.draw(st.integers(1, 8))):
        tokens = data.draw(st.lists(vocabulary, min_size=len(said), max_size=len(said)))
        going = data.draw(st.lists(st.sampled_from([True, True, True, False]), min_size=len(said), max_size=len(said)))
        if not any(going):
            break
        said = [(*before, token) for before, token, goes in zip(said, tokens, going, strict=True) if goes]
        keep, repeat, token = branches.go_on(torch.tensor(going), column(*tokens))
        if keep is not None:
            rows = [rows[row] for row in keep.tolist()]
        if repeat is not None:
            rows += [rows[row] for row in repeat.tolist()]
        rows = [(*row, appended) for row, appended in zip(rows, token[:, 0].tolist(), strict=True)]
        assert [rows[row] for row in branches.row_of.tolist()] == said
        assert len(set(branches.row_of.tolist())) == len(set(said))  # no two rows for what is the same
        assert len(set(said)) > 0.9 * len(rows) or keep is not None


@pytest.mark.parametrize("prompts", [[[5, 6, 7], [8, 9, 10]], [[5, 6, 7], [8]]], ids=["equal", "mixed"])
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_the_same_noise_draws_the_same_responses_as_rows_of_their_own(tmp_path, monkeypatch, architecture, prompts):
    policy = load_policy(write_random_model(tmp_path / "m", architecture), ModelConfig(), CPU)
    ran = []
    step = sampler.Decoder.step

    def counted(self, token):
        ran.append(len(token))
        step(self, token)

    monkeypatch.setattr(sampler.Decoder, "step", counted)

    def sample():
        ran.clear()
        return sampler.sample_responses(
            policy,
            prompts,
            group_size=16,
            max_new_tokens=30,
            temperature=0.05,
            generator=torch.Generator().manual_seed(0),
        ), sum(ran)

    found, rows = sample()
    monkeypatch.setattr(sampler, "SharedRows", RowsOfTheirOwn)
    plain, all_rows = sample()
    assert rows < 0.8 * all_rows, "at this temperature responses begin alike"
    assert torch.equal(found.token_ids, plain.token_ids)
    assert torch.equal(found.lengths, plain.lengths)
    assert torch.equal(found.finished, plain.finished)
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(getattr(found, name), getattr(plain, name), atol=1e-5, rtol=1e-4)


class RowsOfTheirOwn:
    """Every response has a row from its first token on."""

    def __init__(self, prompts, group_size, device):
        self.row_of = torch.arange(prompts, device=device).repeat_interleave(group_size)

    def go_on(self, going, token):
        rows, self.row_of = self.row_of[going], torch.arange(int(going.sum()))
        return NextStep(rows, None, token[going])


def test_responses_that_share_a_row_draw_for_themselves(tmp_path):
    """The second tokens of those that share their first one, against the model's probabilities."""
    policy = load_policy(write_random_model(tmp_path / "m", "qwen2"), ModelConfig(), CPU)
    generator = torch.Generator().manual_seed(0)
    sampled = sampler.sample_responses(
        policy, [[5, 6, 7]], group_size=4000, max_new_tokens=2, temperature=0.5, generator=generator
    )
    going = sampled.token_ids[sampled.lengths == 2]
    first = int(going[:, 0].mode().values)
    second = going[going[:, 0] == first, 1]
    with torch.no_grad():
        logits = policy.model(torch.tensor([[5, 6, 7, first]])).logits[0, -1]
    expected = policy.logits_of_policy(logits, 0.5).softmax(-1) * len(second)
    counts = torch.bincount(second, minlength=len(expected)).float()
    likely = expected > 5
    assert int(likely.sum()) > 3
    classes = [torch.cat([each[likely], each[~likely].sum()[None]]).double() for each in (counts, expected)]
    assert chisquare(classes[0], classes[1] / classes[1].sum() * classes[0].sum()).pvalue > 1e-4
