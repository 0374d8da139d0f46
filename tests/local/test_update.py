"""The update of a policy on judged responses: what it says of them, and that its parts add up."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import ModelConfig, TrainerConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.respond import respond
from coca_mindspeed.local.schedule import generator
from coca_mindspeed.local.update import ResponseBatch, largest_group_sizes, microbatches, update_policy
from coca_mindspeed.scoring.responses import ResponseScorer
from tests.local.models_for_tests import Kept, random_policy, set_chunk_of, write_random_model
from tests.local.runs_for_tests import small_session


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return small_session(tmp_path_factory.mktemp("session") / "run")


@pytest.fixture(scope="module")
def rollout(session):
    trainer, config = session.trainer, session.trainer.config
    policy, asked, size = trainer.policy, trainer.records[:8], config.rollout.group_size
    draw = generator(policy.device, 0, "test")
    sampled = respond(policy, asked, config.method.system_prompt, config.rollout, draw, size)
    graded = ResponseScorer(config.method, policy.text, trainer.grader)(sampled, asked)
    return sampled, graded.give_credit(CreditRule(config.method, 0), size)


def updated(session, rollout, aggregation="sum", **trainer_settings):
    """Weights and metrics after one update by plain descent, in which a gradient shows as it is."""
    trainer = session.trainer
    settings = trainer.config.trainer.model_copy(update={"minibatches": 1, **trainer_settings})
    config = trainer.config.model_copy(update={"trainer": settings})
    config = config.model_copy(update={"method": replace(config.method, loss_aggregation=aggregation)})
    before = copy.deepcopy(trainer.policy.model.state_dict())
    optimizer = torch.optim.SGD(trainer.policy.model.parameters(), lr=1.0)
    metrics = update_policy(trainer.policy, *rollout, optimizer, 1.0, config)
    after = torch.cat([p.detach().flatten() for p in trainer.policy.model.parameters()])
    trainer.policy.model.load_state_dict(before)
    return after, metrics


def test_entropy_of_each_segment_is_that_of_the_sampler(session, rollout):
    """Before its first update the policy is the one that sampled, so both segments' sums add up to the sampler's."""
    _, metrics = updated(session, rollout)
    sampled, credited = rollout
    masks = credited.masks
    total = sum(metrics[f"{name}/entropy"] * float(mask.sum()) for name, mask in masks.items())
    assert metrics["confidence/entropy"] != pytest.approx(metrics["answer/entropy"], rel=1e-3)
    assert total == pytest.approx(float((sampled.entropy * sampled.lengths).sum()), rel=1e-4)


@pytest.fixture(scope="module")
def mixed(session, rollout):
    """The same responses, told to prompts of several lengths."""
    sampled, credited = rollout
    group = credited.credit.group_size
    prompts = [prompt[: 4 + row // group % 3] for row, prompt in enumerate(sampled.prompts)]
    return replace(sampled, prompts=prompts), credited


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("aggregation", ["sum", "token_mean", "segment_mean"])
def test_microbatches_and_chunks_of_logits_make_the_same_update(
    session, mixed, aggregation, share_prompts, monkeypatch
):
    whole, expected = updated(session, mixed, aggregation, share_prompts=share_prompts)
    moved = float((whole - torch.cat([p.detach().flatten() for p in session.trainer.policy.model.parameters()])).norm())
    assert moved > 0
    by_tokens = [{"microbatch_tokens": n, "microbatch_prompts": None} for n in (1, 45, 10**9)]
    for split in (*by_tokens, {"microbatch_prompts": 3}):
        weights, metrics = updated(session, mixed, aggregation, share_prompts=share_prompts, **split)
        assert float((weights - whole).norm()) < 1e-5 * moved
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    set_chunk_of(monkeypatch, 100, session.trainer.policy.model.config.vocab_size)
    assert not session.trainer.policy.lm_head.fits_one_chunk(101)
    weights, metrics = updated(session, mixed, aggregation, share_prompts=share_prompts)
    assert float((weights - whole).norm()) < 1e-5 * moved
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("group_sizes", [None, [5], [2, 2, 1], [2, 2]])
def test_groups_that_do_not_fit_the_prompts_and_rows_are_refused(session, group_sizes):
    prompts, token_ids = [[5, 6], [7]], torch.ones(5, 3, dtype=torch.int64)
    batch = ResponseBatch(session.trainer.policy, prompts, token_ids, temperature=1.0, group_sizes=group_sizes)
    with pytest.raises(ValueError, match="2 prompts and 5 rows"):
        batch.scores()


@pytest.mark.parametrize("sharing", ["prefix", "none"])
def test_no_pass_has_more_tokens_than_a_microbatch(session, mixed, monkeypatch, sharing):
    """Without sharing, a prompt is run once for each of its responses, which a microbatch counts."""
    policy, sizes, most = session.trainer.policy, [], 60
    monkeypatch.setattr(policy, "sharing", sharing)

    def count(module, arguments, keywords):
        sizes[-1] += keywords["input_ids"].numel()

    class Counted(ResponseBatch):
        def backward(self, *arguments):
            sizes.append(0)
            return super().backward(*arguments)

    monkeypatch.setattr("coca_mindspeed.local.update.ResponseBatch", Counted)
    hook = policy.model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    updated(session, mixed, microbatch_tokens=most, microbatch_prompts=None)
    hook.remove()
    assert len(sizes) > 2
    assert max(sizes) <= most


def test_microbatches_of_whole_prompts():
    config = TrainerConfig(microbatch_prompts=2)
    assert microbatches([0, 2, 3], 2, [1] * 8, [1] * 4, config) == [[0, 1, 4, 5], [6, 7]]


def _tokens_of(rows, group, lengths, prompt_lengths, share_prompts):
    owners = [row // group for row in rows]
    prompts = len(set(owners)) if share_prompts else len(rows)
    return prompts * max(prompt_lengths[p] for p in owners) + len(rows) * max(lengths[row] for row in rows)


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_microbatches_hold_every_row_once_and_no_more_than_asked(seed, share_prompts):
    """Nor more than the largest microbatch of responses and prompts of this length, by which memory is planned."""
    random = np.random.default_rng(seed)
    group, prompts = int(random.integers(1, 9)), sorted(random.permutation(12)[: 7 + seed % 6].tolist())
    limit, lengths = int(random.integers(50, 3000)), random.integers(1, 400, size=12 * group).tolist()
    prompt_lengths = random.integers(1, 200, size=12).tolist()
    config = TrainerConfig(microbatch_tokens=limit, share_prompts=share_prompts)
    parts = microbatches(prompts, group, lengths, prompt_lengths, config)
    assert sorted(row for rows in parts for row in rows) == [p * group + g for p in prompts for g in range(group)]
    for rows in parts:
        assert rows == sorted(rows)
        assert len(rows) == 1 or _tokens_of(rows, group, lengths, prompt_lengths, share_prompts) <= limit
        longest, prompt = max(lengths[row] for row in rows), max(prompt_lengths[row // group] for row in rows)
        sizes = largest_group_sizes(len(prompts), group, longest, prompt, config)
        most, copies = sum(sizes), len(sizes) if share_prompts else sum(sizes)
        assert len(rows) <= most
        assert most == 1 or most * longest + copies * prompt <= limit


def test_long_responses_are_hardly_padded():
    """Lengths as a model's, from tens to thousands of tokens; group by group every second token would be padding."""
    random = np.random.default_rng(0)
    group, prompts = 16, range(32)
    lengths = np.clip(random.lognormal(7, 0.7, size=512), 1, 4096).astype(int).tolist()
    prompt_lengths = random.integers(100, 200, size=32).tolist()
    config = TrainerConfig(microbatch_tokens=32_768)
    parts = microbatches(prompts, group, lengths, prompt_lengths, config)
    needed = sum(lengths) + sum(prompt_lengths)
    assert sum(_tokens_of(rows, group, lengths, prompt_lengths, True) for rows in parts) < 1.15 * needed


def test_two_kinds_of_microbatches_are_refused():
    with pytest.raises(ConfigError, match="microbatch_tokens=90"):
        compose_run("demo", ["trainer.microbatch_tokens=90", "trainer.microbatch_prompts=2"])


def kept_and_gradient(policy, prompts, share_prompts):
    """Numbers that the forward pass keeps besides the parameters, and the gradient."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(2, 61, (6, 10), generator=generator)
    weights = torch.randn(6, 10, generator=generator)
    kept = Kept(policy.model)
    with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
        scores = ResponseBatch(policy, prompts, token_ids, 0.9, share_prompts).scores()
    (scores.log_probs * weights).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    return sum(kept.sizes.values()), scores.log_probs.detach(), gradient


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "gpt_neox"])
def test_less_is_kept_for_the_same_gradient(architecture, share_prompts):
    prompts = [[7, 8, 9, 12], [10, 11]]
    kept, log_probs, gradient = kept_and_gradient(random_policy(architecture, recompute=False), prompts, share_prompts)
    less, again, same = kept_and_gradient(random_policy(architecture, recompute=True), prompts, share_prompts)
    assert torch.equal(again, log_probs)
    assert float(gradient.norm()) > 0
    assert float((same - gradient).norm() / gradient.norm()) < 1e-6
    assert less < 0.5 * kept


def test_a_model_without_such_layers_is_refused(tmp_path, monkeypatch):
    path = write_random_model(tmp_path / "model", "llama")
    monkeypatch.setattr("coca_mindspeed.local.load.GradientCheckpointingLayer", torch.nn.Conv3d)
    with pytest.raises(ConfigError, match=r"model\.path=.*LlamaForCausalLM"):
        load_policy(path, ModelConfig(gradient_checkpointing=True), torch.device("cpu"))
