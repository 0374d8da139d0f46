"""An alarm from labels that come later: whether answers still are as right as the calibration says.

Each label is a bet against "nothing has changed": the capital of the bet grows by ``1 + stake * (x - expected)``,
whose mean is at most 1 while nothing has changed.  It starts anew from 1 wherever it has fallen below (a CUSUM of
evidence), so old good times do not have to be undone first, and the mean number of labels between false alarms is at
least the ``run_length`` at which it rings (Shin, Ramdas and Rinaldo, 2022).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_STAKES = (0.1, 0.25, 0.5, 0.9)


@dataclass
class EvidenceCusum:
    """Evidence that the mean of numbers in [-1, 1] has risen above 0.

    Attributes:
        run_length: numbers between false alarms on average, at least.
        alarm: whether it has ever rung.
    """

    run_length: float
    alarm: bool = False
    _capital: list[float] = field(default_factory=lambda: [1.0] * len(_STAKES))

    def add(self, value: float, scale: float = 1.0) -> None:
        """Take a number.

        Args:
            value: in [-1, 1]; its mean is at most 0 while nothing has changed.
            scale: by which ``value`` may be multiplied and still be above -1.
        """
        self._capital = [
            max(capital, 1.0) * (1 + stake * scale * value)
            for capital, stake in zip(self._capital, _STAKES, strict=True)
        ]
        # The mean of several CUSUMs of evidence is one itself.
        self.alarm = self.alarm or self.evidence >= 1

    @property
    def evidence(self) -> float:
        """Logarithm of the capital as a share of that at the alarm; 0 or less: none, 1: alarm."""
        mean = sum(self._capital) / len(self._capital)
        return math.log(mean) / math.log(self.run_length)


class DriftAlarm:
    """Watches whether confidences are too high or too low, and whether a certified error is exceeded."""

    def __init__(self, run_length: float, error: float | None = None) -> None:
        """Begin.

        Args:
            run_length: labels between false alarms of each watch, on average at least.
            error: certified share of wrong answers among those that are given; None: not watched.
        """
        self.error = error
        self.watches = {name: EvidenceCusum(run_length) for name in ("overconfident", "underconfident")}
        if error is not None:
            self.watches["risk"] = EvidenceCusum(run_length)

    def label(self, confidence: float | None, correct: bool, *, answered: bool) -> None:
        """Take a label.

        Args:
            confidence: that was decided by; None says nothing about calibration.
            correct: the late verdict.
            answered: whether the answer was given by its confidence, which is what an error was certified for.
        """
        if confidence is not None:
            self.watches["overconfident"].add(confidence - correct)
            self.watches["underconfident"].add(correct - confidence)
        if self.error is not None and answered:
            # A right answer moves by -error only, so the stake may be larger than for numbers down to -1.
            self.watches["risk"].add((not correct) - self.error, scale=1 / max(self.error, 0.05))

    def alarms(self) -> Sequence[str]:
        """The watches that have rung."""
        return [name for name, watch in self.watches.items() if watch.alarm]
