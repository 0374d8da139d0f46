"""Checks that all engines share: configuration, files, the number of steps, a resumed run."""

import filecmp
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import Check, ConfigError, Problem, UsageError, raise_problems
from coca_mindspeed.utils.files import is_hub_id
from coca_mindspeed.utils.text_formats import differences, read_yaml

_LARGEST_LR = 0.01


def _best_needs_evaluations(run: RunConfig) -> Iterator[Problem]:
    absent = [] if run.data.has_held_out else ["data.evaluate"]
    absent += [] if run.evaluation.interval else ["evaluation.interval"]
    if run.checkpoint.best is not None and absent:
        reason, fix = "needs evaluations while training, found none", f"set {' and '.join(absent)}"
        yield Problem("no-evaluation", "checkpoint.best", run.checkpoint.best, reason, fix)


def _step_size(run: RunConfig) -> Iterator[Problem]:
    if run.optimizer.lr > _LARGEST_LR:
        reason = f"must be at most {_LARGEST_LR}: AdamW moves each weight by up to about lr a step, and weights of a "
        reason += "trained model are about 0.02"
        yield Problem("step-size", "optimizer.lr", run.optimizer.lr, reason, "1e-6 for full training, 1e-4 for LoRA")


def _custom_method(run: RunConfig) -> Iterator[Problem]:
    try:
        _ = run.method.training_method  # imports it
    except ConfigError as error:
        yield Problem("own-method", "method.name", run.method.name, str(error))


def _warm_up_of_thoughts(run: RunConfig) -> Iterator[Problem]:
    if not run.method.thinking or (run.warm_up.records is None and run.model.path is not None):
        return
    if run.method.training_method.confidence_position == "last":
        reason = "a warm-up teaches the confidence that begins a thought, and this method states it behind the answer"
        fix = "set warm_up.records=null, and start from a model that states it"
        yield Problem("warm-up-of-thoughts", "method.thinking", True, reason, fix)


#: Checks of every run, whatever its engine; of files, they read only a custom method.
CHECKS: tuple[Check[RunConfig], ...] = (_best_needs_evaluations, _step_size, _custom_method, _warm_up_of_thoughts)


def missing_data(run: RunConfig, name_of: Callable[[str], str] = str) -> Iterator[Problem]:
    """Problems of the run's files; ``name_of`` gives the names of keys in the run's file."""
    for key, path in (("data.train", run.data.train), ("data.evaluate", run.data.evaluate)):
        if path is not None and not Path(path).is_file():
            fix = f"coca-mindspeed data prepare (docs/data.md), or {name_of(key)}=FILE"
            yield Problem("no-data", name_of(key), path, "must be a file", fix)


def same_data(run: RunConfig) -> Iterator[Problem]:
    yield from same_file("data.train", run.data.train, "data.evaluate", run.data.evaluate, "set data.evaluate=null")


def same_file(train_key: str, train: str | None, key: str, evaluate: str | None, without: str) -> Iterator[Problem]:
    """A problem of ``key`` if both keys name one file, or files of the same bytes; ``without`` sets no evaluation."""
    if train is None or evaluate is None:
        return
    both = Path(train), Path(evaluate)
    files = all(path.is_file() for path in both)
    if train == evaluate or (files and (both[0].samefile(both[1]) or filecmp.cmp(*both, shallow=False))):
        reason = f"must hold other questions than {train_key}={train}, so that they are held out"
        fix = f"hold some out (coca-mindspeed data prepare --validation 0.1), or {without}"
        yield Problem("same-data", key, evaluate, reason, fix)


def missing_model(run: RunConfig) -> Iterator[Problem]:
    if run.model.path is not None and not (Path(run.model.path) / "config.json").is_file():
        yield Problem("no-model", "model.path", run.model.path, "must hold a config.json", _download(run.model.path))


def or_on_the_hub(check: Check[RunConfig]) -> Check[RunConfig]:
    """``missing_data`` or ``missing_model`` for the local engine, which also reads from the hub."""
    return lambda run: (problem for problem in check(run) if not is_hub_id(problem.value))


def _download(path: str) -> str:
    """How to get the model; ``path`` itself may be the model's id."""
    return f"download the model: {download_command(path if is_hub_id(path) else 'ORG/NAME', path)}"


def download_command(name: str, directory: str) -> str:
    return f"hf download {name} --local-dir {directory} (or modelscope download --model {name})"


def steps_of_epochs(epochs: float, rows: int, prompts: int) -> int:
    """Whole steps of ``prompts`` questions in ``epochs`` passes over ``rows``; the remainder is dropped.

    Raises ConfigError if there is not even one.
    """
    steps = int(epochs * rows / prompts)
    if steps < 1:
        reason = f"{epochs:g} x {rows} questions are fewer than rollout.prompts={prompts}"
        fix = f"set it to {prompts / rows:.6g} or more"
        raise_problems([Problem("no-whole-step", "data.epochs", epochs, reason, fix)])
    return steps


def with_steps(config: RunConfig, rows: int) -> RunConfig:
    """The configuration with ``trainer.steps`` as ``data.epochs`` asks for; unchanged where that is null."""
    if config.data.epochs is None:
        return config
    steps = steps_of_epochs(config.data.epochs, rows, config.rollout.prompts)
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": steps})})


def check_resumed_settings(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    where: object,
    fix: str,
    may_change: Callable[[str], bool] = lambda key: False,
) -> None:
    """Raise ConfigError for each setting in which a resumed run differs from the run before.

    ``where`` names the file with the settings ``before``, ``fix`` says what to do.
    """
    changed = [each for each in differences(before, now) if not may_change(each[0])]
    if changed:
        lines = (f"{where}: the run to resume has {key}={then!r}, found {found!r}" for key, then, found in changed)
        problems = [Problem("another-run", key, found, f"must be {then!r}", fix) for key, then, found in changed]
        raise ConfigError("\n".join(lines) + f"; {fix}", problems)


def refuse_mindspeed_rls(path: Path) -> None:
    """Raise ConfigError for a file in MindSpeed-RL's layout, where only a run of ours can be used."""
    reason = "is in MindSpeed-RL's own layout, which check, doctor and launch take"
    command = shlex.join(["coca-mindspeed", "check", str(path)])
    raise_problems([Problem("mindspeed-rl-layout", "file", str(path), reason, command)])


def refuse_groups_in_part(content: Any, file: Path, overrides: Sequence[str], roots: Sequence[Path]) -> None:
    """Raise UsageError for a typed group of which the run's ``file`` sets keys to other values, which win.

    ``content`` is that of the file, ``roots`` hold the folders of the groups, the first one first.
    """
    defaults = content.get("defaults") if isinstance(content, dict) else None
    if not isinstance(defaults, list) or defaults[-1:] != ["_self_"]:
        return
    typed = [override.lstrip("+~").partition("=")[0] for override in overrides]
    for override in overrides:
        group, _, choice = override.partition("=")
        files = (root / group / f"{choice}.yaml" for root in roots)
        if (chosen := next(filter(Path.is_file, files), None)) is None:
            continue
        values = read_yaml(chosen) or {}
        values = values if "@package _global_" in chosen.read_text(encoding="utf-8") else {group: values}
        both = [key for key, of_group, of_file in differences(values, content) if None not in (of_group, of_file)]
        if kept := [key for key in both if key not in ("defaults", *typed)]:
            reason = f"{file} sets {', '.join(kept)} itself, so that the group would be applied in part"
            raise UsageError(f"override {override!r}: {reason}; type these keys too, or remove them from the file")
