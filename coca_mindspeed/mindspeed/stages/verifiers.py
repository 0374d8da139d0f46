"""The grader for ``rl_config.verifier_function``, whose names ``hook_checks`` has checked."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import GradingError
from coca_mindspeed.grading.label_check import check_records
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.grading.verdict import Grader, Outcome, Verdict

#: This project's grader, which ``coca.grader`` names.
OWN_VERIFIER = "coca"

#: The names that MindSpeed-RL's ``rule_verifier.verifier`` knows; it silently scores 0 for any other.
MINDSPEED_VERIFIERS = (
    "acc",
    "format",
    "step",
    "strict_format",
    "base_acc",
    "math_17k_acc",
    "acc_for_dapo",
    "acc_for_ppo",
    "math_verify_reward",
)


class MindSpeedVerifier:
    """MindSpeed-RL's verifiers as a grader: a weighted score of 1 is right, 0 or a penalty is wrong.

    ``acc`` subtracts 0.5 for a wrong answer and 1 for one without a box, ``acc_for_dapo`` 1 for either.
    """

    def __init__(self, rl_config: Any) -> None:
        self._config = rl_config

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        scores = self._scores([record.answer for record in records], list(answers))
        for score in scores:
            if not (score == 1 or score <= 0):
                raise GradingError(
                    f"rl_config.verifier_function {list(self._config.verifier_function)} scored an answer {score}; "
                    "expected 1 for right, 0 or less for wrong: the confidence is trained towards a success rate"
                )
        return [Verdict(Outcome.RIGHT if score == 1 else Outcome.WRONG) for score in scores]

    def _scores(self, labels: list[str], answers: list[str]) -> list[float]:
        from mindspeed_rl.models import rule_verifier

        scores: list[float] = rule_verifier.verifier(answers, {"labels": labels}, self._config)[0]
        return scores

    def close(self) -> None:
        """Nothing to release."""


def check_verifier(names: Sequence[str], grader: str, options: Mapping[str, Any], files: Sequence[Path]) -> None:
    """Build this project's grader if ``rl_config.verifier_function`` names it, check every gold answer, and close it.

    Missing files are skipped; MindSpeed-RL's own verifiers need no check.

    Raises:
        GradingError: a grader cannot be built here: no sandbox, a wrong option.
        MissingDependencyError: a package is not installed.
        DataError: a record lacks what its grader needs.
    """
    if OWN_VERIFIER not in names:
        return
    records: dict[Path | str, list[Record]] = {file: list(read_records(file)) for file in files if file.is_file()}
    with closing(build_grader(grader, options)) as built:
        check_records(built, records)


def build_verifier(rl_config: Any, grader: str, options: Mapping[str, Any]) -> Grader:
    """Build the grader that ``rl_config.verifier_function`` names; ``grader`` and ``options`` are for ``coca``."""
    own = OWN_VERIFIER in rl_config.verifier_function
    return build_grader(grader, options) if own else MindSpeedVerifier(rl_config)
