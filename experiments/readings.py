"""Readings of a confidence: the greedy and the expected number of each question.

The numbers form a trie of tokens, which is run once for each question, over all its paths together; this is about as
much work as one more response.
"""

from collections.abc import Sequence

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.respond import Numbers, read_confidences
from experiments.answers import Answer, Reading, with_reading

_DEFAULT_ROWS = 512  # of the cache at once, if rollout.batch_responses is null


def with_readings(
    policy: Policy, records: Sequence[Record], predictions: Sequence[Prediction], config: RunConfig
) -> list[Answer]:
    """Add the readings to the policy's answers to ``records``, several in a row to each.

    There are none if no answer states a confidence.  The method must state it before the answer.
    """
    numbers = Numbers.of(policy, (p.response for p in predictions), config.method.confidence_decimals)
    if numbers is None:
        return [with_reading(p, None) for p in predictions]
    prompts = policy.encode_prompts(records, config.method.training_method.system_prompt)
    found = read_confidences(policy, prompts, numbers, config.rollout.batch_responses or _DEFAULT_ROWS)
    readings = [Reading(greedy, expectation, min(1.0, mass)) for greedy, expectation, mass in found]
    samples = len(predictions) // len(records)
    return [with_reading(p, readings[row // samples]) for row, p in enumerate(predictions)]
