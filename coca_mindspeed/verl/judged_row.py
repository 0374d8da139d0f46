"""What the reward manager tells the trainer about one response, in values that verl carries and dumps as they are."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.evaluation.predictions import Prediction, prediction_from_json
from coca_mindspeed.grading.verdict import Outcome, Verdict


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """One judged response.

    Attributes:
        prediction: the response as an evaluation sees it; ``correct`` is the grader's verdict, None where ungradable.
        trained: the verdict that training rewards, which may be stricter (``coca.require_evaluated``).
        confidence_tokens: tokens up to the end of the stated confidence, or those that stand in for it.  Those of the
            confidence *segment*, 0 for RLCR, travel apart: :data:`.segment_loss.CONFIDENCE_SEGMENT_TOKENS`.
    """

    prediction: Prediction
    trained: Verdict
    confidence_tokens: int

    def columns(self) -> dict[str, Any]:
        """As verl's ``reward_extra_info``; ``acc`` is the name by which verl's own validation finds an accuracy.

        verl's accuracy knows no third state: there an ungradable answer counts as wrong.
        """
        return {
            "acc": float(bool(self.prediction.correct)),
            "prediction": asdict(self.prediction),
            "verdict": self.trained.outcome.value,
            "reason": self.trained.reason,
            "confidence_tokens": self.confidence_tokens,
        }

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], where: str) -> "JudgedRow":
        """Back from verl.

        Raises:
            TrainingError: another reward manager wrote them.
        """
        if missing := {"prediction", "verdict", "reason", "confidence_tokens"} - columns.keys():
            raise TrainingError(
                f"{where}: no {min(missing)!r} in verl's reward_extra_info {sorted(columns)}: is "
                "reward.reward_manager.name=coca?"
            )
        return cls(
            prediction_from_json(columns["prediction"], where),
            Verdict(Outcome(columns["verdict"]), columns["reason"]),
            int(columns["confidence_tokens"]),
        )
