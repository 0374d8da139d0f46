"""``examples/trl_coca.py`` in TRL's own environment (``make test-trl``): advantages, loss, rewards, and a training."""

import functools
import importlib.util
import math
import shutil
import statistics
import sys
from pathlib import Path

import pytest
import torch

trl = pytest.importorskip("trl", reason="TRL has an environment of its own: run `make test-trl`")

from coca_mindspeed import parse_response, segment_objective  # noqa: E402
from coca_mindspeed.config.compose import compose_run  # noqa: E402
from coca_mindspeed.errors import CocaError  # noqa: E402
from coca_mindspeed.local.setup import warm_start  # noqa: E402
from coca_mindspeed.local.validation import load_data  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_coca.py"
spec = importlib.util.spec_from_file_location("trl_coca", EXAMPLE)
example = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = example
spec.loader.exec_module(example)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The demo's warm start."""
    torch.set_num_threads(1)
    config = compose_run("demo").run
    records, _ = load_data(config.data)
    return warm_start(config, tmp_path_factory.mktemp("demo"), records, torch.device("cpu"), show_progress=False)


def trainer_of(model, tmp_path):
    trainer = example.demo_trainer(model, tmp_path / "trl", 2)
    trainer.model.train()
    return trainer


def questions(trainer, prompts, group=8):
    """Rows as TRL's sampler gives them: each prompt ``group`` times, one after the other."""
    return [row for row in trainer.train_dataset.select(range(prompts)) for _ in range(group)]


def test_the_installed_trl_is_known_and_a_changed_one_is_refused(tmp_path):
    example.check_trl()
    packages = Path(trl.__file__).parents[1]
    source = packages / "trl" / "trainer" / "grpo_trainer.py"
    target = tmp_path / "trl" / "trainer" / "grpo_trainer.py"
    target.parent.mkdir(parents=True)
    shutil.copy(source, target)
    example.check_trl(tmp_path)
    for name in example.FINGERPRINTS:
        [before, after] = source.read_text(encoding="utf-8").split(f"    def {name}(", 1)
        changed = after.replace(":\n        ", ":\n        pass\n        ", 1)
        target.write_text(f"{before}    def {name}({changed}", encoding="utf-8")
        with pytest.raises(CocaError, match=name):
            example.check_trl(tmp_path)


def test_advantages_by_hand(model, tmp_path):
    trainer = trainer_of(model, tmp_path)
    rows = questions(trainer, 6)
    output = trainer._generate_and_score_completions(rows)
    ids, mask, advantages = output["completion_ids"], output["completion_mask"].bool(), output["advantages"]
    assert advantages.shape == ids.shape
    assert not advantages[~mask].any()
    lengths = mask.sum(dim=1)
    texts = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
    parsed = [parse_response(text, decimals=2) for text in texts]
    different = 0
    for start in range(0, len(rows), 8):
        group = range(start, start + 8)
        right = [float(parsed[i].answer.strip() == rows[i]["answer"]) for i in group]
        gesr = statistics.fmean(right)
        stated = [parsed[i].confidence for i in group]
        brier = [-1.0 if s is None else -((s - gesr) ** 2) for s in stated]
        for rewards, column in ((brier, 0), (right, -1)):
            spread = statistics.stdev(rewards)
            for i, reward in zip(group, rewards, strict=True):
                expected = (reward - statistics.fmean(rewards)) / (spread + 0.05) if spread > 1e-9 else 0.0
                token = 0 if column == 0 else int(lengths[i]) - 1
                assert float(advantages[i, token]) == pytest.approx(expected, abs=1e-5)
                different += expected != 0
    assert different > 16


def test_the_loss_of_trl_is_the_papers(model, tmp_path):
    trainer = trainer_of(model, tmp_path)
    batch = trainer._generate_and_score_completions(questions(trainer, 8))
    mask, width = batch["completion_mask"].bool(), batch["completion_ids"].shape[1]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    log_probs = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, width)[0]
    # Old log-probs on both sides of the clip.
    noise = 0.3 * torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(0))
    batch["old_per_token_logps"] = log_probs.detach() + noise
    first = torch.arange(width) < 6
    masks = {"confidence": mask & first, "answer": mask & ~first}
    ours = segment_objective(log_probs, batch["old_per_token_logps"], batch["advantages"], masks, clip=0.2).loss
    trainer.model.eval()  # outside of train(), TRL knows no accumulation; the model has no dropout
    loss = trainer._compute_loss(trainer.model, batch)
    assert loss.item() == pytest.approx(ours.item(), rel=1e-5)
    assert abs(loss.item()) > 1e-3
    parameters = list(trainer.model.parameters())
    for a, b in zip(torch.autograd.grad(ours, parameters), torch.autograd.grad(loss, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_ungradable_answers_take_no_part(model, tmp_path):
    trainer = trainer_of(model, tmp_path)
    rows = questions(trainer, 2)
    asked = iter([None, *[True, False] * 7, True])
    trainer.reward_funcs[0] = example.correctness(lambda *_: next(asked), decimals=2)
    output = trainer._generate_and_score_completions(rows)
    assert not output["advantages"][0].any()
    assert output["advantages"][1:8].any()
    assert trainer._metrics["train"]["grading/ungradable_share"] == [1 / 16]
    trainer.reward_funcs[0] = lambda completions, **_: [0.5] * len(completions)
    with pytest.raises(ValueError, match="None, found"):
        trainer._generate_and_score_completions(rows)


def test_two_reward_functions_are_refused(model, tmp_path, monkeypatch):
    made = example.CocaTrainer
    monkeypatch.setattr(example, "CocaTrainer", lambda **given: made(**(given | {"reward_funcs": [len, sum]})))
    with pytest.raises(ValueError, match="reward_funcs"):
        example.demo_trainer(model, tmp_path, 1)


GOLD = ["4", "4", "4", "4"]
FIRST = ["<confidence>0.50</confidence>4", "<confidence>0.90</confidence>5", "4", "<confidence>1.00</confidence>?"]
LAST = ["4<confidence>0.50</confidence>", "5<confidence>0.90</confidence>", "4", "?<confidence>1.00</confidence>"]


def is_right(answer, gold):
    return None if answer == "?" else answer == gold


@pytest.mark.parametrize("conversation", [False, True])
def test_rewards_by_hand(conversation):
    def completions(texts):
        return [[{"role": "assistant", "content": text}] if conversation else text for text in texts]

    first = example.correctness(is_right, decimals=2)
    last = example.correctness(is_right, position="last", decimals=2)
    assert first(completions=completions(FIRST), answer=GOLD) == [1.0, 0.0, 1.0, None]
    rlcr = example.rlcr_reward(last, decimals=2)(completions=completions(LAST), answer=GOLD)
    assert rlcr == pytest.approx([1 - 0.25, -0.81, 1 - 1, None])
    # Two of the three gradable answers are right.
    confidence, answer = example.coca_rewards(first, 4, decimals=2)
    found = confidence(completions=completions(FIRST), answer=GOLD)
    assert found == pytest.approx([-((0.5 - 2 / 3) ** 2), -((0.9 - 2 / 3) ** 2), -1.0, None])
    assert answer(completions=completions(FIRST), answer=GOLD) == [1.0, 0.0, 1.0, None]
    with pytest.raises(ValueError, match="groups of 3"):
        example.coca_rewards(first, 3)[0](completions=completions(FIRST), answer=GOLD)


@pytest.mark.parametrize("method", ["rlcr", "coca"])
def test_the_rewards_train_in_trls_own_trainer(model, tmp_path, monkeypatch, method):
    rewards = {
        "rlcr": lambda correct: example.rlcr_reward(correct, decimals=2),
        "coca": lambda correct: example.coca_rewards(correct, 8, decimals=2),
    }[method]

    def plain(*, coca, reward_funcs, **given):
        return trl.GRPOTrainer(reward_funcs=rewards(reward_funcs), **given)

    monkeypatch.setattr(example, "CocaTrainer", plain)
    trainer = example.demo_trainer(model, tmp_path / "trl", 1)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    logged = functools.reduce(lambda a, b: a | b, trainer.state.log_history)
    names = {key for key in logged if key.startswith("rewards/") and key.endswith("/mean")}
    expected = {"rlcr": ["rlcr"], "coca": ["coca_confidence", "coca_answer"]}[method]
    assert names == {f"rewards/{name}/mean" for name in expected}
    assert all(math.isfinite(logged[name]) for name in names)


def test_it_learns_calibration(model, tmp_path):
    trainer = example.demo_trainer(model, tmp_path / "trl", 40)
    before = example.evaluated(trainer)
    trainer.train()
    after = example.evaluated(trainer)
    assert before["ece"] > 0.4
    assert after["ece"] < before["ece"] / 2
    assert after["accuracy"] > before["accuracy"] - 0.05
    assert after["invalid_share"] < 0.02
