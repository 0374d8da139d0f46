"""Settings, version check and grading that the integrations share."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from packaging.specifiers import SpecifierSet
from pydantic import Field

from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.config.prompt_form import contains_prompt
from coca_mindspeed.config.requirements import Requirement, View, constant_rows, required
from coca_mindspeed.config.values import Engine, KeyFacts, unread_keys
from coca_mindspeed.data.export import record_of
from coca_mindspeed.errors import CocaError, DataError, Problem, find_problems, raise_problems
from coca_mindspeed.grading.custom import FaultTolerantGrader
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.grading.unevaluated import reject_unevaluated
from coca_mindspeed.scoring.probe import check_custom_grader
from coca_mindspeed.scoring.settings import ScoringSettings, checked_section, method_section
from coca_mindspeed.upstream.manifest import matching_manifest
from coca_mindspeed.utils.text_formats import read_yaml

#: Reasons that requirements on the options of several frameworks have; the others are in ``required_options.yaml``.
ONE_WEIGHT = "one weight for a whole response scales the confidence's tokens by the answer's"
ALL_EQUAL = "groups whose answers are all right, or all wrong, train the confidence too"
Share = Annotated[float, Field(gt=0)]
_NO_STEPS = KeyFacts(
    instead={
        "ms_swift": "ms-swift does not tell its step; train each stage in a run of its own",
        "slime": "slime does not tell its step; train each stage in a run of its own",
    }
)


class IntegrationSettings(ScoringSettings):
    """The section ``coca`` of the cluster engines, with the stages of the method."""

    stage: int | None = Field(None, ge=0, description="index of the only stage to train; null: all, one after another")
    stage_shares: Annotated[tuple[Share, ...] | None, _NO_STEPS] = Field(
        None, description="share of the trainer's steps for each stage of the method; null: equal shares"
    )

    def stage_at(self, step: int, total: int) -> int:
        """The index of the stage in which ``step`` (from 0) of ``total`` steps is taken; ``total`` 0: the first."""
        if self.stage is not None or not total:
            return self.stage or 0
        ends = list(accumulate(self.stage_shares or (1.0,) * len(self.method.training_method.stages)))
        return bisect_right([math.ceil(total * end / ends[-1] - 1e-9) for end in ends[:-1]], step)


def rows_of_process(number: int, rank: int) -> slice:
    """The rows of process ``rank`` among those of all processes in their order, with ``number`` rows each."""
    return slice(rank * number, (rank + 1) * number)


def integration_settings(section: Mapping[str, Any], engine: Engine) -> IntegrationSettings:
    """Validate a section ``coca`` (docs/verl.md) for an integration.

    Raises ``ConfigError`` with all problems; one is a key that is given, although the engine does not read it.
    """
    settings = checked_section(IntegrationSettings, section)
    given = {*section, *(f"method.{key}" for key in method_section(section.get("method", {})))}
    unread = unread_keys(IntegrationSettings, engine)
    problems = [
        Problem("elsewhere", f"coca.{key}", {}, f"not set; {instead}")
        for key, instead in unread.items()
        if key in given
    ]
    follows_steps = "stage_shares" not in unread
    rows = _SHARES if follows_steps else (_ONE_STAGE, *_SHARES)
    problems += [each._replace(key=f"coca.{each.key}") for each in find_problems(settings, [required(rows)])]
    try:
        _ = settings.stage is None or settings.method.checked_stage(settings.stage)
    except ValueError as error:
        problems.append(Problem("stage", "coca.stage", settings.stage, str(error).removeprefix("stage: ")))
    raise_problems(problems)
    return settings


def _stage_names(settings: IntegrationSettings) -> str:
    stages = settings.method.training_method.stages
    return f"{len(stages)} stages of {settings.method.name} ({', '.join(stages)})"


_ONE_STAGE: Requirement[IntegrationSettings] = Requirement(
    "stage",
    "stage",
    lambda stage, settings: stage is not None or len(settings.method.training_method.stages) == 1,
    lambda settings: f"an index of the {_stage_names(settings)}",
    "train each stage in a run of its own",
)
_SHARES: tuple[Requirement[IntegrationSettings], ...] = (
    Requirement(
        "stage",
        "stage_shares",
        lambda shares, settings: shares is None or len(shares) == len(settings.method.training_method.stages),
        lambda settings: f"a share for each of the {_stage_names(settings)}",
    ),
    Requirement(
        "stage",
        "stage_shares",
        lambda shares, settings: shares is None or settings.stage is None,
        "not set together with coca.stage",
    ),
)


def option_rows(framework: str) -> Iterator[Requirement[View]]:
    """The rows of ``required_options.yaml`` for a framework."""
    return constant_rows(read_yaml(Path(__file__).with_name("required_options.yaml"))[framework])


def check_options(rows: Sequence[Requirement[View]], args: Any, title: str) -> None:
    """Raise ``ConfigError`` with all problems of a framework's options, which are attributes; an absent one is None."""
    raise_problems(find_problems(View(vars(args)), [required(rows)]), title)


def check_version(package: str, tested: str) -> None:
    """Raise ``CocaError`` for a release that was not tested: the integrations override private functions.

    ``package`` is the distribution, ``tested`` a version specifier, as in setup.py.
    """
    found = version(package)
    if not SpecifierSet(tested).contains(found):
        raise CocaError(f"{package} {found} is installed, {tested} was tested: pip install '{package}{tested}'")


def check_sources(package: str) -> None:
    """Raise ``ManifestError`` naming what differs, if an installed package has other sources than its manifests.

    Its version does not count; a package that cannot be found is not checked.
    """
    spec = find_spec(package)
    for location in (spec and spec.submodule_search_locations) or ():
        matching_manifest(Path(location).parent, package=package)


def check_prompt(messages: Sequence[Mapping[str, Any]], method: MethodSettings, where: str) -> None:
    """Raise ``DataError`` unless a prompt contains the method's prompt, which asks for the confidence."""
    wanted = method.system_prompt
    if not contains_prompt("\n".join(str(message["content"]) for message in messages), wanted):
        raise DataError(
            f"{where}: the prompt should contain {wanted!r}, found {messages[0]['content']!r:.120}; export the file "
            "for this method (coca-mindspeed data export, --prompt and --thinking), or put its system prompt into it"
        )


def check_held_out(datasets: Mapping[str, Any]) -> None:
    """Refuse an evaluation on the prompts of the training, in any order.

    ``datasets`` has columns by data set, that of the training as ``train_dataset``; data sets without a length are
    streamed, and not compared.  Raises ``ConfigError`` with a problem for each evaluation.
    """
    sized = {name: dataset["prompt"] for name, dataset in datasets.items() if hasattr(dataset, "__len__")}
    train = sized.pop("train_dataset", ())
    same = [
        name
        for name, prompts in sized.items()
        if len(prompts) == len(train) and sorted(map(str, prompts)) == sorted(map(str, train))
    ]
    reason = "must hold other prompts than train_dataset, so that they are held out"
    fix = "hold some out: coca-mindspeed data prepare --validation 0.1"
    raise_problems([Problem("same-data", name, {}, reason, fix) for name in same])


class RowGrader:
    """Grades answers to the rows that ``coca-mindspeed data export`` writes."""

    def __init__(self, settings: IntegrationSettings) -> None:
        """Raise ``GradingError`` for an unknown option, or if something that the grader needs is missing."""
        self._checked = build_grader(settings.grader, settings.grading)
        self._grader = FaultTolerantGrader(self._checked)
        self._require_evaluated, self._name, self._method = settings.require_evaluated, settings.grader, settings.method

    def check(self, name: str, texts: Sequence[Any]) -> None:
        """Check the column ``record`` of the data set ``name``; raises ``DataError`` with the row."""
        rows = enumerate(texts, start=1)
        records = [record_of({"record": text}, f"{name}: row {row}") for row, text in rows]
        self._checked.check(records)
        check_custom_grader(self._checked, self._name, records, self._method)

    def grade(self, texts: Sequence[Any], answers: Sequence[str]) -> list[bool | None]:
        """Verdicts on answers to records; None: could not be graded."""
        records = [record_of({"record": text}, "column 'record'") for text in texts]
        verdicts = self._grader.grade(records, answers)
        if self._require_evaluated:
            verdicts = reject_unevaluated(records, answers, verdicts)
        return [verdict.correct_or_none for verdict in verdicts]
