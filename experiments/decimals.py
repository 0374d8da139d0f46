"""Does a model answer as well after a confidence of another width?  ``python -m experiments.decimals MODEL RECORDS``.

Prints, for a confidence of one, two and three decimals, its tokens and the share of right answers behind it.
"""

import argparse
from contextlib import closing
from pathlib import Path

import torch

from coca_mindspeed.algorithm.methods import METHODS
from coca_mindspeed.algorithm.parsing import CLOSE_TAG, OPEN_TAG
from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.data.records import read_records
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.sampler import sample_responses
from coca_mindspeed.utils.console import print_text

_CONFIDENCES = ("0.7", "0.70", "0.700")
_SAMPLES = 2
_LONGEST = 90  # tokens of an answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="directory of a model that knows CoCA's format")
    parser.add_argument("records", type=Path, metavar="RECORDS", help="JSON Lines; the first 200 are asked")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    records = list(read_records(arguments.records))[:200]
    policy = load_policy(arguments.model, ModelConfig(path=str(arguments.model)), torch.device("cpu"))
    prompts = policy.encode_prompts(records, METHODS["coca"].system_prompt)
    asked = [record for record in records for _ in range(_SAMPLES)]
    with closing(build_grader("exact")) as grader:
        for confidence in _CONFIDENCES:
            stated = policy.tokenizer.encode(f"{OPEN_TAG}{confidence}{CLOSE_TAG}", add_special_tokens=False)
            answers = sample_responses(
                policy,
                [[*prompt, *stated] for prompt in prompts],
                group_size=_SAMPLES,
                max_new_tokens=_LONGEST,
                temperature=1.0,
                generator=torch.Generator().manual_seed(0),
                batch_responses=512,
            )
            texts = policy.text.decode(answers.token_ids, answers.lengths)
            right = sum(verdict.correct is True for verdict in grader.grade(asked, texts))
            print_text(f"{confidence}: {len(stated)} tokens, {right / len(asked):.3f} right")


if __name__ == "__main__":
    main()
