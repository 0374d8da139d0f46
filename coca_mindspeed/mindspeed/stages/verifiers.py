"""From the verifiers that a MindSpeed-RL configuration names to a grader; a name that nobody knows is refused."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import ConfigError, GradingError
from coca_mindspeed.grading.label_check import check_records
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.grading.verdict import Grader, Outcome, Verdict
from coca_mindspeed.utils.cpus import usable_cpus

#: In ``rl_config.verifier_function``: this project's grader, which ``coca.grader`` names.
OWN_VERIFIER = "coca"

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

# Of those, the ones that several threads may ask at once: ``acc`` and ``strict_format`` send one answer after the other
# to a pool of processes and wait for it, the rest look for patterns.  Others may time out by a signal, which needs the
# main thread.
_AT_ONCE = frozenset({"acc", "format", "step", "strict_format"})
# A quarter of that pool: an answer that timed out goes on in its process, and the next must find another in time.
_MOST_AT_ONCE = 4


class MindSpeedVerifier:
    """MindSpeed-RL's own verifiers as a grader: a weighted score of 1 is right, 0 or a penalty is wrong.

    ``acc`` takes 0.5 off for a wrong answer and 1 for one without a box, ``acc_for_dapo`` 1 for either.
    Where ``acc`` is among them up to four parts of the answers wait at once, and no more than there are CPUs: it calls
    an answer wrong that takes longer than a second.
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

        def score(part: slice) -> list[float]:
            scores: list[float] = rule_verifier.verifier(answers[part], {"labels": labels[part]}, self._config)[0]
            return scores

        names = set(self._config.verifier_function)
        at_once = min(usable_cpus(), _MOST_AT_ONCE, len(answers)) if "acc" in names and names <= _AT_ONCE else 1
        if at_once <= 1:
            return score(slice(None))
        size = -(-len(answers) // at_once)
        parts = [slice(start, start + size) for start in range(0, len(answers), size)]
        with ThreadPoolExecutor(len(parts)) as threads:
            return list(chain.from_iterable(threads.map(score, parts)))

    def close(self) -> None:
        """Nothing is held."""


def check_names(names: Sequence[str]) -> None:
    """Refuse verifier names that cannot be used, before anything starts.

    Raises:
        ConfigError: unknown names, or one of ours among others.
    """
    if not names:
        raise ConfigError("rl_config.verifier_function is empty; name at least one verifier")
    known = (OWN_VERIFIER, *MINDSPEED_VERIFIERS)
    for name in names:
        if name not in known:
            raise ConfigError(f"rl_config.verifier_function: unknown verifier {name!r}; known: {', '.join(known)}")
    if len(names) > 1 and OWN_VERIFIER in names:
        raise ConfigError(
            f"rl_config.verifier_function: {list(names)}: an answer is right or wrong by one rule, so "
            f"{OWN_VERIFIER!r} stands alone; coca.grader: auto lets every record choose its grader"
        )


def try_verifier(names: Sequence[str], grader: str, options: Mapping[str, Any], files: Sequence[Path]) -> None:
    """Build the graders that a run needs, have them check every gold answer, and close them again.

    Args:
        names: ``rl_config.verifier_function``; MindSpeed-RL's own verifiers need nothing.
        grader: this project's, by name.
        options: of this project's grader.
        files: of records, which also say what ``auto`` has to build; those that are not there are left out.

    Raises:
        GradingError: a grader cannot be built here: no sandbox, a wrong option.
        MissingDependencyError: a package that it needs is not installed.
        DataError: a record lacks what its answers are graded by.
    """
    if OWN_VERIFIER not in names:
        return
    records: dict[Path | str, list[Record]] = {file: list(read_records(file)) for file in files if file.is_file()}
    with closing(build_grader(grader, options)) as built:
        check_records(built, records)


def build_verifier(rl_config: Any, grader: str, options: Mapping[str, Any]) -> Grader:
    """The grader that ``rl_config.verifier_function`` asks for.

    Args:
        rl_config: MindSpeed-RL's ``RLConfig``.
        grader: this project's, by name, for ``coca``.
        options: of this project's grader (number of processes, time limits, ...); see docs/grading.md.

    Raises:
        ConfigError: as :func:`check_names`.
    """
    names = list(rl_config.verifier_function)
    check_names(names)
    return build_grader(grader, options) if OWN_VERIFIER in names else MindSpeedVerifier(rl_config)
