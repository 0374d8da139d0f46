"""The gradient of MindSpeed-RL's real training engine under our loss is that of the local engine.

One mini-batch, sampled by the local engine from the tiny model, with old log-probabilities moved so far that the clip
bites.  The reference is the local engine's own update; the engine under test is Megatron's model in float32, in one
process or two, cut into microbatches in different ways.  It does not show anything about bfloat16 or an NPU.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.verdict import Outcome, Verdict
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.respond import respond
from coca_mindspeed.local.sampler import Rollout
from coca_mindspeed.local.update import update_policy
from coca_mindspeed.mindspeed.stages.dock import ROLLOUT_LOG_PROBS, SEGMENT_ENDS
from coca_mindspeed.mindspeed.start import driver
from coca_mindspeed.mindspeed.start.process import VARIABLE, CocaSettings
from coca_mindspeed.scoring.responses import ResponseScorer
from coca_mindspeed.scoring.rollout import Credited
from tests.integration.mindspeed import tiny
from tests.integration.mindspeed.environment import needs_mindspeed, run_ranks
from tests.support.collectives import differences

pytestmark = [*needs_mindspeed, pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPTS, GROUP = 4, 8
SEGMENTS = ("both", "confidence", "answer")


@dataclass
class Case:
    directory: Path
    policy: Policy
    rollout: Rollout
    credited: dict[str, Credited]


class _EvenIsRight:
    """Right if the answer's digits add up to an even number: an untrained model gets both verdicts in every group."""

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        sums = [sum(map(int, filter(str.isdigit, answer))) for answer in answers]
        return [Verdict(Outcome.WRONG if total % 2 else Outcome.RIGHT) for total in sums]

    def close(self) -> None: ...


class _KeepGradient(torch.optim.SGD):
    """An optimizer that remembers the gradient instead of taking a step."""

    def step(self, closure: Any = None) -> None:
        self.kept = [p.grad.clone() for group in self.param_groups for p in group["params"]]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = tmp_path_factory.mktemp("gradient")
    (directory / "model").mkdir()
    policy = tiny.write_model(directory / "model", warm_up_steps=150)
    tiny.write_questions(directory, train=64)
    run = _run_config("sum")
    generator = torch.Generator().manual_seed(0)
    records = arithmetic_records(PROMPTS, "train", 1)
    rollout = respond(policy, records, run.method.system_prompt, run.rollout, generator, GROUP)
    graded = ResponseScorer(run.method, policy.text, _EvenIsRight())(rollout, records)
    noise = 0.3 * torch.randn(rollout.log_probs.shape, generator=generator)
    both = graded.give_credit(CreditRule(run.method, 0), GROUP)
    parts = {name: torch.where(mask, both.token_advantages, 0.0) for name, mask in both.masks.items()}
    credited = {"both": both, **{name: replace(both, token_advantages=part) for name, part in parts.items()}}
    return Case(directory, policy, replace(rollout, log_probs=rollout.log_probs + noise), credited)


def _run_config(aggregation: str) -> Any:
    return compose_run(
        "demo",
        [
            f"rollout.prompts={PROMPTS}",
            f"rollout.group_size={GROUP}",
            "trainer.minibatches=1",
            "trainer.share_prompts=false",
            "optimizer.grad_clip=1e9",
            f"method.loss_aggregation={aggregation}",
        ],
    ).run


def _reference(case: Case, segment: str, aggregation: str) -> dict[str, torch.Tensor]:
    """The local engine's gradient by Hugging Face name."""
    optimizer = _KeepGradient(case.policy.model.parameters(), lr=0.0)
    update_policy(case.policy, case.rollout, case.credited[segment], optimizer, 0.0, _run_config(aggregation))
    names = [name for name, _ in case.policy.model.named_parameters()]
    return dict(zip(names, optimizer.kept, strict=True))


def _dock_batch(case: Case, segment: str) -> dict[str, torch.Tensor]:
    """The same rollout as MindSpeed-RL's training engine is given it."""
    rollout, credited = case.rollout, case.credited[segment]
    prompts = list(map(torch.tensor, rollout.prompts))
    responses = [row[:n] for row, n in zip(rollout.token_ids, rollout.lengths.tolist(), strict=True)]
    inputs = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    eos = case.policy.eos_ids[0]
    return {
        "input_ids": tiny.padded(inputs, eos),
        "responses": torch.nn.utils.rnn.pad_sequence(responses, batch_first=True, padding_value=eos),
        "prompt_length": torch.tensor([[len(p)] for p in prompts], dtype=torch.int32),
        "response_length": rollout.lengths[:, None].int(),
        "advantages": credited.token_advantages.contiguous(),
        "old_log_prob": rollout.log_probs.contiguous(),
        SEGMENT_ENDS: credited.scored.segment_ends.int(),
        ROLLOUT_LOG_PROBS: rollout.log_probs.clone(),
    }


FLASH = {"use_flash_attn": True}
PACKED: dict[str, dict[str, Any]] = {
    "rl_config": {"use_remove_padding": True},
    "megatron_training": {**FLASH, "reset_attention_mask": True, "no_pad_to_seq_lengths": True},
}
ULYSSES = {"context_parallel_size": 2, "context_parallel_algo": "ulysses_cp_algo"}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one plain batch": (1, "sum", {}),
    "microbatches": (1, "token_mean", {"actor_config": {"micro_batch_size": 8}}),
    "dynamic batch size": (
        1,
        "segment_mean",
        {
            "rl_config": {
                "use_dynamic_bsz": True,
                "update_max_packing_token_size": 96,
                "actor_max_packing_token_size": 96,
            }
        },
    ),
    "packed": (1, "token_mean", PACKED | {"actor_config": {"micro_batch_size": 8}}),
    "TP2": (2, "sum", {"actor_config": {"tensor_model_parallel_size": 2}}),
    "PP2": (2, "token_mean", {"actor_config": {"pipeline_model_parallel_size": 2, "micro_batch_size": 8}}),
    "DP2": (2, "segment_mean", {"actor_config": {"micro_batch_size": 16}}),
    "off-loaded and back": (1, "sum", {"actor_config": {"use_distributed_optimizer": True}}),
    "CP2": (2, "sum", {"actor_config": ULYSSES, "megatron_training": FLASH}),
    "CP2, packed": (
        2,
        "token_mean",
        {
            "actor_config": {**ULYSSES, "micro_batch_size": 8},
            "rl_config": PACKED["rl_config"],
            "megatron_training": {**PACKED["megatron_training"], "attention_mask_type": "general"},
        },
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_is_that_of_the_local_engine(case: Case, layout: str) -> None:
    ranks, aggregation, changes = LAYOUTS[layout]
    output = _engine(case, layout.replace(", ", "_").replace(" ", "_"), ranks, aggregation, changes)
    found = load_file(output)
    assert int(found["reference_models"]) == 0
    assert float(found["rollout_gap"]) < 1e-4
    _assert_ranks_issue_the_same_collectives(output, ranks)
    for segment in SEGMENTS:
        wanted = _reference(case, segment, aggregation)
        total = torch.cat([g.flatten() for g in wanted.values()]).norm()
        assert total > 1e-3, segment
        for name, gradient in wanted.items():
            difference = (found[f"{segment}/{name}"] - gradient).norm() / total
            assert difference < 1e-4, (segment, name, float(difference))


def _engine(case: Case, name: str, ranks: int, aggregation: str, changes: dict[str, dict[str, Any]]) -> Path:
    directory = case.directory / name
    directory.mkdir()
    config = tiny.configuration(case.directory)
    for section, values in {
        "megatron_training": {"global_batch_size": PROMPTS},
        "rl_config": {"mini_batch_size": PROMPTS, "n_samples_per_prompt": GROUP},
    }.items():
        config[section] |= values
    for section, values in changes.items():
        config[section] |= values
    config["rl_config"]["actor_resource"] = {"num_npus": ranks}
    coca = config.pop("coca")
    coca["method"] = coca["method"] | {"loss_aggregation": aggregation}
    settings = driver.process_settings_of(
        CocaSettings.model_validate(coca), OmegaConf.create(config), driver.find_checkouts(os.environ)
    )
    batches = {}
    for segment in SEGMENTS:
        batches[segment] = str(directory / f"{segment}.safetensors")
        save_file(_dock_batch(case, segment), batches[segment])
    job = directory / "job.json"
    output = directory / "found.safetensors"
    prompts = case.rollout.prompts[::GROUP]
    facts = {"config": config, "batches": batches, "prompts": prompts, "output": str(output)}
    job.write_text(json.dumps({**facts, "offload": "off-loaded" in name}))
    run_ranks(
        "tests.integration.mindspeed.engine_rank",
        job,
        ranks,
        directory / "log",
        **{VARIABLE: settings.model_dump_json()},
    )
    return output


def _assert_ranks_issue_the_same_collectives(output: Path, ranks: int) -> None:
    of_ranks = [json.loads(Path(f"{output}.calls.{rank}.json").read_text()) for rank in range(ranks)]
    for segment in SEGMENTS:
        calls = [of_rank[segment] for of_rank in of_ranks]
        assert not differences(calls), segment
        if ranks > 1:
            assert all(any(len(members) > 1 for _, members, _ in own) for own in calls), segment
