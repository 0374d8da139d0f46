"""The demo: warm up the tiny model to be over-confident, train it, and report before and after."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.run_directory import find_run

_INTRODUCTION = """\
A tiny model was warmed up to answer arithmetic with a confidence that means nothing, then trained. Each held-out
question is answered once at temperature 1, before and after."""
_NOTES = "Numbers are written units first: 12 + 34 = 46 is `2100+4300` and `64`.\n"


def run_demo(
    seed: int,
    output: Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Run the demo and write its files to ``output``; print a table, and return the content of ``summary.json``.

    ``overrides`` are those of the run ``demo``.  ``resume`` continues a stopped demo, ``overwrite`` replaces one.

    Raises:
        ConfigError: ``output`` holds other files, or nothing would be evaluated.
    """
    composed = compose_run("demo", [f"seed={seed}", *overrides])
    if composed.run.evaluation.final_questions == 0:
        raise ConfigError("evaluation.final_questions=0: the demo shows answers before and after; at least 1 is needed")
    if composed.run.confidence_start.questions:
        raise ConfigError(
            f"confidence_start.questions={composed.run.confidence_start.questions}: the demo starts from a model whose "
            "confidences mean nothing; train demo ... has such a start"
        )
    find_run(output, resume=resume, overwrite=overwrite)
    from coca_mindspeed.local.report import write_run_report  # torch and transformers take seconds to import
    from coca_mindspeed.local.setup import LocalRun

    with LocalRun(composed, output, resume=resume, overwrite=overwrite, show_progress=show_progress) as run:
        run.execute(functools.partial(run.evaluate_before, log=False), run.train, run.evaluate)
    return write_run_report(run, _INTRODUCTION, _NOTES)
