"""Maps from stated confidence to the fraction of correct answers, and the file of a calibration.

The file holds a map, a certificate or both, with the model, prompt and sampling that they hold for.
"""

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from coca_mindspeed.config.schema import Section
from coca_mindspeed.errors import ConfigError, validation_problems
from coca_mindspeed.evaluation.binning import Floats
from coca_router.guarantee import Certificate

MapKind = Literal["platt", "isotonic"]

_EDGE = 1e-4  # stated 0 and 1 are clipped, for their logarithms


class CalibrationMap(Section):
    """A fitted non-decreasing map.

    ``platt``: logistic in logit(s); ``isotonic``: piecewise linear between knots.
    """

    kind: MapKind
    coefficients: list[float] = Field(default_factory=list, description="of the logistic map: weight and intercept")
    knots: list[tuple[float, float]] = Field(default_factory=list, description="of the isotonic map")

    def __call__(self, confidence: Floats) -> Floats:
        """Recalibrate confidences of any shape; NaN stays NaN."""
        if self.kind == "isotonic":
            x, y = np.array(self.knots).T
            return np.asarray(np.where(np.isnan(confidence), np.nan, np.interp(confidence, x, y)))
        weight, intercept = self.coefficients
        return np.asarray(1 / (1 + np.exp(-(weight * logit(confidence) + intercept))))


def logit(confidence: npt.ArrayLike) -> Floats:
    """Log-odds of clipped confidences."""
    s = np.clip(confidence, _EDGE, 1 - _EDGE)
    return np.asarray(np.log(s) - np.log1p(-s))


class Identity(Section):
    """Model, prompt and sampling that a calibration or certificate holds for."""

    model: str = Field(description="its name at the backend")
    source: Literal["stated", "answer_logprob"] = Field("stated", description="of the confidences")
    prompt_sha256: str = Field(description="of the system prompt")
    temperature: float = Field(ge=0, description="of sampling")
    sampling: dict[str, int | float] = Field(
        default_factory=dict, description="sampling parameters besides temperature that are not neutral (top_p, ...)"
    )

    def require(
        self, model: str, prompt: str, temperature: float | None, *, where: str, source: str = "stated"
    ) -> None:
        """Raise ConfigError for another model, source, system prompt or temperature (None: not checked).

        ``where`` begins the message.
        """
        asked = {"model": model, "source": source, "prompt_sha256": prompt_hash(prompt), "temperature": temperature}
        for name, value in asked.items():
            own = getattr(self, name)
            if value is not None and own != value:
                if name == "prompt_sha256":
                    reason = "fitted with another system prompt; fit one by calibrate --system-prompt"
                else:
                    reason = f"fitted for {name} {own!r}, found {value!r}; fit one for it"
                raise ConfigError(f"{where}: the calibration was {reason}")


class Calibration(Section):
    """The content of the file."""

    version: int = Field(2, ge=2, le=2, description="of this file's form")
    identity: Identity
    labels: int = Field(ge=1, description="valid labelled confidences")
    curve: CalibrationMap | None = Field(description="null: all labels are right, so that none can be fitted")
    certificate: Certificate | None = Field(None, description="the certified set of accepted answers, if one was asked")

    def recalibrate(self, confidence: float) -> float:
        """Apply the curve, which is not null."""
        assert self.curve is not None
        return float(self.curve(np.array([confidence]))[0])


def prompt_hash(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()


def read_calibration(path: Path) -> Calibration:
    """Read the file of ``coca-router calibrate``; raises ConfigError if there is none."""
    try:
        return Calibration.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        problems = validation_problems(error)
        expected = "a file of this version of `coca-router calibrate`"
        raise ConfigError(f"{path}: expected {expected}; {problems[0]}", problems) from error
