"""MindSpeed-RL's own rollout engine and weight resharding (vLLM, CPU build, patched), held against transformers.

Nothing here shows anything of vLLM-Ascend, offloading, bfloat16 or an NPU.
"""

import json
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.mindspeed.start import driver
from coca_mindspeed.mindspeed.start.process import VARIABLE
from tests.integration.mindspeed import tiny
from tests.integration.mindspeed.environment import run_ranks
from tests.integration.mindspeed_vllm.environment import INSTALLED, needs_vllm
from tests.integration.mindspeed_vllm.models import NEW_TOKENS, ROLLOUTS

pytestmark = [*needs_vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Layout:
    """A model, how it is cut in training and in rollouts, and which ranks make up one rollout engine."""

    model: str
    ranks: int = 1
    actor: dict[str, int] = field(default_factory=dict)
    rollout_tp: int = 1

    @property
    def engines(self):
        ranks = range(self.ranks)
        return [list(ranks[first : first + self.rollout_tp]) for first in ranks[:: self.rollout_tp]]


TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
LAYOUTS = {
    "tied Qwen2 at TP1": Layout("tied Qwen2"),
    "Llama 3 at TP1": Layout("Llama 3"),
    "tied Qwen2, TP2 to TP2": Layout("tied Qwen2", 2, TP2, rollout_tp=2),
    "Qwen2, TP2 to TP1": Layout("Qwen2", 2, TP2),
    "tied Qwen2, PP2 to TP1": Layout("tied Qwen2", 2, PP2),
    "tied Qwen2, DP2": Layout("tied Qwen2", 2),
    "Llama 3, TP2 to TP2": Layout("Llama 3", 2, TP2, rollout_tp=2),
    "Llama 3, DP2 to TP2": Layout("Llama 3", 2, rollout_tp=2),  # each cut for a rollout, from a whole
}


@dataclass(frozen=True)
class Found:
    """What the ranks of one layout wrote, and what transformers says with the weights of before and after the step."""

    layout: Layout
    prompts: list[list[int]]
    ranks: list[dict[str, torch.Tensor]]
    model: Any
    greedy: dict[str, tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request, folder_of, tmp_path_factory):
    layout = LAYOUTS[request.param]
    folder, directory = folder_of(layout.model, warm=False), tmp_path_factory.mktemp("rollout")
    config = tiny.configuration(
        folder,
        actor_config=layout.actor,
        rl_config={"actor_resource": {"num_npus": layout.ranks}},
        generate_config={"infer_tensor_parallel_size": layout.rollout_tp},
        coca={"rollout": "vllm"},
    )
    settings, config = driver.split_config(OmegaConf.create(config))
    process = driver.process_settings_of(settings, config, driver.find_checkouts({**os.environ, **INSTALLED.home}))
    tokenizer = tiny.tiny_tokenizer(tiny.VOCABULARY_OF_64)
    prompts = [tokenizer.encode(f"{record.question}=") for record in arithmetic_records(8, "evaluate", 0)]
    job = directory / "job.json"
    job.write_text(json.dumps({"config": OmegaConf.to_container(config), "prompts": prompts, "output": str(directory)}))
    module = "tests.integration.mindspeed_vllm.rollout_rank"
    variables = {**INSTALLED.home, VARIABLE: process.model_dump_json()}
    run_ranks(module, job, layout.ranks, directory / "log", timeout=1500, **variables)
    before = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    after = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    after.load_state_dict(load_file(directory / "trained"))
    ranks = range(layout.ranks)
    return Found(
        layout,
        prompts,
        [load_file(directory / f"found{rank}") for rank in ranks],
        before,
        {"before": _greedy(before, prompts), "after": _greedy(after, prompts)},
    )


@torch.no_grad()
def _greedy(model, prompts):
    """Transformers' greedy responses, padded with the end of text, and their log-probabilities, padded with 0."""
    eos = model.config.eos_token_id
    ids, log_probs = torch.full((len(prompts), NEW_TOKENS), eos), torch.zeros(len(prompts), NEW_TOKENS)
    for row, prompt in enumerate(prompts):
        text = list(prompt)
        for position in range(NEW_TOKENS):
            distribution = model(input_ids=torch.tensor([text])).logits[0, -1].log_softmax(-1)
            log_probs[row, position], ids[row, position] = distribution.max(-1)
            text.append(int(ids[row, position]))
            if text[-1] == eos:
                break
    return ids, log_probs


def _agrees(found, rollout, model):
    """Whether every rank's greedy tokens are transformers', with the same log-probabilities to 1e-4."""
    ids, log_probs = found.greedy[model]
    return all(
        torch.equal(rank[f"{rollout}/ids"], ids)
        and torch.allclose(rank[f"{rollout}/log_probs"], log_probs, rtol=0, atol=1e-4)
        for rank in found.ranks
    )


@pytest.mark.parametrize("when", ["before", "after"])
def test_greedy_tokens_and_log_probs_are_those_of_transformers(found, when):
    assert all(float(rank["grad_norm"]) > 0 for rank in found.ranks)
    assert _agrees(found, when, when)


def test_weights_not_handed_over_or_permuted_are_noticed(found):
    assert _agrees(found, "not handed over", "before")
    assert not _agrees(found, "not handed over", "after")
    assert not _agrees(found, "permuted", "after")


def test_each_rollout_has_its_own_noise_shared_by_an_engines_ranks(found):
    """Upstream's every rollout draws the same; the hook's first tokens come as often as the model says."""
    engines = [engine[0] for engine in found.layout.engines]
    for engine in found.layout.engines:
        for rank in engine[1:]:
            for name in ("hooked/first", "unhooked/first"):
                assert torch.equal(found.ranks[rank][name], found.ranks[engine[0]][name])
    for rank in engines:
        unhooked = found.ranks[rank]["unhooked/first"]
        assert (unhooked == unhooked[0]).all(), "vLLM no longer seeds every rollout alike: the hook can go"
    hooked = torch.cat([found.ranks[rank]["hooked/first"] for rank in engines])
    assert len(torch.unique(hooked, dim=0)) == len(engines) * ROLLOUTS
    for rank in engines[1:]:
        assert torch.equal(found.ranks[rank]["unhooked/first"], found.ranks[0]["unhooked/first"])
    often, always = (_distance(found.model, found.prompts, first) for first in (hooked, unhooked))
    assert often < 0.6 * always


def _distance(model, prompts, first):
    """Mean over prompts of the total variation between how often first tokens come and how often they should."""
    drawn = first.view(len(first), len(prompts), -1).transpose(0, 1).flatten(1)
    distances = []
    for prompt, tokens in zip(prompts, drawn, strict=True):
        with torch.no_grad():
            wanted = model(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)
        often = torch.bincount(tokens, minlength=len(wanted)) / len(tokens)
        distances.append(float((often - wanted).abs().sum() / 2))
    return sum(distances) / len(distances)
