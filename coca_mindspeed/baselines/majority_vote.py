"""Majority voting: sample k answers, cluster equivalent ones, and take the largest cluster's share as confidence.

The confidence-weighted vote counts each sample by its stated confidence.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from coca_mindspeed.baselines.equivalence import Equivalences
from coca_mindspeed.baselines.target_model import TargetModel
from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.local.respond import respond_and_grade

Pairs = Sequence[tuple[str, str]]


class Vote(NamedTuple):
    """Index of the representative (first sample of the winning cluster), and the cluster's share of all votes."""

    winner: int
    share: float


def cluster(finals: Sequence[str | None], same: Callable[[Pairs], Sequence[bool]]) -> list[int | None]:
    """Return the cluster of each answer, numbered in order of appearance; None where there is no final answer.

    An answer joins the first cluster whose first answer it equals, so the result is deterministic even if ``same`` is
    not transitive.
    """
    representatives: list[str] = []
    of_text: dict[str, int] = {}
    for final in finals:
        if final is None or final in of_text:
            continue
        verdicts = same([(known, final) for known in representatives]) if representatives else []
        of_text[final] = next((i for i, equal in enumerate(verdicts) if equal), len(representatives))
        if of_text[final] == len(representatives):
            representatives.append(final)
    return [None if final is None else of_text[final] for final in finals]


def vote(clusters: Sequence[int | None], weights: Sequence[float] | None = None) -> Vote:
    """Find the cluster with most votes; ties go to the first.

    Samples without a final answer count in the total.  ``weights`` are the votes of each sample (None: one each);
    without any vote, the first sample wins with share 0.
    """
    if not clusters:
        raise ValueError("a vote needs at least one sample")
    weights = [1.0] * len(clusters) if weights is None else weights
    votes: dict[int, float] = {}
    for number, weight in zip(clusters, weights, strict=True):
        if number is not None:
            votes[number] = votes.get(number, 0.0) + weight
    largest = min(votes, key=lambda number: (-votes[number], number), default=None)
    if largest is None or not votes[largest]:
        return Vote(0, 0.0)
    return Vote(clusters.index(largest), votes[largest] / sum(weights))


def majority_predictions(
    target: TargetModel,
    records: Sequence[Record],
    k: int,
    equivalences: Equivalences,
    *purpose: object,
    weighted: bool = False,
) -> list[Prediction]:
    """Sample k responses to each record at temperature 1 and vote.

    A stated confidence is removed, and is ignored unless ``weighted``, which weights each sample by it (0 if invalid).
    TTC counts the tokens of all k samples.  ``purpose`` names the random numbers.
    """
    if k < 1:
        raise ValueError(f"k should be at least 1, found {k}")
    rollout = target.rollout.model_copy(update={"temperature": 1.0})
    graded = respond_and_grade(
        target.policy, records, target.grader, target.method, rollout, target.generator(*purpose), k
    )
    lengths = graded.lengths.view(-1, k).sum(dim=1).tolist()
    predictions = []
    for index, record in enumerate(records):
        rows = slice(index * k, (index + 1) * k)
        finals = equivalences.final_answers(record, graded.answers[rows])
        weights = graded.stated[index].nan_to_num(0.0).tolist() if weighted else None
        result = vote(cluster(finals, partial(equivalences.same, record)), weights)
        winner = index * k + result.winner
        answer, correct = graded.texts[winner], graded.verdicts[winner].correct_or_none
        named = (record.id, record.dataset, record.question)
        prediction = Prediction(*named, answer, result.share, correct, lengths[index], record.category)
        predictions.append(replace(prediction, tokens=lengths[index]))
    return predictions
