"""Times the reward-plus-advantage stage against MindSpeed-RL's own advantages, in one process; prints JSON."""

import importlib
import json
import statistics
import time
from collections.abc import Callable

import torch

RESPONSES, TOKENS, GROUP = 2048, 4096, 16


def main() -> None:
    from coca_mindspeed.mindspeed.start.process import setup_worker

    setup_worker()
    upstream = importlib.import_module("mindspeed_rl.trainer.utils.compute_utils").compute_group_norm_advantage_return
    from coca_mindspeed.mindspeed.start.settings import CocaSettings

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, TOKENS + 1, (RESPONSES,), generator=generator)
    lengths[0] = TOKENS
    correct = torch.rand(RESPONSES, generator=generator) < 0.5
    confidence = torch.rand(RESPONSES, generator=generator)
    confidence_lengths = torch.randint(6, 14, (RESPONSES,), generator=generator)
    mask = (torch.arange(TOKENS) < lengths[:, None]).to(torch.int64)
    rule, groups = CocaSettings().credit_rule(), (-1, GROUP)

    def ours() -> None:
        rule(correct.view(groups), confidence.view(groups), confidence_lengths, lengths, TOKENS)

    def theirs() -> None:
        upstream(correct.float()[:, None], mask, lengths[:, None], GROUP)

    print("TIMES " + json.dumps({"ours": timed(ours), "upstream": timed(theirs)}))


def timed(call: Callable[[], None], repeats: int = 15) -> dict[str, float]:
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return {"best": min(seconds), "median": statistics.median(seconds)}


if __name__ == "__main__":
    main()
