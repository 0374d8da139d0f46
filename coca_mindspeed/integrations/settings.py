"""Settings, version check and grading that the integrations share."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from packaging.specifiers import SpecifierSet
from pydantic import Field

from coca_mindspeed.data.export import record_of
from coca_mindspeed.errors import CocaError, Problem, raise_problems
from coca_mindspeed.grading.own import FaultTolerantGrader
from coca_mindspeed.grading.registry import build_grader, check_records
from coca_mindspeed.grading.unevaluated import RejectUnevaluated
from coca_mindspeed.scoring.settings import ScoringSettings, checked_section


class IntegrationSettings(ScoringSettings):
    """The section ``coca`` of the cluster engines, with the stage of the method."""

    stage: int = Field(0, ge=0, description="index into the method's stages; only sequential has two")


def integration_settings(section: Mapping[str, Any], *, clip: str, aggregation: str) -> IntegrationSettings:
    """Validate a section ``coca`` (docs/verl.md); raises ``ConfigError`` with all problems.

    ``clip`` and ``aggregation`` name the framework's own options, which take the place of the method's.
    """
    settings = checked_section(IntegrationSettings, section)
    elsewhere = {
        "method.clip": f"the clip is {clip}",
        "method.loss_aggregation": f"the aggregation is {aggregation}",
        "method.entropy_bonus": "the local engine alone has it",
        "allow_open_thinking": "chat templates are not checked",
    }
    given = {*settings.model_fields_set, *(f"method.{key}" for key in settings.method.model_fields_set)}
    unread = {key: f"not set; {why}" for key, why in elsewhere.items() if key in given}
    problems = [Problem("elsewhere", f"coca.{key}", {}, expected) for key, expected in unread.items()]
    stages = settings.method.training_method.stages
    if settings.stage >= len(stages):
        expected = f"less than {len(stages)}, the number of stages of {settings.method.name}"
        problems.append(Problem("stage", "coca.stage", settings.stage, expected))
    raise_problems(problems)
    return settings


def check_version(package: str, tested: str) -> None:
    """Raise ``CocaError`` for a release that was not tested: the integrations override private functions.

    ``package`` is the distribution, ``tested`` a version specifier, as in setup.py.
    """
    found = version(package)
    if not SpecifierSet(tested).contains(found):
        raise CocaError(f"{package} {found} is installed, {tested} was tested: pip install '{package}{tested}'")


class RowGrader:
    """Grades answers to the rows that ``coca-mindspeed data export`` writes."""

    def __init__(self, settings: IntegrationSettings) -> None:
        """Raise ``GradingError`` for an unknown option, or if something that the grader needs is missing."""
        self._checked = build_grader(settings.grader, settings.grading)
        grader = FaultTolerantGrader(self._checked)
        self._grader = RejectUnevaluated(grader) if settings.require_evaluated else grader

    def check(self, name: str, texts: Sequence[Any]) -> None:
        """Check the column ``record`` of the data set ``name``; raises ``DataError`` with the row."""
        rows = enumerate(texts, start=1)
        check_records(self._checked, {name: [record_of({"record": text}, f"{name}: row {row}") for row, text in rows]})

    def grade(self, texts: Sequence[Any], answers: Sequence[str]) -> list[bool | None]:
        """Verdicts on answers to records; None: could not be graded."""
        records = [record_of({"record": text}, "column 'record'") for text in texts]
        return [verdict.correct_or_none for verdict in self._grader.grade(records, answers)]
