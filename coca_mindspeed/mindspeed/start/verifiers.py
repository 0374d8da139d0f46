"""Checks of a run's grader: its gold answers, and whether verifiers of MindSpeed-RL tell right answers from wrong ones.

The verifiers run in a process of their own: this one would import MindSpeed-RL before the hooks are applied.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.config.checks import missing_data
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import Problem, raise_problems
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.mindspeed.cluster_run import ClusterRun
from coca_mindspeed.mindspeed.requirements import MindSpeedView
from coca_mindspeed.mindspeed.start.process import CPU_SHIM
from coca_mindspeed.mindspeed.start.verifier_scores import MODULE, score_answers
from coca_mindspeed.mindspeed.upstream_keys import OWN_VERIFIER
from coca_mindspeed.scoring.probe import Probe, check_custom_grader, make_probe
from coca_mindspeed.utils.console import print_text

_NAMES, _WEIGHTS = "rl_config.verifier_function", "rl_config.verifier_weight"
_HOMES = ("MEGATRON_HOME", "MINDSPEED_HOME", "MINDSPEED_LLM_HOME", "MINDSPEED_RL_HOME")
_SECONDS = 600.0


def check_verifier(start: ClusterRun, records: Sequence[Record]) -> None:
    """Build this project's grader if ``rl_config.verifier_function`` names it, check gold answers, and close it.

    A custom grader is tried with a right and a wrong answer.  Raises GradingError or MissingDependencyError if a grader
    cannot be built here, DataError if a record lacks what its grader needs.
    """
    data = start.run.data
    if OWN_VERIFIER not in MindSpeedView(start.values).verifiers:
        return
    with closing(build_grader(data.grader, data.grader_options)) as built:
        built.check(records)
        if records:
            check_custom_grader(built, data.grader, records, start.run.method)


def try_verifiers(
    values: Mapping[str, Any],
    records: Sequence[Record],
    method: MethodSettings,
    environment: Mapping[str, str],
    *,
    starts: bool,
    prefix: str = "",
) -> None:
    """Give each verifier of MindSpeed-RL in ``rl_config.verifier_function`` a right and a wrong answer.

    ``values`` has the section ``rl_config``, whose keys have ``prefix`` in messages; ``environment`` names the
    checkouts.  Says if they cannot be tried: without text answers or a checkout, and, unless the run ``starts``, if
    MindSpeed-RL cannot run them.  Raises ConfigError if a verifier does not tell the two apart, or their weighted
    scores are not 1 for the right answer and at most 0 for the wrong one.
    """
    view = MindSpeedView(values)
    names, weights = view.verifiers, view.value(_WEIGHTS)
    if not names or OWN_VERIFIER in names:
        return
    home = Path(environment.get("MINDSPEED_RL_HOME") or "/nonexistent")
    probe = make_probe(records, method)
    untried = f"coca-mindspeed: {prefix}{_NAMES}={names} was not tried with an answer"
    if probe is None:
        print_text(f"{untried}: no record of the run that is here has text for an answer", sys.stderr)
        return
    if not home.joinpath(*MODULE.split(".")).with_suffix(".py").is_file():
        print_text(f"{untried}: MINDSPEED_RL_HOME names no checkout of MindSpeed-RL", sys.stderr)
        return
    results = _ask(names, probe, environment)
    if (failure := next((text for text in results.values() if isinstance(text, str)), None)) and not starts:
        print_text(f"{untried}: MindSpeed-RL cannot run it here: {failure}", sys.stderr)
        return
    raise_problems(list(_problems(names, weights, probe, results, prefix)))


def check_gold_answers(start: ClusterRun, environment: Mapping[str, str], *, starts: bool = False) -> None:
    """Check a run's records, their gold answers and its verifiers; where it ``starts``, the records must be here.

    Raises ConfigError without them, and as :func:`check_verifier` and :func:`try_verifiers`.
    """
    if starts:  # they are read here, for all processes
        raise_problems(list(missing_data(start.run, start.key)))
    train, evaluate = start.records
    records, prefix = [*train, *evaluate], "" if start.native else "mindspeed_rl."
    check_verifier(start, records)
    try_verifiers(start.values, records, start.run.method, environment, starts=starts, prefix=prefix)


def _ask(names: Sequence[str], probe: Probe, environment: Mapping[str, str]) -> dict[str, Any]:
    """Scores of the probe's answers by the name of each verifier, or the text of its error.

    An error of the import has the name "".
    """
    on_npu = find_spec("torch_npu") is not None
    asked = {
        "paths": [environment[name] for name in _HOMES if environment.get(name)],
        "shim": None if on_npu else environment.get(CPU_SHIM),
        "names": list(names),
        "answers": probe.answers,
        "gold": probe.record.answer,
    }
    with tempfile.TemporaryDirectory() as place:
        question, result = Path(place, "asked.json"), Path(place, "scores.json")
        question.write_text(json.dumps(asked), encoding="utf-8")
        command = [sys.executable, "-m", score_answers.__module__, str(question), str(result)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return {"": f"no answer after {_SECONDS:.0f} seconds"}
        if not result.is_file():
            return {"": (done.stderr.strip().splitlines() or ["no output"])[-1]}
        scores: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return scores


def _problems(
    names: Sequence[str], weights: Sequence[float], probe: Probe, results: Mapping[str, Any], prefix: str
) -> Iterator[Problem]:
    where, key = f"{probe.record.name}, gold answer {probe.record.answer!r:.80}", f"{prefix}{_NAMES}"
    fix = f"set {key}=[{OWN_VERIFIER}], which grades by {'data' if prefix else 'coca'}.grader"
    failures = {name: text for name in ("", *names) if isinstance(text := results.get(name), str)}
    if failures:
        yield from (
            Problem("verifier", key, name or names, f"cannot be run: {text}", fix) for name, text in failures.items()
        )
        return
    for name in names:
        scores = dict(zip(probe.answers, results[name], strict=True))
        if not any(scores[right] > 0 and _least(scores, wrong) <= 0 for right, *wrong in probe.forms):
            reason = f"does not tell a right answer from a wrong one: {_shown(scores, probe)} for {where}"
            yield Problem("verifier", key, name, reason, fix)
            return
    if len(weights) != len(names):
        yield Problem("verifier-weights", f"{prefix}{_WEIGHTS}", weights, f"must have a weight for each of {names}")
        return
    columns = zip(*(results[name] for name in names), strict=True)
    totals = [sum(weight * score for weight, score in zip(weights, column, strict=True)) for column in columns]
    scores = dict(zip(probe.answers, totals, strict=True))
    if not any(scores[right] == 1 and _least(scores, wrong) <= 0 for right, *wrong in probe.forms):
        expected = "must add up to 1 for a right answer, and to at most 0 for a wrong one"
        reason = f"{expected}: {_shown(scores, probe)} for {where}"
        yield Problem("verifier-weights", f"{prefix}{_WEIGHTS}", list(weights), reason, fix)


def _shown(scores: Mapping[str, float], probe: Probe) -> str:
    right, wrong, *_ = probe.forms[-1]
    return f"{right!r} has {scores[right]:g}, {wrong!r} has {scores[wrong]:g}"


def _least(scores: Mapping[str, float], answers: Sequence[str]) -> float:
    return min(scores[answer] for answer in answers)
