"""Everything a run needs before its first step: checked first, loaded next, and written down last."""

import datetime
import hashlib
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from coca_mindspeed.config.checks import CHECKS, find_problems, refuse
from coca_mindspeed.config.compose import ComposedConfig
from coca_mindspeed.config.schema import DataConfig, RunConfig
from coca_mindspeed.config.steps import with_steps
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import DataError
from coca_mindspeed.grading.label_check import check_records
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.chat import load_tokenizer, reads_date, render_prompts
from coca_mindspeed.local.checkpoint import Checkpoint, check_space, export_model, rehearse_saving, remove_leftovers
from coca_mindspeed.local.checks import (
    LengthLimits,
    check_lengths,
    check_memory,
    check_prompts,
    emulated_dtype,
    ordinary_pad_token,
)
from coca_mindspeed.local.confidence_start import CONFIDENCE_START, MODEL, check_enough_questions, start_confidences
from coca_mindspeed.local.context import context_limit
from coca_mindspeed.local.interrupt import saying_what_is_saved
from coca_mindspeed.local.logging import require_loggers
from coca_mindspeed.local.lora import add_adapters, dtype_of_weights, load_adapters, require_peft
from coca_mindspeed.local.memory import keep_freed_memory
from coca_mindspeed.local.optimizer import require_optimizer
from coca_mindspeed.local.policy import Policy, choose_device, load_policy
from coca_mindspeed.local.progress import ImitationProgress
from coca_mindspeed.local.run_directory import (
    FoundRun,
    check_writable,
    claim,
    find_run,
    hold,
    records_digest,
    refuse_another_run,
    refuse_other_prompts,
    stored_prompt_date,
)
from coca_mindspeed.local.schedule import derived_seed
from coca_mindspeed.local.tiny_model import check_readable, tiny_config, tiny_tokenizer, write_tiny_model
from coca_mindspeed.local.trainer import Trainer
from coca_mindspeed.local.warm_up import WARMED_UP, read_warm_up_records, teach_format, warm_up
from coca_mindspeed.utils.console import print_text


@dataclass(frozen=True)
class Session:
    """A trainer, ready to run, and the checkpoint that it goes on from, if any."""

    trainer: Trainer
    resume_from: Checkpoint | None
    lock: IO[bytes]

    def close(self) -> None:
        """End the grader's processes, and let others into the directory; for ``closing``."""
        self.trainer.grader.close()
        self.lock.close()


def load_data(config: DataConfig) -> tuple[list[Record], list[Record]]:
    """Training and held-out records.

    Raises:
        DataError: a file cannot be read or holds no records.
    """
    if config.name == "arithmetic":
        try:
            held_out = arithmetic_records(config.evaluate_size, "evaluate", config.seed)
        except ValueError as error:
            raise DataError(f"data.evaluate_size={config.evaluate_size}: {error}") from error
        return arithmetic_records(config.train_size, "train", config.seed), held_out
    assert config.train is not None
    train = list(read_records(Path(config.train)))
    if not train:
        raise DataError(f"data.train={config.train}: holds no records")
    if config.evaluate is None:
        return train, []
    evaluate = list(read_records(Path(config.evaluate)))
    if not evaluate:
        raise DataError(f"data.evaluate={config.evaluate}: holds no records")
    return train, evaluate


def record_sources(
    config: DataConfig, train: Sequence[Record], evaluate: Sequence[Record]
) -> dict[Path | str, Sequence[Record]]:
    """Training and held-out records by the files that they come from, or by the keys of embedded ones."""
    sources: dict[Path | str, Sequence[Record]] = {}
    for key, file, records in (("data.train", config.train, train), ("data.evaluate", config.evaluate, evaluate)):
        source = key if config.name == "arithmetic" or file is None else Path(file)
        sources[source] = [*sources.get(source, ()), *records]
    return sources


def open_session(
    composed: ComposedConfig, output: Path, *, resume: bool, overwrite: bool = False, show_progress: bool = True
) -> Session:
    """Check everything that can be known, load or make the model, and only then write into ``output``.

    Args:
        composed: the run's configuration; it is saved as ``config.yaml``.
        output: the run's directory.
        resume: go on from the newest checkpoint; without one, start from the beginning.
        overwrite: remove the run that ``output`` holds.
        show_progress: draw progress bars.

    Raises:
        ConfigError: the directory already holds a run (and neither was said), or holds something else; a setting that
            cannot be had.
        DataError: a record that cannot be asked or graded.
        GradingError: the grader cannot be made.
    """
    config = composed.run
    refuse(find_problems(config, CHECKS))
    require_loggers(config.logging)
    require_peft(config.model.lora)
    found = find_run(output, resume=resume, overwrite=overwrite)
    if resume and found.marker is None:
        print_text(f"--resume: {output} holds no run; it begins there", sys.stderr)
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    device = choose_device(config.trainer.device)
    if device.type == "cpu":
        keep_freed_memory()
    require_optimizer(config.optimizer, device)
    if slow := emulated_dtype(config.model, device):
        print_text(f"warning: {slow}", sys.stderr)
    train, evaluate = load_data(config.data)
    config = with_steps(config, len(train))
    check_enough_questions(config, train)
    config = _with_prompt_date(config, found, train)
    data = {"train": records_digest(train), "evaluate": records_digest(evaluate)}
    if lessons := read_warm_up_records(config):
        data["warm_up"] = records_digest(lessons)
    refuse_another_run(found, config, data)
    check_writable(output)
    with ExitStack() as opened:
        grader = build_grader(config.data.grader, config.data.grader_options)
        opened.callback(grader.close)
        check_records(grader, record_sources(config.data, train, evaluate))
        prompt_sha256 = _check_prompts(config, found, [*train, *evaluate, *lessons], show_progress)
        refuse_other_prompts(found, prompt_sha256)
        if config.model.path is not None:
            check_memory(_asking_no_more_than(config, len(evaluate)), Path(config.model.path), device)

        lock = opened.enter_context(hold(output))
        if found.marker is not None:
            remove_leftovers(output)
        # Another process may have come first, and a checkpoint may have been put back.
        found = find_run(output, resume=resume, overwrite=overwrite)
        refuse_another_run(found, config, data)
        policy = _load_policy(config, found, device)
        if policy is not None:
            _put_adapters(policy, config, found)
            path, where = _model_path(config, found)
            rehearse_saving(policy, f"{where}={path}")
            check_space(
                output,
                policy,
                config.optimizer.name,
                config.checkpoint.keep,
                show_progress,
                1 + _starts_to_come(config, output),
            )
        marker = claim(found, config, data, prompt_sha256, overwrite=overwrite)
        if policy is None:
            with saying_what_is_saved("stopped before the warm-up was done; nothing is saved; start it again"):
                path = warm_start(config, output, train, device, show_progress)
            policy = load_policy(
                path, config.model, device, dtype=dtype_of_weights(config.model.lora), where="warm start"
            )
            _put_adapters(policy, config, found)
            models = 1 + _starts_to_come(config, output)
            check_space(output, policy, config.optimizer.name, config.checkpoint.keep, show_progress, models)
        elif lessons and found.newest is None:
            policy = teach_format(policy, lessons, config, output, show_progress=show_progress)
            if policy.adapters is None:
                _put_adapters(policy, config, found)
        if config.confidence_start.questions and found.newest is None:
            policy = start_confidences(policy, train, grader, config, output, show_progress=show_progress)
            if policy.adapters is None:
                _put_adapters(policy, config, found)
        run_id = str(marker["id"])
        trainer = Trainer(config, policy, grader, train, evaluate, output, run_id, show_progress)
        opened.pop_all()
    return Session(trainer, found.newest, lock)


def _asking_no_more_than(config: RunConfig, questions: int) -> RunConfig:
    """The same run, its evaluations of no more held-out questions than there are."""
    while_training, behind = config.evaluation.questions, config.evaluation.final_questions
    known = {
        "interval": config.evaluation.interval if questions else 0,
        "questions": max(1, questions if while_training is None else min(while_training, questions)),
        "final_questions": questions if behind is None else min(behind, questions),
    }
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update=known)})


def _with_prompt_date(config: RunConfig, found: FoundRun, records: Sequence[Record]) -> RunConfig:
    """The same run with a date for its chat template, if that reads the clock: the one of the run to resume, or today.

    Raises:
        ConfigError: the tokenizer does not load, or its template cannot render a question.
    """
    if config.model.path is None or config.model.prompt_date is not None:
        return config
    day = stored_prompt_date(found)
    if day is None:
        if not reads_date(config.model, records[0], config.method.training_method.system_prompt):
            return config
        day = datetime.date.today().isoformat()
    return config.model_copy(update={"model": config.model.model_copy(update={"prompt_date": day})})


def _check_prompts(config: RunConfig, found: FoundRun, records: Sequence[Record], show_progress: bool) -> str:
    """Check the prompts, and return the SHA-256 of the first one's text."""
    system_prompt = config.method.training_method.system_prompt
    limits = LengthLimits(config.rollout.max_prompt_tokens, config.rollout.max_new_tokens)
    if found.newest is not None or config.model.path is not None:
        path, where = _model_path(config, found)
        check_prompts(path, config.model, records, system_prompt, limits, where=where, show_progress=show_progress)
        tokenizer = load_tokenizer(path, config.model, where=where)
        if (pad := ordinary_pad_token(tokenizer)) is not None:
            print_text(
                f"warning: {where}={path}: its padding token {pad!r} is ordinary text, which the policy can then never "
                "write; name another pad_token in tokenizer_config.json, the end-of-sequence token for example",
                sys.stderr,
            )
    else:
        check_readable(records)
        tokenizer, context = tiny_tokenizer(), context_limit(tiny_config())
        check_lengths(tokenizer, context, records, system_prompt, limits, "the built-in tiny model", show_progress)
    [first] = render_prompts(tokenizer, records[:1], system_prompt)
    return hashlib.sha256(first.encode()).hexdigest()


def _model_path(config: RunConfig, found: FoundRun) -> tuple[Path, str]:
    if found.newest is not None and config.model.lora.rank is None:
        return found.newest.model, "checkpoint"
    if found.newest is not None and config.confidence_start.questions:
        return found.path / CONFIDENCE_START / MODEL, "start of the confidences"  # what the adapters were put into
    if found.newest is not None and (config.model.path is None or config.warm_up.records is not None):
        return found.path / WARMED_UP, "warm start"  # likewise
    return Path(str(config.model.path)), "model.path"


def _load_policy(config: RunConfig, found: FoundRun, device: torch.device) -> Policy | None:
    """The policy to start or to go on with; None where the tiny model has to be made first."""
    if found.newest is None and config.model.path is None:
        return None
    path, where = _model_path(config, found)
    return load_policy(path, config.model, device, dtype=dtype_of_weights(config.model.lora), where=where)


def _put_adapters(policy: Policy, config: RunConfig, found: FoundRun) -> None:
    add_adapters(policy, config.model.lora, derived_seed(config.seed, "adapters"))
    if policy.adapters is not None and found.newest is not None:
        load_adapters(policy, found.newest.adapters)


def _starts_to_come(config: RunConfig, output: Path) -> int:
    """Models that the stages before the training will leave in ``output``."""
    format_to_learn = config.warm_up.records is not None and not (output / WARMED_UP).exists()
    confidences_to_start = config.confidence_start.questions and not (output / CONFIDENCE_START / MODEL).exists()
    return int(format_to_learn) + int(bool(confidences_to_start))


def warm_start(
    config: RunConfig,
    output: Path,
    train: Sequence[Record],
    device: torch.device,
    show_progress: bool,
    symbols: str = "",
) -> Path:
    """The directory of the warmed-up tiny model, made if it is not there yet.

    Args:
        config: the run's.
        output: where it is made.
        train: what it is warmed up on.
        device: to warm it up on.
        show_progress: draw a progress bar.
        symbols: characters that the model's vocabulary has besides its own.
    """
    path = output / "warm_start"
    if not path.exists():
        untrained = output / "untrained"
        write_tiny_model(untrained, derived_seed(config.seed, "weights"), symbols)
        policy = load_policy(untrained, config.model, device, where="tiny model")
        with ImitationProgress(config.warm_up.steps, show_progress) as progress:
            warm_up(policy, train, config.method.training_method, config.warm_up, config.seed, progress.advance)
        export_model(policy, path)
    return path
