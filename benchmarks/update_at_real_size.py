"""Peak memory of one update at a real vocabulary: ``python -m benchmarks.update_at_real_size --responses 16``.

A Qwen2 of two layers, hidden size 896 and 151,936 tokens, random weights; responses of one length to one prompt.
``--against-plain`` runs it in turn with the plain way, which holds all logits and activations: at a size that fits;
``--lora 16 --against-full`` runs adapters in turn with the whole model.
"""

import argparse
import json
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.loops_in_turn import in_a_process
from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import LoraConfig
from coca_mindspeed.local import lm_head
from coca_mindspeed.local.load import checkpoint_activations
from coca_mindspeed.local.policy import Policy, add_adapters
from coca_mindspeed.local.sampler import Rollout
from coca_mindspeed.local.update import update_policy
from coca_mindspeed.scoring.rollout import Credited, Scored

_GIB = 2**30


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def random_rollout(responses: int, tokens: int, vocabulary: int) -> tuple[Rollout, Credited]:
    """Random tokens and advantages of responses to one prompt."""
    rollout = Rollout(
        lengths=torch.full((responses,), tokens),
        prompts=[list(range(100, 164))] * responses,
        token_ids=torch.randint(2, vocabulary, (responses, tokens)),
        log_probs=torch.full((responses, tokens), -12.0),
        finished=torch.ones(responses, dtype=torch.bool),
        entropy=torch.full((responses,), 12.0),
    )
    scored = Scored(
        stated=torch.rand(responses, dtype=torch.float64),
        stated_after=None,
        confidence_lengths=torch.full((responses,), 8),
        segment_ends=torch.tensor([[8, tokens]]).expand(responses, 2),
        correct=torch.randint(2, (responses,)).double(),
    )
    return rollout, scored.give_credit(CreditRule(method_settings()), responses)


def measure(
    responses: int,
    tokens: int,
    vocabulary: int,
    microbatch_tokens: int,
    *,
    plain: bool = False,
    lora: int | None = None,
) -> dict[str, float]:
    """Bytes before an update and beyond them at its peak, and seconds, in a process that does nothing else."""
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = Qwen2Config(vocab_size=vocabulary, hidden_size=896, intermediate_size=4864, **shape)
    policy = Policy(Qwen2ForCausalLM(config).eval(), None, None, (1,), 0)
    if plain:
        lm_head.CHUNK_BYTES = 2**62
    else:
        checkpoint_activations(policy.model)
    add_adapters(policy, LoraConfig(rank=lora), 0)
    settings = [f"trainer.microbatch_tokens={microbatch_tokens}", "trainer.minibatches=1"]
    run = compose_run("demo", [*settings, f"rollout.group_size={responses}"]).run
    rollout, credited = random_rollout(responses, tokens, vocabulary)
    optimizer = torch.optim.AdamW(policy.trained_parameters(), fused=True)
    before, started, before_processor = resident(), time.perf_counter(), time.process_time()
    metrics = update_policy(policy, rollout, credited, optimizer, 1e-6, run)
    seconds, processor = time.perf_counter() - started, time.process_time() - before_processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "before": before,
        "peak beyond": peak - before,
        "seconds": seconds,
        "processor": processor,
        "objective/grad_norm": metrics["objective/grad_norm"],
    }


def measured_alone(*options: str) -> dict[str, float]:
    """:func:`measure` in a process of its own, by this module's own options."""
    return in_a_process("benchmarks.update_at_real_size", *options, "--json")


def compared(sizes: Sequence[str], ways: Mapping[str, Sequence[str]], rounds: int) -> None:
    """Two ways in turn, each in a process of its own; the least of the rounds."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, more in ways.items():
            found[way].append(measured_alone(*sizes, *more))
            print(way, json.dumps(found[way][-1]), flush=True)
    for figure in ("seconds", "processor", "before", "peak beyond", "objective/grad_norm"):
        ours, other = (min(each[figure] for each in found[way]) for way in ways)
        print(f"| {figure} | {ours:.6g} | {other:.6g} | {ours / other:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.update_at_real_size", description=__doc__)
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--responses", type=int, default=16)
    sizes.add_argument("--tokens", type=int, default=4096)
    sizes.add_argument("--vocabulary", type=int, default=151_936)
    sizes.add_argument("--microbatch-tokens", type=int, default=4_300)
    parser.add_argument("--plain", action="store_true", help="hold all logits and activations")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank in the model's place")
    parser.add_argument("--against-plain", type=int, metavar="ROUNDS", help="both ways in turn, so often")
    parser.add_argument("--against-full", type=int, metavar="ROUNDS", help="--lora and the whole model in turn")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, in bytes and seconds")
    arguments = parser.parse_args()
    given = (arguments.responses, arguments.tokens, arguments.vocabulary, arguments.microbatch_tokens)
    if arguments.against_full and not arguments.lora:
        parser.error("--against-full: needs --lora RANK")
    names = ("--responses", "--tokens", "--vocabulary", "--microbatch-tokens")
    options = [word for pair in zip(names, map(str, given), strict=True) for word in pair]
    if arguments.against_plain:
        compared(options, {"by chunks": [], "plain": ["--plain"]}, arguments.against_plain)
        return
    if arguments.against_full:
        compared(options, {"LoRA": ["--lora", str(arguments.lora)], "full": []}, arguments.against_full)
        return
    found = measure(*given, plain=arguments.plain, lora=arguments.lora)
    if arguments.json:
        print(json.dumps(found))
        return
    beyond, before, seconds = (found[name] for name in ("peak beyond", "before", "seconds"))
    print(f"{arguments.responses} responses of {arguments.tokens} tokens, vocabulary {arguments.vocabulary}:")
    print(f"{beyond / _GIB:.2f} GiB above weights and process ({before / _GIB:.2f} GiB), {seconds:.0f} s")
    print(f"objective/grad_norm {found['objective/grad_norm']:.3f}")


if __name__ == "__main__":
    main()
