"""One baseline from end to end: answers, training of a predictor, confidences; resumable."""

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coca_mindspeed.baselines import AFTER_THE_ANSWER, P_TRUE_PROMPT, VOTES, answers_in_order, proposed_answers
from coca_mindspeed.baselines.predictors import (
    ASSESSOR_FIT,
    Assessor,
    FitConfig,
    ProbeConfig,
    TargetModel,
    load_probe,
    prompt_states,
    question_probabilities,
    save_probe,
    train_assessor,
    train_probe,
)
from coca_mindspeed.baselines.votes import Equivalences, majority_predictions
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.evaluation.predictions import (
    Prediction,
    prediction_from_json,
    prediction_to_json,
    write_predictions,
)
from coca_mindspeed.local.checkpoint import export_model
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.schedule import derived_seed
from coca_mindspeed.utils.directories import Rows, resumable_map


@dataclass(frozen=True)
class BaselineOptions:
    """Options of a baseline.

    ``batch`` is the number of questions at once and in a part of a resumable run, ``samples`` the k of the votes,
    ``label`` the method name in the predictions (None: the baseline's own), and ``trained`` the directory of a trained
    probe or assessor (None: train one).
    """

    batch: int = 64
    samples: int = 16
    label: str | None = None
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    assessor: FitConfig = ASSESSOR_FIT
    trained: Path | None = None
    show_progress: bool = True


def run_baseline(
    name: str,
    target: TargetModel,
    records: Sequence[Record],
    output: Path,
    options: BaselineOptions,
    *,
    training_records: Sequence[Record],
    open_assessor: Callable[[Path | None], Policy],
    answers: Sequence[Prediction] | None = None,
) -> list[Prediction]:
    """Run the baseline, one of :data:`.BASELINES`, and write ``output/predictions.jsonl``.

    All but the votes predict whether the target model's own answer is correct: one answer to each record is sampled and
    graded (or taken from ``answers``), and its stated confidence is replaced by the baseline's.  Their TTC is 0, or the
    answer's tokens for those :data:`.AFTER_THE_ANSWER`.
    Existing parts and trained predictors in ``output`` are reused.  ``open_assessor`` loads the assessor's model: the
    given directory, or for None the initial one.
    """
    work = _Work(target, output, options)
    if name in VOTES:
        predictions = work.votes(records, weighted=name == "weighted_vote")
    elif answers is None:
        predictions = work.answers(records, "answers")
    else:
        predictions = answers_in_order(answers, records)
    if name in AFTER_THE_ANSWER:
        confidences = work.p_true(records, predictions) if name == "p_true" else _answer_probabilities(predictions)
        rated = zip(predictions, confidences, strict=True)
        predictions = [replace(p, confidence=value, tokens_to_confidence=p.tokens) for p, value in rated]
    elif name not in (*VOTES, "verbalised"):
        predict: Predict
        if name == "question_probability":
            predict = partial(question_probabilities, target)
        elif name == "probe":
            predict = work.probe(training_records)
        else:
            predict = work.assessor(training_records, open_assessor).confidence
        confidences = work.confidences(records, predict)
        predictions = [
            replace(answer, confidence=confidence, tokens_to_confidence=0)
            for answer, confidence in zip(predictions, confidences, strict=True)
        ]
    categories = {record.id: record.category for record in records}
    label = options.label or name
    predictions = [replace(p, method=label, category=categories[p.id], seed=target.seed) for p in predictions]
    write_predictions(output / "predictions.jsonl", predictions)
    return predictions


def _answer_probabilities(answers: Sequence[Prediction]) -> list[float]:
    if unknown := [p for p in answers if p.answer_probability is None]:
        raise ConfigError(
            f"--answers: {len(unknown)} of {len(answers)} rows have no 'answer_probability', the first is "
            f"{unknown[0].id!r}; leave --answers out, and answers are sampled with it"
        )
    return [p.answer_probability for p in answers if p.answer_probability is not None]


Predict = Callable[[Sequence[Record]], Sequence[float]]


@dataclass(frozen=True)
class _Work:
    """The steps that baselines share; each skips finished parts in ``output``."""

    target: TargetModel
    output: Path
    options: BaselineOptions

    def answers(self, records: Sequence[Record], purpose: str) -> list[Prediction]:
        return self._predictions(purpose, records, lambda part, chunk: self.target.answers(chunk, purpose, part))

    def votes(self, records: Sequence[Record], *, weighted: bool) -> list[Prediction]:
        with closing(Equivalences()) as equivalences:

            def sample_and_vote(part: int, chunk: Sequence[Record]) -> list[Prediction]:
                k = self.options.samples
                return majority_predictions(self.target, chunk, k, equivalences, "votes", part, weighted=weighted)

            return self._predictions("votes", records, sample_and_vote)

    def confidences(self, records: Sequence[Record], predict: Predict) -> list[float]:
        rows = self._parts("confidences", records, lambda part, chunk: [{"confidence": c} for c in predict(chunk)])
        return [row["confidence"] for row in rows]

    def p_true(self, records: Sequence[Record], answers: Sequence[Prediction]) -> list[float]:
        """The target model's own judgement of its answers, the probability of 1 against 0 (Kadavath et al., 2022)."""
        parse = self.target.method.parser()
        judge = Assessor(self.target.policy, system_prompt=P_TRUE_PROMPT)
        asked = proposed_answers(records, [parse(answer.response).answer for answer in answers])
        return self.confidences(asked, judge.confidence)

    def probe(self, records: Sequence[Record]) -> Predict:
        """Return the predictor of the trained probe; train it if it does not exist."""
        directory, size = self.options.trained or self.output / "probe", self.options.batch
        if not directory.exists():
            records, correct = self._graded(records)
            states = prompt_states(self.target, records, self.options.probe.layer, size)
            seed = derived_seed(self.target.seed, "probe")
            probe, fit = train_probe(states, torch.tensor(correct), self.options.probe, seed, self._epoch)
            save_probe(probe, fit, directory)
        trained = load_probe(directory)
        return lambda records: trained.confidence(prompt_states(self.target, records, trained.layer, size)).tolist()

    def assessor(self, records: Sequence[Record], open_assessor: Callable[[Path | None], Policy]) -> Assessor:
        """Return the trained assessor; train it if it does not exist."""
        directory = self.options.trained or self.output / "assessor"
        if not directory.exists():
            records, correct = self._graded(records)
            policy = open_assessor(None)
            seed = derived_seed(self.target.seed, "assessor")
            train_assessor(policy, records, correct, self.options.assessor, seed, self._epoch)
            export_model(policy, directory)
        return Assessor(open_assessor(directory))

    def _graded(self, records: Sequence[Record]) -> tuple[list[Record], list[bool]]:
        """The training questions with gradable answers, and the verdicts."""
        answers = zip(records, self.answers(records, "training_answers"), strict=True)
        graded = [(record, answer.correct) for record, answer in answers if answer.correct is not None]
        if not graded:
            raise DataError(f"--train: none of the answers to its {len(records)} questions could be graded")
        return [record for record, _ in graded], [correct for _, correct in graded]

    def _predictions(
        self, directory: str, records: Sequence[Record], work: Callable[[int, Sequence[Record]], list[Prediction]]
    ) -> list[Prediction]:
        rows = self._parts(directory, records, lambda part, chunk: [prediction_to_json(p) for p in work(part, chunk)])
        return [prediction_from_json(row, f"{self.output / directory}: row {i}") for i, row in enumerate(rows)]

    def _parts(
        self, directory: str, records: Sequence[Record], work: Callable[[int, Sequence[Record]], Rows]
    ) -> list[dict[str, Any]]:
        title, show = directory.replace("_", " "), self.options.show_progress
        return resumable_map(
            self.output / directory, records, self.options.batch, work, title=title, show_progress=show
        )

    def _epoch(self, epoch: int, loss: float) -> None:
        if self.options.show_progress:
            print(f"epoch {epoch}: validation loss {loss:.4f} nats", file=sys.stderr, flush=True)
