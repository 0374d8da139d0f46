"""Forward and backward of the update with each prompt run once a group, against the plain way."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.sampler_against_generate import warm_policy
from benchmarks.timing import alternate
from coca_mindspeed.local.log_probs import response_log_probs
from coca_mindspeed.local.sampler import sample_responses


def run(rounds: int) -> dict[str, float]:
    """Median seconds of both, and their ratio."""
    with tempfile.TemporaryDirectory() as directory:
        policy, prompts = warm_policy(Path(directory), 32)
    samples = sample_responses(
        policy,
        prompts,
        group_size=8,
        max_new_tokens=16,
        temperature=1.0,
        generator=torch.Generator().manual_seed(0),
    )

    def update(share_prompts: bool) -> Callable[[], None]:
        def work() -> None:
            policy.model.zero_grad(set_to_none=True)
            arguments = {"temperature": 1.0, "share_prompts": share_prompts}
            response_log_probs(policy, prompts, samples.token_ids, **arguments).sum().backward()

        return work

    seconds = alternate({"shared": update(True), "plain": update(False)}, rounds)
    return {
        "shared prompts, s": seconds["shared"],
        "plain, s": seconds["plain"],
        "ratio": seconds["plain"] / seconds["shared"],
    }
