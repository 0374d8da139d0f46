"""Gradient norms of confidence and answer by the length of the answer: ``python -m experiments.segment_gradients``.

The tiny model states a confidence, thinks by repeating the question, and answers.  Its responses are sampled without an
end, up to a length, since a longer thought is a longer answer segment; verdicts are drawn by chance.  Advantages and
gradients are those of a first update.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from coca_mindspeed.algorithm import LossAggregation
from coca_mindspeed.algorithm.advantages import segment_masks
from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.algorithm.objective import segment_objective
from coca_mindspeed.algorithm.parsing import END_THINK_TAG, SEGMENTS
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import WarmUpConfig
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.sampler import sample_responses
from coca_mindspeed.local.sft import warm_up
from coca_mindspeed.local.tiny_model import tiny_config, write_tiny_model
from coca_mindspeed.local.update import ResponseBatch
from coca_mindspeed.scoring.rollout import Sampled
from coca_mindspeed.utils.console import markdown_table, print_text

AGGREGATIONS: tuple[LossAggregation, ...] = ("sum", "token_mean", "segment_mean")
LENGTHS = (16, 64, 256, 1024)
_ALONE = "?"  # a character that the warm-up never shows, and that ends a response
_GROUP = 8


def warm_policy(seed: int, steps: int) -> Policy:
    """The tiny model after a warm-up on over-confident answers behind thoughts."""
    symbols = "".join(sorted(set(END_THINK_TAG))) + _ALONE
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(Path(directory), seed, symbols)
        config = compose_run("demo", [f"model.path={directory}"]).run
        policy = load_policy(Path(directory), config.model, torch.device("cpu"))
    records = arithmetic_records(4000, "train", seed)
    behind = [replace(r, answer=f"{r.question}{END_THINK_TAG}{r.answer}") for r in records]
    warm_up(policy, behind, method_settings(), WarmUpConfig(steps=steps), seed)
    return replace(policy, eos_ids=(tiny_config(symbols).vocab_size - 1,))


def norms(policy: Policy, length: int, questions: int, seed: int) -> tuple[Mapping[LossAggregation, Tensor], float]:
    """Norms of the gradients by confidence and answer, float64 ``[2]``, and mean entropy of the answer's tokens (nats).

    ``length`` is that of the responses, in tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = policy.encode_prompts(arithmetic_records(questions, "evaluate", seed), None)
    rollout = sample_responses(
        policy, prompts, group_size=_GROUP, max_new_tokens=length, temperature=1.0, generator=generator
    )
    method = method_settings(confidence_decimals=2, max_confidence_tokens=6, advantage_eps=0.05)
    sampled = Sampled(token_ids=rollout.token_ids, lengths=rollout.lengths)
    parsed = sampled.read(policy.text, method)
    correct = torch.randint(2, (len(rollout.lengths),), generator=generator).double()
    scored = parsed.scored(correct)
    advantages = scored.give_credit(CreditRule(method, 0), _GROUP).token_advantages
    masks = segment_masks(scored.segment_ends, SEGMENTS["first"], advantages.shape[1])
    batch = ResponseBatch(policy, prompts, rollout.token_ids, 1.0)
    by_name: dict[LossAggregation, Tensor] = {}
    for aggregation in AGGREGATIONS:
        of_segments = []
        for mask in masks.values():

            def loss_of(log_probs: Tensor, mask: Tensor = mask, aggregation: LossAggregation = aggregation) -> Tensor:
                given = log_probs, log_probs.detach(), advantages * mask, masks
                return segment_objective(*given, aggregation=aggregation).loss

            policy.model.zero_grad(set_to_none=True)
            entropy = batch.backward(loss_of).entropy
            of_segments.append(float(torch.nn.utils.clip_grad_norm_(policy.trained_parameters(), 1.0)))
        by_name[aggregation] = torch.tensor(of_segments, dtype=torch.float64)
    return by_name, float(entropy[masks["answer"]].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="Gradient norms of the segments by length")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of the responses")
    parser.add_argument("--questions", type=int, default=8, help=f"of {_GROUP} responses each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="of the warm-up")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    policies = [warm_policy(seed, arguments.steps) for seed in range(arguments.seeds)]
    for length in arguments.lengths:
        measured = [norms(policy, length, arguments.questions, seed) for seed, policy in enumerate(policies)]
        ratios = {name: [float(of[name][0] / of[name][1]) for of, _ in measured] for name in AGGREGATIONS}
        print_text(json.dumps({"length": length, **ratios, "entropy": [entropy for _, entropy in measured]}))
        shown = [f"{mean(values):.2f} ({min(values):.2f} to {max(values):.2f})" for values in ratios.values()]
        rows.append([str(length), *shown, f"{mean(entropy for _, entropy in measured):.2f}"])
    titles = ["tokens", *AGGREGATIONS, "entropy"]
    print_text("\nnorm of the confidence's gradient over that of the answer's, mean and range of the seeds\n")
    print_text(markdown_table(titles, rows))


if __name__ == "__main__":
    main()
