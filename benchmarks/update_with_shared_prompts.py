"""Forward and backward of the update with shared prompts against plain forward passes."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.sampler_against_generate import warm_policy
from benchmarks.timing import alternate
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.local.sampler import sample_responses
from coca_mindspeed.local.update import microbatches, responses_of


def run(rounds: int) -> dict[str, float]:
    """Median seconds of both, and their ratio."""
    with tempfile.TemporaryDirectory() as directory:
        policy, prompts = warm_policy(Path(directory), 32)
    rollout = sample_responses(
        policy, prompts, group_size=8, max_new_tokens=16, temperature=1.0, generator=torch.Generator().manual_seed(0)
    )
    inside = torch.arange(rollout.token_ids.shape[1]) < rollout.lengths[:, None]

    def update(share_prompts: bool) -> Callable[[], None]:
        config = compose_run("demo", [f"trainer.share_prompts={share_prompts}"]).run
        lengths, prompt_lengths = rollout.lengths.tolist(), list(map(len, prompts))
        (rows,) = microbatches(range(len(prompts)), 8, lengths, prompt_lengths, config.trainer)

        def work() -> None:
            policy.model.zero_grad(set_to_none=True)
            responses = responses_of(policy, rollout, rows, 8, config)
            responses.scores().log_probs[inside].sum().backward()

        return work

    seconds = alternate({"shared": update(True), "plain": update(False)}, rounds)
    return {
        "shared prompts, s": seconds["shared"],
        "plain, s": seconds["plain"],
        "ratio": seconds["plain"] / seconds["shared"],
    }
