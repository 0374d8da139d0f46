"""Checks of a run's grader: its gold answers."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.mindspeed.start.records import read_record_file, record_files
from coca_mindspeed.mindspeed.upstream_keys import OWN_VERIFIER


def check_verifier(names: Sequence[str], grader: str, options: Mapping[str, Any], files: Sequence[Path]) -> None:
    """Build this project's grader if ``rl_config.verifier_function`` names it, check every gold answer, and close it.

    Missing files are skipped; MindSpeed-RL's own verifiers need no check.  Raises GradingError or
    MissingDependencyError if a grader cannot be built here, DataError if a record lacks what its grader needs.
    """
    if OWN_VERIFIER not in names:
        return
    records = [record for file in files if file.is_file() for record in read_record_file(file)]
    with closing(build_grader(grader, options)) as built:
        built.check(records)


def check_gold_answers(run: RunConfig) -> None:
    """Check the records of a run's files and their gold answers as the driver does.

    Raises as :func:`check_verifier`.
    """
    names = (run.mindspeed_rl.get("rl_config") or {}).get("verifier_function") or ()
    check_verifier(names, run.data.grader, run.data.grader_options, record_files(run.data.train, run.data.evaluate))
