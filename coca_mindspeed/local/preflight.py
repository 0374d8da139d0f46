"""Preflight: sample a few responses before the first step, and refuse a run that could not learn from them.

Questions and tokens are drawn by seeds of their own, so the run itself does not change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import Problem, TrainingError
from coca_mindspeed.grading.registry import misfit_warnings
from coca_mindspeed.grading.verdict import Grader
from coca_mindspeed.local.inverse_cdf import NoDistributionError
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.respond import respond
from coca_mindspeed.local.schedule import derived_seed, generator, records_of_step
from coca_mindspeed.scoring.responses import response_scorer
from coca_mindspeed.scoring.rollout import Rollout
from coca_mindspeed.utils.console import one_line

_STAGE = "preflight"  # part of derived seeds
_LEAST_VALID = 0.5
_LONGEST_TEXT = 200  # characters shown of a question or response


@dataclass(frozen=True)
class Preflight:
    """Graded responses, one to each of some training questions."""

    config: RunConfig
    records: Sequence[Record]
    rollout: Rollout

    @property
    def valid(self) -> int:
        return int((~self.rollout.stated.isnan()).sum())

    def __str__(self) -> str:
        """The shares of valid confidences and right answers, the worst and the best response, and advice."""
        count, rows = len(self.records), self.rows()
        right = int(self.rollout.correct.nansum())
        lines = [
            f"{count} responses to training questions, sampled before the first step: {self.valid} state a valid "
            f"confidence ({self.valid / count:.0%}), {right} answers are right ({right / count:.0%})"
        ]
        order = sorted(range(count), key=lambda i: (rows[i]["confidence"] is not None, bool(rows[i]["correct"])))
        for row in (rows[i] for i in dict.fromkeys((order[0], order[-1]))):
            stated = "no valid confidence" if row["confidence"] is None else f"confidence {row['confidence']:g}"
            lines.append(f"  question: {_shorten(row['question'])}")
            lines.append(f"  response: {_shorten(row['response'])}  [{stated}, {row['verdict']}]")
        # A grader may find many answers wrong although they name the gold answer.
        grader = self.config.data.grader
        option = f"data.grader_options.{'factual.' * (grader == 'auto')}match=contains"
        fixes = {
            "factual": f"set {option}, or another metadata.instruction in the records",
            "math": 'set "category": "factual" in the records, and data.grader=auto',
        }
        warnings = misfit_warnings(grader, self.records, self.rollout.answers, self.rollout.verdicts, fixes)
        return "\n".join([*lines, *warnings])

    def rows(self) -> list[dict[str, Any]]:
        """Rows of a samples dump."""
        return [
            {"id": record.id, "question": record.question, "gold": record.answer, **self.rollout.scored_row(row)}
            for row, record in enumerate(self.records)
        ]

    def problems(self) -> list[Problem]:
        """A problem if fewer than half of the responses state a valid confidence."""
        config, warm_up, count = self.config, self.config.warm_up, len(self.records)
        if self.valid >= _LEAST_VALID * count:
            return []
        if warm_up.records is not None or config.model.path is None:
            key, value = "warm_up.steps", warm_up.steps
            fix = f"set warm_up.steps={2 * warm_up.steps}, or a larger warm_up.lr"
        else:
            key, value = "warm_up.records", None
            fix = (
                f"add a format warm-up: warm_up.records={config.data.train or 'FILE'} (or other records); for a short "
                "first run also write laptop for local (docs/quickstart.md)"
            )
        expected = f"{self.valid} of {count} sampled responses state a valid confidence, expected at least half"
        fix += "; evaluation.preflight=0 trains anyway (docs/training.md, format warm-up)"
        return [Problem("no-format", key, value, expected, fix)]


def run_preflight(policy: Policy, train: Sequence[Record], grader: Grader, config: RunConfig) -> Preflight:
    """Sample and grade ``evaluation.preflight`` responses to training questions.

    Raises:
        TrainingError: the policy's probabilities are not finite.
    """
    settings = config.rollout
    at_once = min(settings.prompts * settings.group_size, settings.batch_responses or config.evaluation.preflight)
    records = records_of_step(train, 0, config.evaluation.preflight, derived_seed(config.seed, _STAGE))
    try:
        rollout = respond(
            policy,
            records,
            config.method,
            settings.model_copy(update={"batch_responses": at_once}),
            generator(policy.device, config.seed, _STAGE),
            group_size=1,
        )
    except NoDistributionError as error:
        raise TrainingError(f"sampling before step 1: {error}") from error
    score = response_scorer(config.method, policy.text, grader, require_evaluated=config.data.require_evaluated)
    return Preflight(config, records, score.for_training(score(rollout)))


def _shorten(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= _LONGEST_TEXT else f"{line[:_LONGEST_TEXT]}..."
