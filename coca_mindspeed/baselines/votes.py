"""Majority voting: sample k answers, cluster equivalent ones, and take the largest cluster's share as confidence.

The confidence-weighted vote counts each sample by its stated confidence.  Two answers are compared without the gold
answer, by the grader of their kind of data set.  Two programs are equivalent if they give the same outputs on the
inputs of the record's tests; each runs once in the code grader's sandbox, and outputs are compared outside of it.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from coca_mindspeed.baselines.predictors import TargetModel
from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.code import MAX_ANSWER_CHARACTERS, CodeGrader, build_job, extract_program, wanted_names
from coca_mindspeed.grading.registry import build_grader, grader_name
from coca_mindspeed.grading.verdict import Equivalence, MeasuredGrader
from coca_mindspeed.local.respond import respond
from coca_mindspeed.scoring.responses import ResponseScorer
from coca_sandbox.inside.names import undefined

Pairs = Sequence[tuple[str, str]]
# A judge compares with a gold answer; two answers to such a question are compared as facts.
_SUBSTITUTES = {"simpleqa": "factual"}


class Equivalences:
    """Math: symbolic; factual: normalised text; code: outputs on the tests' inputs; exact: text.

    ``graders`` are made when they are first needed, by name.
    """

    def __init__(self) -> None:
        self.graders: dict[str, MeasuredGrader] = {}
        # Outputs of the last record's programs: a vote asks about one record after the other.
        self._record: Record | None = None
        self._outputs: dict[str, tuple[str | None, ...]] = {}

    def close(self) -> None:
        for grader in self.graders.values():
            grader.close()

    def final_answers(self, record: Record, answers: Sequence[str]) -> Sequence[str | None]:
        """Return the final answers (programs) of a record's responses, None where there is none."""
        grader = self._grader(record)
        if not isinstance(grader, CodeGrader):
            return grader.final_answers(answers)
        wanted = wanted_names(record)
        return [
            extract_program(answer, wanted).strip("\n") or None if len(answer) <= MAX_ANSWER_CHARACTERS else None
            for answer in answers
        ]

    def same(self, record: Record, pairs: Pairs) -> Sequence[bool]:
        """Whether the final answers of each pair are equivalent; programs, if they agree on every input of the tests.

        A program without a comparable output on some input (a timeout, or an object as result) agrees with none.
        Without a test input of plain values (three tasks of HumanEval), programs of equal text agree.

        Raises GradingError: a program could not be run.
        """
        grader = self._grader(record)
        if not isinstance(grader, CodeGrader):
            return grader.equivalent(pairs)
        if record is not self._record:
            self._record, self._outputs = record, {}
        inputs = program_inputs(record)
        if not inputs:
            return [first == second for first, second in pairs]
        tests = record.metadata["tests"]
        job = {"kind": "outputs", "entry_point": tests.get("entry_point"), "inputs": inputs}
        job["tuples_are_lists"] = tests["kind"] == "call"  # as the tests compare them
        new = [program for program in dict.fromkeys(sum(pairs, ())) if program not in self._outputs]
        found = grader.outputs([{**job, "source": build_job(record, program)["source"]} for program in new])
        self._outputs |= dict(zip(new, found, strict=True))
        outputs = [(self._outputs[first], self._outputs[second]) for first, second in pairs]
        return [None not in first and first == second for first, second in outputs]

    def _grader(self, record: Record) -> CodeGrader | Equivalence:
        name = grader_name(record)
        if name not in self.graders:
            self.graders[name] = build_grader(_SUBSTITUTES.get(name, name))
        grader = self.graders[name]
        assert isinstance(grader, CodeGrader | Equivalence), f"the grader {name} cannot compare two answers"
        return grader


def program_inputs(record: Record) -> list[dict[str, Any]]:
    """Return each input of the record's tests: ``stdin``, a ``call``, or a ``function`` with its ``arguments``."""
    tests: Mapping[str, Any] = record.metadata.get("tests") or {}
    kind = tests.get("kind")
    if kind == "stdio":
        return [{"stdin": case["input"]} for case in tests["cases"]]
    if kind == "call":
        return [{"function": tests["entry_point"], "arguments": case["arguments"]} for case in tests["cases"]]
    return [{"call": call} for call in _calls(str(tests.get("code", "")), tests.get("entry_point"))]


def _calls(code: str, entry_point: str | None) -> list[str]:
    """Return the calls of the program in the asserts of test code, as self-contained expressions.

    HumanEval calls the program ``candidate``; without an entry point, the program's functions are the undefined names
    that are called.
    """
    called = {entry_point, "candidate"} if entry_point else undefined(code).called
    asserts = [node.test for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Assert)]
    calls: dict[str, None] = {}
    for node in (node for test in asserts for node in ast.walk(test)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in called and _plain(node):
            call = ast.Call(ast.Name(entry_point or node.func.id, ast.Load()), node.args, node.keywords)
            calls[ast.unparse(call)] = None
    return list(calls)


def _plain(call: ast.Call) -> bool:
    """True if all arguments are literals."""
    try:
        for value in (*call.args, *(keyword.value for keyword in call.keywords)):
            ast.literal_eval(value)
    except ValueError:
        return False
    return all(keyword.arg is not None for keyword in call.keywords)


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
    policy, method = target.policy, target.method
    sampling = target.rollout.model_copy(update={"temperature": 1.0})
    sampled = respond(policy, records, method.system_prompt, sampling, target.generator(*purpose), k)
    graded = ResponseScorer(method, policy.text, target.grader)(sampled, records)
    lengths = graded.lengths.view(-1, k).sum(dim=1).tolist()
    predictions = []
    for index, record in enumerate(records):
        rows = slice(index * k, (index + 1) * k)
        finals = equivalences.final_answers(record, graded.answers[rows])
        weights = graded.stated[rows].nan_to_num(0.0).tolist() if weighted else None
        result = vote(cluster(finals, partial(equivalences.same, record)), weights)
        winner = index * k + result.winner
        answer, correct = graded.texts[winner], graded.verdicts[winner].correct_or_none
        named = (record.id, record.dataset, record.question)
        prediction = Prediction(*named, answer, result.share, correct, lengths[index], record.category)
        predictions.append(replace(prediction, tokens=lengths[index]))
    return predictions
