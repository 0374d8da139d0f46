"""Times the reward-plus-advantage stage and the packing of rows against MindSpeed-RL's own; prints JSON."""

import importlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

RESPONSES, TOKENS, GROUP = 2048, 4096, 16


def main() -> None:
    from coca_mindspeed.mindspeed.start.process import setup_worker

    setup_worker()
    upstream = importlib.import_module("mindspeed_rl.trainer.utils.compute_utils").compute_group_norm_advantage_return
    from coca_mindspeed.mindspeed.start.settings import CocaSettings
    from coca_mindspeed.scoring.responses import credit_rule

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, TOKENS + 1, (RESPONSES,), generator=generator)
    lengths[0] = TOKENS
    correct = torch.rand(RESPONSES, generator=generator) < 0.5
    confidence = torch.rand(RESPONSES, generator=generator)
    confidence_lengths = torch.randint(6, 14, (RESPONSES,), generator=generator)
    mask = (torch.arange(TOKENS) < lengths[:, None]).to(torch.int64)
    settings, groups = CocaSettings(), (-1, GROUP)
    rule = credit_rule(settings.method, settings.stage)

    def ours() -> None:
        rule(correct.view(groups), confidence.view(groups), confidence_lengths, lengths, TOKENS)

    def theirs() -> None:
        upstream(correct.float()[:, None], mask, lengths[:, None], GROUP)

    print("TIMES " + json.dumps({"ours": timed(ours), "upstream": timed(theirs)}))
    compare_packing(generator)


def compare_packing(generator: torch.Generator) -> None:
    """The same rows packed and unpacked by both; raises where one differs from the other."""
    from coca_mindspeed.mindspeed.stages.dock import packed, unpacked

    upstream = importlib.import_module("mindspeed_rl.utils.pad_process")
    lengths = torch.randint(1, 40, (512,), generator=generator).tolist()
    rows = {
        "responses": [torch.randint(1, 99, (length,), generator=generator) for length in lengths],
        "response_length": [torch.tensor([length], dtype=torch.int32) for length in lengths],
        "matrix": torch.rand(512, 7, generator=generator),
        "log_probs": [torch.rand(length, generator=generator) for length in lengths],
    }
    for columns in (rows, {"matrix": rows["matrix"]}):  # of one column, a TensorDict knows the number of its rows
        theirs, ours = upstream.padding_dict_to_tensor_dict(columns), packed(columns)
        assert list(theirs.keys()) == list(ours.keys())
        assert theirs.batch_size == ours.batch_size
        for name in theirs.keys():  # noqa: SIM118  a TensorDict iterates over its rows
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)
        back, expected = unpacked(theirs), upstream.remove_padding_tensor_dict_to_dict(theirs)
        assert list(back) == list(expected)
        for name, wanted in expected.items():
            torch.testing.assert_close(back[name], wanted, rtol=0, atol=0)
    assert unpacked(None) == upstream.remove_padding_tensor_dict_to_dict(None) == {}
    prompts = {"prompts": rows["responses"]}
    assert unpacked(prompts) is upstream.remove_padding_tensor_dict_to_dict(prompts) is prompts

    def both_ways(pack: Callable[..., Any], unpack: Callable[..., Any]) -> Callable[[], None]:
        return lambda: unpack(pack(rows))

    times = {
        "ours": timed(both_ways(packed, unpacked)),
        "upstream": timed(both_ways(upstream.padding_dict_to_tensor_dict, upstream.remove_padding_tensor_dict_to_dict)),
    }
    print("PACKING " + json.dumps(times))


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
