"""Our sampler against ``transformers`` generate: the same warmed-up tiny model, the same prompts, response tokens/s."""

import tempfile
from pathlib import Path

import torch

from benchmarks.timing import alternate
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.local.inputs import load_data
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prefill import pad_left
from coca_mindspeed.local.run import warm_start
from coca_mindspeed.local.sampler import sample_responses


def warm_policy(directory: Path, prompts: int) -> tuple[Policy, list[list[int]]]:
    """A tiny model after a short warm-up, so that its responses have the demo's lengths, and prompts for it."""
    config = compose_run("demo", ["warm_up.steps=200"]).run
    train, _ = load_data(config.data)
    path = warm_start(config, directory, train, torch.device("cpu"), show_progress=False)
    policy = load_policy(path, config.model, torch.device("cpu"))
    return policy, policy.encode_prompts(train[:prompts], config.method.system_prompt)


def run(rounds: int) -> dict[str, float]:
    """Response tokens a second of both, and their ratio."""
    group_size, max_new_tokens = 8, 16
    tokens = {"ours": 0, "generate": 0}
    with tempfile.TemporaryDirectory() as directory:
        policy, prompts = warm_policy(Path(directory), 64)
    generator = torch.Generator().manual_seed(0)
    ids, _ = pad_left(prompts, policy.pad_id, policy.device)

    def ours() -> None:
        samples = sample_responses(
            policy, prompts, group_size=group_size, max_new_tokens=max_new_tokens, temperature=1.0, generator=generator
        )
        tokens["ours"] += int(samples.lengths.sum())

    def generate() -> None:
        with torch.inference_mode():
            output = policy.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                num_return_sequences=group_size,
                max_new_tokens=max_new_tokens,
                pad_token_id=policy.pad_id,
                eos_token_id=list(policy.eos_ids),
            )
        tokens["generate"] += int((output[:, ids.shape[1] :] != policy.pad_id).sum())

    seconds = alternate({"ours": ours, "generate": generate}, rounds)
    # Tokens were counted over the warm-up round as well.
    speed = {name: tokens[name] / (rounds + 1) / seconds[name] for name in seconds}
    return {
        "ours, tokens/s": speed["ours"],
        "generate, tokens/s": speed["generate"],
        "ratio": speed["ours"] / speed["generate"],
    }
