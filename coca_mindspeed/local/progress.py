"""The progress bar of training, with means of the last steps."""

import math
from collections import deque
from collections.abc import Mapping

from coca_mindspeed.utils.progress import Pace, StepProgress

# The most important first.
_NUMBERS = {
    "rollout/accuracy": "accuracy {:.3f}",
    "rollout/ece": "ECE {:.3f}",
    "reward/confidence": "confidence reward {:.3f}",
    "tokens_per_second/rollout": "tokens/s {:,.0f}",
}


class TrainingProgress(StepProgress):
    """Progress of training: means of accuracy, ECE, confidence reward and tokens/s over the last steps."""

    def __init__(self, total: int, enabled: bool, done: int = 0, *, interval: int = 0) -> None:
        """There is an evaluation every ``interval`` steps; 0: none."""
        super().__init__(total, enabled, done, title="training")
        self._pace = Pace(total, interval)
        self._rows: deque[Mapping[str, float]] = deque(maxlen=10)

    def advance(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        self._rows.append({**metrics, **timing})
        self._pace.add_training_step(timing)
        self._done = step  # the pace is that of the timing row, evaluations apart
        parts = []
        for key, text in _NUMBERS.items():
            if known := [row[key] for row in self._rows if math.isfinite(row.get(key, math.nan))]:
                parts.append(text.format(sum(known) / len(known)))
        steps = len(self._rows)
        self.show(step, *parts, means=f"mean of {steps} steps: " if steps > 1 else "")
