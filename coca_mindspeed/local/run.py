"""The stages of a run of the local engine: check, start (load, SFT warm-up), preflight, evaluate, train."""

import datetime
import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from coca_mindspeed.config.compose import ComposedConfig
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.data.prompts import render_prompts
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import raise_problems
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.verdict import MeasuredGrader
from coca_mindspeed.local.checkpoint import check_saveable, export_model
from coca_mindspeed.local.evaluation import HeldOut
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.lora import add_adapters, dtype_of_weights, load_adapters, require_peft
from coca_mindspeed.local.memory import check_memory
from coca_mindspeed.local.model_files import context_limit, needs_date
from coca_mindspeed.local.policy import Policy, choose_device, resolve_dtype
from coca_mindspeed.local.preflight import run_preflight
from coca_mindspeed.local.run_directory import (
    Checkpoint,
    RunState,
    check_resume,
    check_same_prompt,
    find_run,
    remove_leftovers,
    with_model,
    write_settings,
)
from coca_mindspeed.local.schedule import derived_seed
from coca_mindspeed.local.sft import run_sft_warm_up, sft_progress, warm_up
from coca_mindspeed.local.tiny_model import check_readable, tiny_config, tiny_tokenizer, write_tiny_model
from coca_mindspeed.local.train import Trainer
from coca_mindspeed.local.update import require_optimizer
from coca_mindspeed.local.validation import (
    LengthLimits,
    RunInputs,
    check_lengths,
    check_prompts,
    model_directory,
    ordinary_pad_token,
    validate_run,
)
from coca_mindspeed.scoring.responses import check_own_method
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.directories import MARKER, lock_run
from coca_mindspeed.utils.json_files import read_object, write_json, write_json_lines
from coca_mindspeed.utils.process import interruptible

_SECONDS = "seconds.json"  # wall time of each stage, summed over sessions


@dataclass
class LocalRun:
    """A checked run, and its stages as methods; a context manager that closes the grader and unlocks the directory.

    Attributes:
        config: with the device's data type in place of ``auto``.
        prompt_sha256: of the first training question's prompt.
    """

    config: RunConfig
    output: Path
    inputs: RunInputs
    grader: MeasuredGrader
    state: RunState
    device: torch.device
    prompt_sha256: str
    resume: bool
    overwrite: bool
    show_progress: bool
    _resources: ExitStack
    _started: float

    @classmethod
    def open(
        cls,
        composed: ComposedConfig,
        output: Path,
        *,
        resume: bool = False,
        overwrite: bool = False,
        show_progress: bool = True,
        validated: tuple[RunInputs, MeasuredGrader] | None = None,
    ) -> "LocalRun":
        """Check everything that is known before the weights are read; write nothing, and lock the directory.

        ``resume`` continues from the newest checkpoint of the run in ``output``; ``overwrite`` removes that run.
        ``validated`` is the result of :func:`.validation.validate_run` of the same run, which is called without it.

        Raises ConfigError, DataError (a record that cannot be asked or graded) and GradingError (no grader).
        """
        started = time.perf_counter()
        if not show_progress:
            disable_progress_bar()  # transformers 5 shows bars for the weights of any model
        inputs, grader = validated or validate_run(
            composed.run, output, resume=resume, overwrite=overwrite, show_progress=show_progress
        )
        with ExitStack() as resources:
            resources.callback(grader.close)
            config, state = inputs.config, inputs.found
            require_peft(config.model.lora)
            if config.trainer.threads is not None:
                torch.set_num_threads(config.trainer.threads)
            device = choose_device(config.trainer.device)
            require_optimizer(config.optimizer, device)
            config = with_model(config, compute_dtype=resolve_dtype(config.model, device))
            check_own_method(config.method)
            # A chat template that reads the clock keeps the date of the run's start.
            if needs_date(config, inputs.train[0]):
                config = with_model(config, prompt_date=datetime.date.today().isoformat())
            prompt_sha256 = _check_prompts(config, state, inputs.records, show_progress)
            check_same_prompt(state, prompt_sha256)
            if config.model.path is not None:
                check_memory(config, device)

            resources.enter_context(lock_run(output))
            if state.marker is not None:
                remove_leftovers(output)
            # Another process may have run in between, and a checkpoint may have been restored.
            state = find_run(output, resume=resume, overwrite=overwrite)
            check_resume(state, config, inputs.digests)
            kept = resources.pop_all()
        flags = (resume, overwrite, show_progress)
        return cls(config, output, inputs, grader, state, device, prompt_sha256, *flags, kept, started)

    def __enter__(self) -> "LocalRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._resources.close()

    @property
    def resume_from(self) -> Checkpoint | None:
        """The checkpoint to continue from."""
        return self.state.newest

    def start(self) -> Policy:
        """Load the policy, write the run's marker, and teach the format by ``warm_up.records``.

        The built-in model is warmed up on the training questions.  Nothing is taught when a checkpoint is resumed.
        """
        config, inputs = self.config, self.inputs
        policy = None if model_directory(config, self.state)[0] is None else self.load()
        self._write_settings()
        with self._timed("warm_up", self._started):
            if policy is None:
                with interruptible("stopped in the warm-up; nothing is saved; start the run again"):
                    path = warm_start(config, self.output, inputs.train, self.device, self.show_progress)
                return self._load(path, "warm start")
            if self.resume_from is None and inputs.warm_up:
                policy = run_sft_warm_up(policy, inputs.warm_up, config, self.output, show_progress=self.show_progress)
                policy = self._with_adapters(policy)
            return policy

    def load(self) -> Policy:
        """Load the checkpoint or the model of ``model.path``; write nothing."""
        path, where = model_directory(self.config, self.state)
        assert path is not None
        policy = self._load(path, where)
        check_saveable(policy, f"{where}={path}")
        return policy

    def preflight(self, policy: Policy) -> None:
        """Refuse a policy that states too few valid confidences; its samples are step 0's.  Not for a resumed run."""
        count = self.config.evaluation.preflight
        if self.state.has_steps or not count:
            return
        if self.show_progress:
            print_text(f"sampling {count} responses before the first step", sys.stderr)
        with interruptible("stopped before the first step"):
            result = run_preflight(policy, self.inputs.train, self.grader, self.config)
        file = self.output / "samples" / "step_000000.jsonl"
        write_json_lines(file, result.rows())
        print_text(result, sys.stderr)
        raise_problems(result.problems(), f"no training yet; all responses: {file}")

    def evaluate_before(self, policy: Policy) -> list[Prediction]:
        """Answer the held-out questions before the first step.

        A resumed run keeps its earlier answers; without them it has none, because its policy is already trained.
        """
        with self._timed("evaluate"):
            return self.held_out(policy).before(trained=self.resume_from is not None, keep=self.resume)

    def train(self, policy: Policy, before: Sequence[Prediction] = ()) -> None:
        """Train to the last step; the metrics of ``before``, answers before the training, are logged as step 0."""
        with self._timed("train"):
            self.trainer(policy).run(self.resume_from, before)

    def evaluate_after(self, policy: Policy) -> list[Prediction]:
        """Answer the held-out questions; see :meth:`HeldOut.after`."""
        with self._timed("evaluate"):
            return self.held_out(policy).after()

    def seconds(self) -> dict[str, float]:
        """Wall time of the stages and in total, all sessions of a resumed run together."""
        known = {"warm_up": 0.0, "evaluate": 0.0, "train": 0.0, **read_object(self.output / _SECONDS)}
        return {**known, "total": sum(known.values())}

    @contextmanager
    def _timed(self, stage: str, started: float | None = None) -> Iterator[None]:
        started = started or time.perf_counter()
        try:
            yield
        finally:
            known = read_object(self.output / _SECONDS)
            known[stage] = known.get(stage, 0.0) + time.perf_counter() - started
            with suppress(OSError):  # of a full disk; it would hide the stage's own error
                write_json(self.output / _SECONDS, known)

    def trainer(self, policy: Policy) -> Trainer:
        """The trainer of the loaded policy."""
        records, held_out, run_id = self.inputs.train, self.held_out(policy), read_object(self.output / MARKER)["id"]
        return Trainer(self.config, policy, self.grader, records, held_out, self.output, run_id, self.show_progress)

    def held_out(self, policy: Policy) -> HeldOut:
        """The held-out questions, and how the policy answers them."""
        return HeldOut(self.config, policy, self.grader, self.inputs.evaluate, self.output, self.show_progress)

    def _write_settings(self) -> None:
        write_settings(self.state, self.config, self.inputs.digests, self.prompt_sha256, overwrite=self.overwrite)

    def _load(self, path: Path, where: str) -> Policy:
        dtype = dtype_of_weights(self.config.model.lora)
        return self._with_adapters(load_policy(path, self.config.model, self.device, dtype=dtype, where=where))

    def _with_adapters(self, policy: Policy) -> Policy:
        if policy.adapters is None:
            add_adapters(policy, self.config.model.lora, derived_seed(self.config.seed, "adapters"))
            if self.resume_from is not None and self.config.model.lora.rank is not None:
                load_adapters(policy, self.resume_from.adapters)
        return policy


def _check_prompts(config: RunConfig, state: RunState, records: Sequence[Record], show_progress: bool) -> str:
    """Check the prompts, and return the SHA-256 of the first one's text."""
    system_prompt = config.method.training_method.system_prompt
    limits = LengthLimits(config.rollout.max_prompt_tokens, config.rollout.max_new_tokens)
    path, where = model_directory(config, state)
    if path is not None:
        tokenizer = check_prompts(
            path, config.model, records, system_prompt, limits, where=where, show_progress=show_progress
        )
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


def warm_start(
    config: RunConfig,
    output: Path,
    train: Sequence[Record],
    device: torch.device,
    show_progress: bool,
    symbols: str = "",
) -> Path:
    """The directory of the warmed-up tiny model in ``output``, made if it is not there yet.

    ``symbols`` are characters that the model's vocabulary has besides its own.
    """
    path = output / "warm_start"
    if not path.exists():
        untrained = output / "untrained"
        write_tiny_model(untrained, derived_seed(config.seed, "weights"), symbols)
        policy = load_policy(untrained, config.model, device, where="tiny model")
        with sft_progress(config.warm_up.steps, show_progress, output) as progress:
            warm_up(policy, train, config.method.training_method, config.warm_up, config.seed, progress)
        export_model(policy, path)
    return path
