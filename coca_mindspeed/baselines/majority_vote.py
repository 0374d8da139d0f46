"""Majority voting: sample k answers and cluster equivalent ones; confidence is the largest cluster's share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from coca_mindspeed.baselines.subject import Subject
from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.local.experience import respond_and_grade

Pairs = Sequence[tuple[str, str]]
FinalAnswers = Callable[[Record, Sequence[str]], Sequence[str | None]]
Same = Callable[[Record, Pairs], Sequence[bool]]


@dataclass(frozen=True)
class Vote:
    """Index of the representative (first sample of the largest cluster), and the cluster's share of all samples."""

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


def vote(clusters: Sequence[int | None]) -> Vote:
    """Find the largest cluster; ties go to the first.  Without any final answer, the first sample wins with share 0."""
    if not clusters:
        raise ValueError("a vote needs at least one sample")
    counts: dict[int, int] = {}
    for number in clusters:
        if number is not None:
            counts[number] = counts.get(number, 0) + 1
    if not counts:
        return Vote(0, 0.0)
    largest = min(counts, key=lambda number: (-counts[number], number))
    return Vote(clusters.index(largest), counts[largest] / len(clusters))


def majority_predictions(
    subject: Subject, records: Sequence[Record], k: int, final_answers: FinalAnswers, same: Same, *purpose: object
) -> list[Prediction]:
    """Sample k responses to each record at temperature 1 and vote.

    A stated confidence is removed and ignored; TTC counts the tokens of all k samples.

    Args:
        subject: the target model and its prompt.
        records: the questions.
        k: samples of each.
        final_answers: returns the final answers of a record's responses.
        same: whether the final answers of each pair are equivalent, for a record.
        purpose: names the random numbers.
    """
    if k < 1:
        raise ValueError(f"k should be at least 1, found {k}")
    rollout = subject.rollout.model_copy(update={"temperature": 1.0})
    graded = respond_and_grade(
        subject.policy, records, subject.grader, subject.method, rollout, subject.generator(*purpose), k
    )
    lengths = graded.samples.lengths.cpu().view(-1, k).sum(dim=1).tolist()
    predictions = []
    for index, record in enumerate(records):
        rows = slice(index * k, (index + 1) * k)
        finals = final_answers(record, [parsed.answer for parsed in graded.judged.parsed[rows]])
        result = vote(cluster(finals, partial(same, record)))
        winner = index * k + result.winner
        verdict = graded.judged.verdicts[winner]
        predictions.append(
            Prediction(
                id=record.id,
                dataset=record.dataset,
                question=record.question,
                response=graded.judged.texts[winner],
                confidence=result.share,
                correct=verdict.correct_or_none,
                tokens_to_confidence=lengths[index],
                category=record.category,
                tokens=lengths[index],
            )
        )
    return predictions
