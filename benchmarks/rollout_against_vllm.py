"""The rollout simulator against vLLM's CPU build: step costs by batches of one length, then rollouts of many lengths.

``VLLM=.venv-vllm/bin/vllm python -m benchmarks.rollout_against_vllm --model runs/demo/model`` (a quiet machine).
"""

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from benchmarks.rollout_simulator import Costs, LogNormal, Request, simulate_engine
from benchmarks.rollout_simulator import Engine as Limits

PROMPT = [5] * 30
SLOTS = 32  # --max-num-seqs of the engine
SIZES = (1, 4, 8, 16, 32)
LENGTH = 150  # tokens of the responses that are calibrated by


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollout_against_vllm", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", type=Path, required=True, help="the demo's model")
    parser.add_argument("--responses", type=int, default=160, help="of the rollout (160)")
    parser.add_argument("--repeats", type=int, default=3, help="rollouts, each with lengths of its own (3)")
    options = parser.parse_args()
    from tests.integration.router.vllm_engine import NAME, engine

    with tempfile.TemporaryDirectory() as directory, engine(os.environ["VLLM"], options.model, Path(directory)) as vllm:

        def rollout(lengths: Sequence[int]) -> float:
            return asyncio.run(_rollout(f"{vllm.url}/completions", NAME, lengths))

        rollout([50] * SLOTS)  # warms up
        one = min(rollout([1]) for _ in range(5))  # a step, and the time of the HTTP server
        token = max(0.0, (rollout([1] * SLOTS) - one) / ((SLOTS - 1) * len(PROMPT)))
        decode = tuple(
            (size, (rollout([LENGTH] * size) - one - (size - 1) * len(PROMPT) * token) / (LENGTH - 1)) for size in SIZES
        )
        costs = Costs(decode=decode, prefill=decode[0][1], prefill_token=token)
        server = one - costs.prefill - len(PROMPT) * token
        print("ms of a decoding step:", ", ".join(f"{size}: {1000 * seconds:.1f}" for size, seconds in decode))
        drawn = LogNormal(mean=80, sigma=0.8, longest=300)
        for seed in range(options.repeats):
            lengths = [length for [length] in drawn.draw(random.Random(seed), options.responses, 1)]
            measured = rollout(lengths)
            limits = Limits(max_num_seqs=SLOTS, kv_tokens=10**6)
            requests = [Request(len(PROMPT), length) for length in lengths]
            simulated = server + simulate_engine(requests, limits, costs).seconds
            print(
                f"seed {seed}: measured {measured:.2f} s, simulated {simulated:.2f} s ({simulated / measured - 1:+.1%})"
            )


async def _rollout(url: str, model: str, lengths: Sequence[int]) -> float:
    """Seconds until the engine has written a response of each length, all asked for at once."""
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        started = time.perf_counter()

        async def ask(length: int) -> None:
            body = {"model": model, "prompt": PROMPT, "max_tokens": length, "min_tokens": length, "ignore_eos": True}
            usage = (await client.post(url, json=body)).raise_for_status().json()["usage"]
            assert usage["completion_tokens"] == length, usage

        await asyncio.gather(*map(ask, lengths))
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
