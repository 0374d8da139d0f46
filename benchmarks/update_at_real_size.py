"""Peak memory of one update at a real vocabulary: ``python -m benchmarks.update_at_real_size --responses 16``.

A Qwen2 of two layers, hidden size 896 and 151,936 tokens, random weights; responses of one length to one prompt.
"""

import argparse
import json
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from coca_mindspeed.algorithm.advantages import segment_masks
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.recomputation import recompute_layers
from coca_mindspeed.local.sampler import Samples
from coca_mindspeed.local.update import update_policy

_GIB = 2**30


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def random_experience(responses: int, tokens: int, vocabulary: int) -> Any:
    """What an update reads of judged responses, at random."""
    token_ids = torch.randint(2, vocabulary, (responses, tokens))
    lengths = torch.full((responses,), tokens)
    old = torch.full((responses, tokens), -12.0)
    samples = Samples(
        [list(range(100, 164))], token_ids, lengths, old, torch.ones(responses, dtype=torch.bool), torch.ones(responses)
    )
    return SimpleNamespace(
        graded=SimpleNamespace(records=[None], samples=samples),
        advantages=torch.randn(responses, 1).expand(responses, tokens),
        masks=segment_masks(torch.full((responses,), 8), lengths, tokens),
    )


def measure(responses: int, tokens: int, vocabulary: int, microbatch_tokens: int) -> dict[str, float]:
    """Bytes before an update and beyond them at its peak, and seconds, in a process that does nothing else."""
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = Qwen2Config(vocab_size=vocabulary, hidden_size=896, intermediate_size=4864, **shape)
    policy = Policy(Qwen2ForCausalLM(config).eval(), None, None, (1,), 0)
    recompute_layers(policy.model)
    settings = [f"trainer.microbatch_tokens={microbatch_tokens}", "trainer.minibatches=1"]
    run = compose_run("demo", [*settings, f"rollout.group_size={responses}"]).run
    experience = random_experience(responses, tokens, vocabulary)
    optimizer = torch.optim.AdamW(policy.trained_parameters(), fused=True)
    before, started = resident(), time.perf_counter()
    metrics = update_policy(policy, experience, optimizer, 1e-6, run)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "before": before,
        "peak beyond": peak - before,
        "seconds": seconds,
        "objective/grad_norm": metrics["objective/grad_norm"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.update_at_real_size", description=__doc__)
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--microbatch-tokens", type=int, default=4_300)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, in bytes and seconds")
    arguments = parser.parse_args()
    found = measure(arguments.responses, arguments.tokens, arguments.vocabulary, arguments.microbatch_tokens)
    if arguments.json:
        print(json.dumps(found))
        return
    beyond, before, seconds = (found[name] for name in ("peak beyond", "before", "seconds"))
    print(f"{arguments.responses} responses of {arguments.tokens} tokens, vocabulary {arguments.vocabulary}:")
    print(f"{beyond / _GIB:.2f} GiB above weights and process ({before / _GIB:.2f} GiB), {seconds:.0f} s")
    print(f"objective/grad_norm {found['objective/grad_norm']:.3f}")


if __name__ == "__main__":
    main()
