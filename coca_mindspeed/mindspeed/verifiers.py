"""From the verifier names of a MindSpeed-RL configuration to graders; a name that nobody knows is refused."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, GradingError
from coca_mindspeed.grading.exact import ExactGrader
from coca_mindspeed.grading.verdict import Grader, Outcome, Verdict

#: ``rl_config.verifier_function`` -> this project's grader.
OWN_VERIFIERS = {"coca_math": "math", "coca_code": "code", "coca_factual": "factual", "coca_exact": "exact"}

#: The names that MindSpeed-RL's ``rule_verifier.verifier`` knows; it scores 0 for any other, in silence.
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
    """MindSpeed-RL's own verifiers as a grader: the weighted score must be 0 or 1."""

    def __init__(self, rl_config: Any) -> None:
        self._config = rl_config

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        from mindspeed_rl.models import rule_verifier

        scores, _ = rule_verifier.verifier(list(answers), {"labels": [r.answer for r in records]}, self._config)
        for score in scores:
            if score not in (0, 1):
                raise GradingError(
                    f"rl_config.verifier_function {list(self._config.verifier_function)} scored an answer {score}; "
                    "correctness must be 0 or 1, because the confidence is trained towards a success rate"
                )
        return [Verdict(Outcome.RIGHT if score else Outcome.WRONG) for score in scores]

    def close(self) -> None:
        """Nothing is held."""


class GraderByCategory:
    """Several of our graders, each for the records of its own category."""

    def __init__(self, graders: Mapping[str, Grader]) -> None:
        self._graders = graders

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        verdicts: list[Verdict | None] = [None] * len(records)
        for category in dict.fromkeys(record.category for record in records):
            if category not in self._graders:
                raise GradingError(
                    f"no verifier for records of category {category!r}; rl_config.verifier_function has graders for "
                    f"{', '.join(self._graders)}"
                )
            rows = [i for i, record in enumerate(records) if record.category == category]
            graded = self._graders[category].grade([records[i] for i in rows], [answers[i] for i in rows])
            for row, verdict in zip(rows, graded, strict=True):
                verdicts[row] = verdict
        return [verdict for verdict in verdicts if verdict is not None]

    def close(self) -> None:
        for grader in self._graders.values():
            grader.close()


def check_names(names: Sequence[str]) -> None:
    """Refuse verifier names that cannot be used, before anything starts.

    Raises:
        ConfigError: unknown names, or our verifiers mixed with MindSpeed-RL's.
    """
    if not names:
        raise ConfigError("rl_config.verifier_function is empty; name at least one verifier")
    known = (*OWN_VERIFIERS, *MINDSPEED_VERIFIERS)
    for name in names:
        if name not in known:
            raise ConfigError(f"rl_config.verifier_function: unknown verifier {name!r}; known: {', '.join(known)}")
    own = [name for name in names if name in OWN_VERIFIERS]
    if own and len(own) != len(names):
        raise ConfigError(
            f"rl_config.verifier_function: {list(names)} mixes this project's verifiers with MindSpeed-RL's; "
            "an answer is right or wrong by one rule"
        )
    if len(own) > 1 and "coca_exact" in own:
        raise ConfigError("rl_config.verifier_function: coca_exact belongs to no category and stands alone")


def build_verifier(rl_config: Any, options: Mapping[str, Any]) -> Grader:
    """The grader that ``rl_config.verifier_function`` asks for.

    Args:
        rl_config: MindSpeed-RL's ``RLConfig``.
        options: passed to this project's graders (number of processes, time limits, ...).

    Raises:
        ConfigError: as :func:`check_names`.
    """
    names = list(rl_config.verifier_function)
    check_names(names)
    if names[0] not in OWN_VERIFIERS:
        return MindSpeedVerifier(rl_config)
    graders = {OWN_VERIFIERS[name]: _own_grader(OWN_VERIFIERS[name], options) for name in names}
    return next(iter(graders.values())) if len(graders) == 1 else GraderByCategory(graders)


def _own_grader(name: str, options: Mapping[str, Any]) -> Grader:
    if name == "exact":
        return ExactGrader()
    import coca_mindspeed.grading as grading

    build: Callable[[str, Mapping[str, Any]], Grader] = grading.build_grader  # type: ignore[attr-defined]
    return build(name, options)
