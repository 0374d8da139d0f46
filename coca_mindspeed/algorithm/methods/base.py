"""Input and output of a training method, and bases for a custom method.

``[P, G]``: P prompts with G responses each.  Numbers are float64: in float32, the rewards of
confidences .1 and .9 at a success rate of .5 would differ by 2e-8, which normalisation (eps 1e-6) would amplify.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from coca_mindspeed.algorithm.parsing import SEGMENTS, SYSTEM_PROMPTS, ConfidencePosition

if TYPE_CHECKING:
    from torch import Tensor as Tensor

    from coca_mindspeed.algorithm.advantages import Advantage as Advantage
    from coca_mindspeed.algorithm.advantages import Normalisation as Normalisation
else:  # types of arguments; importing torch for them would take seconds
    Tensor = Advantage = Normalisation = Any

#: The methods of this package by name; :mod:`coca_mindspeed.algorithm.methods` fills it.
METHODS: "dict[str, TrainingMethod]" = {}


class GroupOutcomes(NamedTuple):
    """Outcomes of the responses.  A response with an ungradable answer takes no part and is NaN everywhere.

    Attributes:
        correct: float64 ``[P, G]``, 1 or 0, ``1[answer is correct]`` (paper, equation 6); NaN: takes no part.
        stated: float64 ``[P, G]``, the stated confidence; NaN also where the response states no valid one.
        gesr: float64 ``[P, 1]``, the mean of ``correct`` in each group (equation 7).
        bonus: float64 ``[P, G]``, added to the score of a valid confidence; None: the settings have none.
        invalid_reward: reward in place of the Brier score for a response without a valid confidence.
        stated_after: like ``stated``, the second confidence of a method that asks for two; None: there is none.
    """

    correct: Tensor
    stated: Tensor
    gesr: Tensor
    bonus: Tensor | None
    invalid_reward: float
    stated_after: Tensor | None = None

    def brier(self, target: Tensor, stated: Tensor | None = None) -> Tensor:
        """``-(s - target)^2`` (equation 8, where the target is GESR), float64 ``[P, G]``; NaN: takes no part."""
        stated = self.stated if stated is None else stated
        return self.scored(-(stated - target).square(), stated)

    def scored(self, score: Tensor, stated: Tensor) -> Tensor:
        """``score`` of each ``stated`` confidence; ``invalid_reward`` if it is missing; NaN: takes no part."""
        score = score.masked_fill(stated.isnan(), self.invalid_reward)
        return score.masked_fill(self.correct.isnan(), float("nan"))


#: Advantages of segments by their names in ``SEGMENTS``; segments not in the dict get advantage 0.
SegmentAdvantages = dict[str, Advantage]


class TrainingMethod(Protocol):
    """A training method; CONTRIBUTING.md says how to add one."""

    @property
    def name(self) -> str: ...

    @property
    def system_prompt(self) -> str:
        """System prompt that describes the response format."""

    @property
    def confidence_position(self) -> ConfidencePosition:
        """Place of the confidence: before the answer, after it, or both."""

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the training stages, run one after the other."""

    def advantages(self, outcomes: GroupOutcomes, normalise: Normalisation, stage: str) -> SegmentAdvantages:
        """Advantages of each segment.

        ``normalise.within_group``, ``normalise.of_confidence`` (for scores of confidences) and ``normalise.by_scale``
        (for a method's one reward) compute them from rewards, float64 ``[P, G]``, NaN where a response takes no part.
        ``stage`` is one of :attr:`stages`.
        """


def training_method(name: str) -> TrainingMethod:
    """Return the method called ``name``; raise ``ValueError`` if there is none."""
    if name not in METHODS:
        raise ValueError(f"unknown training method {name!r}; known methods: {', '.join(METHODS)}")
    return METHODS[name]


@dataclass(frozen=True)
class MethodDefaults:
    """Base of the methods; the defaults are one stage, and the confidence before the answer."""

    name: str = ""
    confidence_position: ConfidencePosition = "first"
    stages: tuple[str, ...] = ("train",)
    rewards_confidence: bool = True

    @property
    def system_prompt(self) -> str:
        return SYSTEM_PROMPTS[self.confidence_position]


@dataclass(frozen=True)
class OneReward(MethodDefaults):
    """Base of the methods with one reward, which falls on every token of the response."""

    def reward(self, outcomes: GroupOutcomes, stage: str) -> Tensor:
        """float64 ``[P, G]``, NaN where a response takes no part."""
        raise NotImplementedError

    def advantages(self, outcomes: GroupOutcomes, normalise: Normalisation, stage: str) -> SegmentAdvantages:
        advantage = normalise.by_scale(self.reward(outcomes, stage))
        return dict.fromkeys(SEGMENTS[self.confidence_position], advantage)
