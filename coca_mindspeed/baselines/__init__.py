"""The paper's baselines: other estimates of a model's probability to answer correctly; their names and inputs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.predictions import Prediction

VOTES = ("majority_vote", "weighted_vote")
#: They rate an answer that is there, and so cost its tokens.
AFTER_THE_ANSWER = ("p_true", "answer_logprob")
BASELINES = ("verbalised", "question_probability", "probe", "assessor", *AFTER_THE_ANSWER, *VOTES)
NEEDS_TRAINING = ("probe", "assessor")
ASSESSOR_PROMPT = (
    "The following question will be put to another language model. Predict whether its answer will be correct. "
    "Reply with 1 if it will be correct and with 0 if it will be wrong, and with nothing else."
)
P_TRUE_PROMPT = (
    "You will be shown a question and a proposed answer. Judge whether the proposed answer is correct. Reply with 1 if "
    "it is correct and with 0 if it is wrong, and with nothing else."
)


def proposed_answers(records: Sequence[Record], answers: Sequence[str]) -> list[Record]:
    """Return the questions of P(True): each record's question with its proposed answer, without instruction."""
    pairs = zip(bare_questions(records), answers, strict=True)
    return [replace(r, question=f"Question: {r.question}\nProposed answer: {text.strip()}") for r, text in pairs]


def bare_questions(records: Sequence[Record]) -> list[Record]:
    """Return the records without answer instruction and system prompt."""
    return [replace(r, system=None, metadata={**r.metadata, "instruction": ""}) for r in records]


def answers_in_order(answers: Sequence[Prediction], records: Sequence[Record]) -> list[Prediction]:
    """Return the answer to each record; raises ConfigError if a record has none, or several."""
    by_key = {(p.dataset, p.id): p for p in answers}
    if len(by_key) < len(answers):
        (dataset, name), count = Counter((p.dataset, p.id) for p in answers).most_common(1)[0]
        raise ConfigError(
            f"--answers: {count} rows answer {name!r} of {dataset!r}; one answer to each record is needed, of one "
            "model and method"
        )
    if missing := [r for r in records if (r.dataset, r.id) not in by_key]:
        raise ConfigError(
            f"--answers: {len(missing)} of {len(records)} records have no answer, the first is "
            f"{missing[0].id!r} of {missing[0].dataset!r}"
        )
    return [by_key[r.dataset, r.id] for r in records]
