"""What responses begin with is run once: who runs what, what it costs, and that nobody can tell from the gradient."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

from coca_mindspeed.algorithm.advantages import SegmentMasks
from coca_mindspeed.algorithm.objective import segment_objective
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.local import memory as footprints
from coca_mindspeed.local.log_probs import ResponseBatch
from coca_mindspeed.local.prefix_sharing import PassCost, ResponsePasses, take_rows
from coca_mindspeed.local.sampler import Samples
from coca_mindspeed.local.update import microbatches_of, pass_cost, responses_of
from tests.local.models_for_tests import random_policy, set_chunk_of

FREE = PassCost(each=0.1, token_before=0)


def cheapest(responses, prompt_of, prompt_tokens, cost):
    width = max(map(len, responses))
    token_ids = np.array([[*response, *[1] * (width - len(response))] for response in responses])
    lengths = np.array([len(response) for response in responses])
    return ResponsePasses.cheapest(token_ids, lengths, np.array(prompt_of), prompt_tokens, cost)


def cuts_of(passes):
    return [(part.start, part.stop, part.responses.tolist()) for part in passes.passes]


def test_passes_by_hand():
    """Three tokens are all responses'; the third says what the first says, the last ends early."""
    responses = [[1, 2, 3, 5, 8], [1, 2, 3, 6, 7, 8], [1, 2, 3, 5, 8], [1, 2, 3, 9]]
    passes = cheapest(responses, [0, 0, 0, 0], 4, PassCost(each=2, token_before=0))
    first, second = passes.passes
    # Columns 0 to 2 are the last response's all; behind them 5 (of the first and the third) and 6 7 are left.
    assert (first.start, first.stop, len(first.responses)) == (0, 3, 1)
    assert (second.start, second.stop, len(second.responses)) == (3, 5, 2)
    assert first.rows_before.tolist() == [0]
    assert second.rows_before.tolist() == [0, 0]
    assert sorted(second.responses.tolist()) in ([0, 1], [1, 2])
    # The first tokens, by the prompt; then three each by the first pass, by the second one, two and one.
    assert passes.first.states.tolist() == [0, 0, 0, 0]
    assert sorted(passes.first.places.tolist()) == [0, 6, 12, 18]
    assert len(first.scored.places) == 12
    assert sorted(second.scored.places.tolist()) == [4, 10, 11, 16]


def test_a_pass_that_costs_more_than_it_saves_is_not_made():
    responses = [[1, 2, 3, token, 5, 6] for token in range(8)]
    assert cuts_of(cheapest(responses, [0] * 8, 4, PassCost(100, 0))) == [(0, 5, list(range(8)))]
    # 21 of 40 tokens are saved; two tokens are copied for each of the rows besides the prompt's four.
    assert len(cheapest(responses, [0] * 8, 4, PassCost(20, 0)).passes) == 2
    assert len(cheapest(responses, [0] * 8, 4, PassCost(21, 0)).passes) == 1
    assert len(cheapest(responses, [0] * 8, 4, PassCost(0, 1)).passes) == 1


def test_what_two_prompts_have_in_common_is_not():
    passes = cheapest([[1, 2, 3]] * 4, [0, 0, 1, 1], 4, FREE)
    (only,) = passes.passes
    assert only.rows_before.tolist() == [0, 1]
    assert len(only.responses) == 2


def test_responses_of_a_single_token_run_nothing():
    assert cheapest([[3], [4]], [0, 0], 4, FREE).passes == ()
    assert ResponsePasses.whole(np.array([0, 0]), 1).passes == ()


batches = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=6)), min_size=1, max_size=9
).map(lambda drawn: sorted(drawn, key=lambda pair: pair[0]))


@given(batch=batches, each=st.sampled_from([0.0, 0.1, 1.0, 3.0, 100.0]), before=st.sampled_from([0.0, 0.1, 1.0, 2.0]))
@settings(deadline=None)
def test_every_token_is_predicted_by_what_stands_before_it(batch, each, before):
    """By following the rows of the passes back to their prompts."""
    prompt_of, responses = zip(*batch, strict=True)
    width = max(map(len, responses))
    passes = cheapest(responses, prompt_of, 3, PassCost(each, before))
    rows = [(prompt,) for prompt in range(3)]
    known = {}

    def note(states, scored):
        for state, place in zip(scored.states.tolist(), scored.places.tolist(), strict=True):
            assert place not in known
            known[place] = states[state]

    note(rows, passes.first)
    for part in passes.passes:
        run = [responses[response][part.start : part.stop] for response in part.responses]
        before_it = [rows[row] for row in part.rows_before]
        padded = [tokens + [-1] * (part.stop - part.start - len(tokens)) for tokens in run]
        states = [
            (*past, *tokens[: n + 1])
            for past, tokens in zip(before_it, padded, strict=True)
            for n in range(part.stop - part.start)
        ]
        note(states, part.scored)
        rows = [(*past, *tokens) for past, tokens in zip(before_it, padded, strict=True)]
        assert len(set(rows)) == len(rows)
    expected = {
        number * width + column: (prompt, *tokens[:column])
        for number, (prompt, tokens) in enumerate(batch)
        for column in range(len(tokens))
    }
    assert known == expected


@given(batch=batches, each=st.sampled_from([0.0, 0.5, 2.0, 9.0]), before=st.sampled_from([0.0, 0.1, 0.5, 2.0]))
@settings(deadline=None)
def test_no_cuts_cost_less(batch, each, before):
    """Of all ways to cut, rows counted as sets of what they run; a cut where nothing parts or ends is never better."""
    prompt_of, responses = zip(*batch, strict=True)
    most = max(map(len, responses)) - 1

    @functools.cache
    def rows(start, stop):
        run = {(p, tuple(r[:-1][:stop])) for p, r in batch if len(r) - 1 > start}
        return sum(not any(a != b and a[0] == b[0] and b[1][: len(a[1])] == a[1] for b in run) for a in run)

    def price(cuts):
        return sum(each + rows(a, b) * (b - a + before * (3 + a)) for a, b in itertools.pairwise(cuts))

    found = cheapest(responses, prompt_of, 3, PassCost(each, before))
    chosen = [part.start for part in found.passes] + [most] * bool(found.passes)
    assert [len(part.responses) for part in found.passes] == [rows(p.start, p.stop) for p in found.passes]
    ways = [[0, *inner, most] for n in range(most) for inner in itertools.combinations(range(1, most), n)]
    assert price(chosen) == pytest.approx(min(map(price, ways), default=0))


def test_many_lengths_are_cut_at_a_few():
    random = np.random.default_rng(0)
    lengths = random.integers(2, 2000, size=200)
    responses = [random.integers(0, 50, size=length).tolist() for length in lengths]
    passes = cheapest(responses, [0] * 200, 10, PassCost(1, 0))
    run = sum(len(part.responses) * (part.stop - part.start) for part in passes.passes)
    assert run < 1.1 * sum(lengths)
    assert len(passes.passes) <= 24


def test_rows_that_are_all_there_are_not_copied():
    tensor = torch.arange(6.0).view(3, 2)
    assert take_rows(tensor, np.arange(3)) is tensor
    assert torch.equal(take_rows(tensor, np.array([2, 2])), tensor[[2, 2]])
    assert torch.equal(take_rows(tensor, np.arange(2)), tensor[:2])


# ---- the model's answer

START = list(range(20, 40))
PROMPTS = {
    "mixed": [[7, 8, 9, 12], [10, 11]],
    "equal": [[5, 6, 7], [8, 9, 10]],
    "a start in common": [[*START, 7, 8, 9], [*START, 10]],
}
RESPONSES = [
    [3, 4, 5, 6, 7, 1],
    [3, 4, 5, 9, 1],
    [3, 4, 5, 6, 7, 1],
    [3, 4, 8, 9, 10, 11, 12, 13, 1],
    [3, 4, 1],
    [13, 1],
    [3, 4, 5, 6, 7, 8, 1],
]
SIZES = [4, 3]


def batch_of(policy, prompts, *, share):
    width = max(map(len, RESPONSES))
    token_ids = torch.tensor([response + [2] * (width - len(response)) for response in RESPONSES])
    longest = max(map(len, prompts))
    passes = cheapest(RESPONSES, [0] * SIZES[0] + [1] * SIZES[1], longest, FREE) if share else None
    return ResponseBatch(policy, prompts, token_ids, 0.9, share, SIZES, passes)


def answer(policy, batch, backward):
    """Log-probs, entropies and gradient of a weighted sum over the tokens of the responses."""
    inside = torch.arange(batch.token_ids.shape[1]) < torch.tensor(list(map(len, RESPONSES)))[:, None]
    weights = torch.randn(inside.shape, generator=torch.Generator().manual_seed(2)).where(inside, 0.0)
    policy.model.zero_grad()
    if backward:
        ones = torch.ones_like(weights)
        masks = SegmentMasks(inside & (weights > 0), inside & (weights <= 0))
        loss = functools.partial(segment_objective, old_log_probs=-ones, advantages=weights, masks=masks, clip=9.0)
        _, scores = batch.backward(loss)
    else:
        scores = batch.scores()
        (scores.log_probs * weights).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    return scores.log_probs.detach() * inside, scores.entropy * inside, gradient


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_nobody_can_tell(architecture, prompts, recompute, chunks, backward, monkeypatch):
    if chunks:
        set_chunk_of(monkeypatch, 5, 61)
    policy = random_policy(architecture, recompute=recompute)
    batch = batch_of(policy, prompts, share=True)
    assert len(batch.passes.passes) > 2
    found, expected = (answer(policy, batch_of(policy, prompts, share=share), backward) for share in (True, False))
    for value, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(value, other, atol=2e-5, rtol=1e-4)
    assert float(expected[2].norm()) > 0
    assert float((found[2] - expected[2]).norm() / expected[2].norm()) < 1e-5


def test_what_is_not_run_has_no_score():
    policy = random_policy("llama", recompute=False)
    scores = batch_of(policy, PROMPTS["mixed"], share=True).scores()
    behind = torch.arange(9) >= torch.tensor(list(map(len, RESPONSES)))[:, None]
    assert bool((scores.log_probs[behind] == 0).all())
    assert bool((scores.log_probs[~behind] < 0).all())
    assert bool((scores.entropy[behind] == 0).all())


def test_only_what_is_needed_is_run(monkeypatch):
    policy = random_policy("llama", recompute=False)
    shapes, forward = [], policy.model.model.forward

    def counted(**inputs):
        shapes.append(tuple(inputs["input_ids"].shape))
        return forward(**inputs)

    monkeypatch.setattr(policy.model.model, "forward", counted)
    batch_of(policy, PROMPTS["equal"], share=True).scores()
    prompts, *passes = shapes
    assert prompts == (2, 3)
    beginnings = {
        (prompt, tuple(response[: n + 1]))
        for prompt, response in zip([0] * 4 + [1] * 3, RESPONSES, strict=True)
        for n in range(len(response) - 1)
    }
    assert sum(rows * tokens for rows, tokens in passes) == len(beginnings)


def test_the_update_runs_beginnings_once(monkeypatch):
    """Eight responses of 60 tokens that part behind the fiftieth are 50 tokens and 8 times 9, not 8 times 59."""
    run = compose_run("demo", ["rollout.group_size=8", "trainer.minibatches=1"]).run
    token_ids = torch.cat([torch.full((8, 50), 7), torch.arange(10, 18)[:, None].expand(8, 10)], dim=1)
    lengths, zeros = torch.full((8,), 60), torch.zeros(8)
    samples = Samples([[5, 6]], token_ids, lengths, zeros[:, None].expand(8, 60), lengths > 0, zeros)
    policy = random_policy("llama", recompute=False)
    [microbatch] = microbatches_of(samples, [0], run)
    _, responses = responses_of(policy, samples, microbatch, run)
    shapes = []
    hook = policy.model.model.register_forward_pre_hook(
        lambda module, args, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    log_probs = responses.scores().log_probs
    hook.remove()
    assert shapes == [(1, 2), (1, 50), (8, 9)]
    plain = dataclasses.replace(responses, share_prompts=False, passes=None).scores().log_probs
    torch.testing.assert_close(log_probs, plain, atol=2e-5, rtol=1e-4)


# ---- memory


SHAPES = {
    "plain heads": ("llama", {"num_attention_heads": 4}),
    # As Qwen3's small models: wide heads, of which several share keys and values.
    "wide heads": ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}),
    "as Gemma 7B's": ("gemma", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 22}),
}


def shapes_alone(kind, device, dtype, recompute, monkeypatch):
    monkeypatch.setattr(footprints, "choose_device", lambda name: torch.device(device))
    keys = [f"model.gradient_checkpointing={recompute}", f"model.compute_dtype={dtype}"]
    run = compose_run("demo", ["model.path=somewhere", "rollout.max_prompt_tokens=512", *keys]).run
    architecture, heads = SHAPES[kind]
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, **heads}
    return run, footprints._fake_policy(run, AutoConfig.for_model(architecture, vocab_size=300, **shape))


def needed(policy, batch, live):
    before = live.start()
    footprints.update_pass(batch)
    need = live.most - before
    for parameter in policy.trained_parameters():
        parameter.grad = None
    return need


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_token_before_a_row_needs_no_more_than_it_costs(kind, device, dtype, recompute, monkeypatch):
    """Beside a token that is run; of what is estimated by shapes."""
    run, policy = shapes_alone(kind, device, dtype, recompute, monkeypatch)
    rows, need = 32, []
    with FakeTensorMode(), footprints._AllocationCounter() as live:
        footprints._allocate_on_cpu(policy.model)
        for prompt, response in ((100, 100), (200, 100), (100, 200)):
            microbatch = footprints.LargestMicrobatch(prompt, response, [rows])
            need.append(needed(policy, footprints.responses_of(policy, microbatch, run), live))
    least, before, more_run = need
    assert least < before < more_run
    assert before - least <= pass_cost(torch.device(device), run).token_before * (more_run - least)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("prompt", "chunks"), [(4, False), (60, True)])
@pytest.mark.parametrize(
    ("kind", "device", "dtype"), [("plain heads", "cpu", "float32"), ("wide heads", "cuda", "bfloat16")]
)
def test_the_passes_need_no_more_memory_than_one_would(kind, device, dtype, prompt, chunks, recompute, monkeypatch):
    """Of what is estimated by shapes, for responses that part and end at many places."""
    if chunks:
        set_chunk_of(monkeypatch, 512, 300)
    run, policy = shapes_alone(kind, device, dtype, recompute, monkeypatch)
    # A GPU's pass costs as much as more tokens than there are here.
    cost = dataclasses.replace(pass_cost(torch.device(device), run), each=128)
    random, groups, several = np.random.default_rng(0), 6, 0
    with FakeTensorMode(), footprints._AllocationCounter() as live:
        footprints._allocate_on_cpu(policy.model)
        # Responses of any length, or nearly all of them short.
        for alike, (longest, share) in itertools.product([4, 40], [(120, 1), (200, 0.1)]):
            lengths = random.integers(2, longest, size=8 * groups)
            lengths = np.where(random.random(len(lengths)) < share, lengths, 10)
            lengths[0] = longest
            responses = [
                [1] * min(alike, length) + random.integers(0, 3, size=max(0, length - alike)).tolist()
                for length in lengths
            ]
            passes = cheapest(responses, np.repeat(np.arange(groups), 8).tolist(), prompt, cost)
            several += len(passes.passes) > 1
            need = []
            for way in (passes, None):
                microbatch = footprints.LargestMicrobatch(prompt, longest, [8] * groups)
                batch = dataclasses.replace(footprints.responses_of(policy, microbatch, run), passes=way)
                need.append(needed(policy, batch, live))
            assert need[0] <= 1.02 * need[1]
    assert several >= (1 if recompute else 4)  # a layer that runs again keeps little else than keys and values
