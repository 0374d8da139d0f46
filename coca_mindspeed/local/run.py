"""A run of the local engine: the checks on its device, and its parts: load, warm up, sample, evaluate, train."""

import datetime
import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from coca_mindspeed.config.plan import show_plan
from coca_mindspeed.config.prompt_form import TrainedPrompt
from coca_mindspeed.config.run_marker import RunMarker
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.data.prompts import render_prompts
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import raise_problems
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.local.checkpoint import check_saveable, export_model
from coca_mindspeed.local.evaluation import HeldOut, Preflight, run_preflight
from coca_mindspeed.local.inputs import RunInputs, trained_prompt
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.model_files import load_model_tokenizer, needs_date, weight_shapes
from coca_mindspeed.local.plan import make_plan
from coca_mindspeed.local.policy import (
    Policy,
    add_adapters,
    choose_device,
    dtype_of_weights,
    load_adapters,
    require_peft,
    resolve_dtype,
)
from coca_mindspeed.local.prompt_checks import (
    LengthLimits,
    check_answers,
    check_lengths,
    check_prompts,
    ordinary_pad_token,
)
from coca_mindspeed.local.run_directory import check_same_prompt, with_model, write_settings
from coca_mindspeed.local.schedule import derived_seed
from coca_mindspeed.local.sft import run_sft_warm_up, sft_progress, warm_up
from coca_mindspeed.local.tiny_model import check_readable, tiny_config, tiny_tokenizer, write_tiny_model
from coca_mindspeed.local.train import Trainer
from coca_mindspeed.local.update import require_optimizer
from coca_mindspeed.scoring.responses import check_custom_method
from coca_mindspeed.utils.console import print_note
from coca_mindspeed.utils.directories import MARKER
from coca_mindspeed.utils.json_files import read_object, write_json, write_json_lines
from coca_mindspeed.utils.process import interruptible

_SECONDS = "seconds.json"  # wall time of each part, summed over sessions


@dataclass(frozen=True)
class LocalRun:
    """A checked run, and its parts as methods."""

    inputs: RunInputs  # with the device's data type and the date of the prompts in its configuration
    device: torch.device
    tokenizer: Any  # of the model that the run starts from
    started: float  # when the checks began, by `time.perf_counter`

    @classmethod
    def checked(cls, inputs: RunInputs, name: str, *, print_plan: bool = False) -> "LocalRun":
        """Check packages, prompts and memory on the run's device; write nothing.

        ``name`` is the run's in messages.  Raises ConfigError or DataError for a package, a setting, a model or a
        prompt that cannot be used, and for too little memory.
        """
        started = time.perf_counter()
        if not inputs.show_progress:
            disable_progress_bar()  # transformers 5 shows bars for the weights of any model
        config = inputs.config
        if config.trainer.threads is not None:
            torch.set_num_threads(config.trainer.threads)
        device = choose_device(config.trainer.device)
        require_peft(config.model.lora)
        require_optimizer(config.optimizer, device)
        check_custom_method(config.method)
        config = with_model(config, compute_dtype=resolve_dtype(config.model, device))
        # A chat template that reads the clock keeps the date of the run's start.
        if needs_date(config, inputs.train[0]):
            config = with_model(config, prompt_date=datetime.date.today().isoformat())
        path, where = inputs.model, inputs.where
        tokenizer = tiny_tokenizer() if path is None else load_model_tokenizer(path, config.model, where=where)
        run = cls(replace(inputs, config=config), device, tokenizer, started)
        run.check_prompts()
        show_plan(make_plan(config, name, inputs), quiet=not print_plan)
        return run

    @property
    def config(self) -> RunConfig:
        return self.inputs.config

    @property
    def output(self) -> Path:
        return self.inputs.state.path

    @cached_property
    def prompt(self) -> TrainedPrompt:
        """The form of the training questions' prompts."""
        return trained_prompt(self.config, self.inputs.train)

    @cached_property
    def prompt_sha256(self) -> str:
        """SHA-256 of the first training question's prompt."""
        system_prompt = self.config.method.system_prompt
        [first] = render_prompts(self.tokenizer, self.inputs.train[:1], system_prompt)
        return hashlib.sha256(first.encode()).hexdigest()

    @property
    def marker(self) -> RunMarker:
        """The marker that is written when the run starts."""
        return RunMarker(
            engine="local",
            settings=self.config.model_dump(mode="json"),
            data={name: dict(digest) for name, digest in self.inputs.digests.items()},
            first_prompt_sha256=self.prompt_sha256,
            prompt=self.prompt,
        )

    def check_prompts(self) -> None:
        """Raise ConfigError or DataError for a prompt that the model cannot process, or a resumed run renders anew."""
        config, inputs, tokenizer = self.config, self.inputs, self.tokenizer
        limits = LengthLimits(config.rollout.max_prompt_tokens, config.rollout.max_new_tokens)
        path, where, system_prompt = inputs.model, inputs.where, config.method.system_prompt
        records = [*inputs.train, *inputs.evaluate, *inputs.warm_up]
        given = (records, system_prompt, limits)
        if path is None:
            check_readable(records)
            check_lengths(tokenizer, tiny_config(), *given, "the built-in tiny model", inputs.show_progress)
        else:
            how: dict[str, Any] = {"thinking": config.method.thinking, "show_progress": inputs.show_progress}
            check_prompts(tokenizer, path, config.model, *given, where=where, **how)
            if (pad := ordinary_pad_token(tokenizer)) is not None:
                print_note(
                    f"warning: {where}={path}: its padding token {pad!r} is ordinary text, which the policy can never "
                    "write; name another pad_token in tokenizer_config.json, such as the end-of-sequence token"
                )
        if inputs.state.newest is None and (problem := check_answers(tokenizer, inputs)) is not None:
            print_note(f"warning: {problem}")
        if inputs.state.has_steps:
            check_same_prompt(inputs.state, self.prompt_sha256)

    def start(self) -> Policy:
        """Load the policy, write the run's marker, and warm up, unless a checkpoint is resumed."""
        config, inputs = self.config, self.inputs
        policy = None if inputs.model is None else self.load(inputs.model, inputs.where)
        write_settings(inputs.state, config, self.marker)
        with self._timed("warm_up", self.started):
            if policy is None:
                with interruptible("stopped in the warm-up; nothing is saved; start the run again"):
                    path = warm_start(config, self.output, inputs.train, self.device, inputs.show_progress)
                return self.load(path, "warm start")
            if inputs.state.newest is None and inputs.warm_up:
                policy = run_sft_warm_up(
                    policy, inputs.warm_up, config, self.output, show_progress=inputs.show_progress
                )
                policy = self._with_adapters(policy)
            return policy

    def load(self, path: Path, where: str) -> Policy:
        """Load a model with the run's adapters; ``where`` names it in messages.  ConfigError if it cannot be used."""
        dtype = dtype_of_weights(self.config.model.lora)
        policy = self._with_adapters(load_policy(path, self.config.model, self.device, dtype=dtype, where=where))
        check_saveable(policy, f"{where}={path}")
        return policy

    def trial(self) -> Preflight | None:
        """Load the weights and sample responses; write nothing.  None without weights, or without a preflight."""
        path = self.inputs.model
        return None if path is None or not weight_shapes(path) else self._sample(self.load(path, self.inputs.where))

    def preflight(self, policy: Policy) -> None:
        """Refuse a policy that states too few valid confidences; its samples are step 0's.  Not for a resumed run."""
        if self.inputs.state.has_steps:
            return
        with interruptible("stopped before the first step"):
            result = self._sample(policy)
        if result is None:
            return
        file = self.output / "samples" / "step_000000.jsonl"
        write_json_lines(file, result.rows())
        print_note(f"{result}\ntime: {result.time}")
        raise_problems(result.problems(), f"no training yet; all responses: {file}")

    def _sample(self, policy: Policy) -> Preflight | None:
        """Sample ``evaluation.preflight`` responses; None if it is 0."""
        if not self.config.evaluation.preflight:
            return None
        inputs = self.inputs
        return run_preflight(policy, inputs.train, inputs.grader, self.config, inputs.show_progress)

    def evaluate_before(self, policy: Policy) -> list[Prediction]:
        """Answer the held-out questions before the first step; a resumed run keeps its earlier answers or has none."""
        with self._timed("evaluate"):
            state = self.inputs.state
            return self.held_out(policy).before(trained=state.newest is not None, keep=state.resume)

    def train(self, policy: Policy, before: Sequence[Prediction] = ()) -> None:
        """Train to the last step; the metrics of ``before``, answers before the training, are logged as step 0."""
        with self._timed("train"):
            self.trainer(policy).run(self.inputs.state.newest, before)

    def evaluate_after(self, policy: Policy) -> list[Prediction]:
        """Answer the held-out questions; see :meth:`HeldOut.after`."""
        with self._timed("evaluate"):
            return self.held_out(policy).after()

    def seconds(self) -> dict[str, float]:
        """Wall time of the parts and in total, all sessions of a resumed run together."""
        known = {"warm_up": 0.0, "evaluate": 0.0, "train": 0.0, **read_object(self.output / _SECONDS)}
        return {**known, "total": sum(known.values())}

    @contextmanager
    def _timed(self, part: str, started: float | None = None) -> Iterator[None]:
        started = started or time.perf_counter()
        try:
            yield
        finally:
            known = read_object(self.output / _SECONDS)
            known[part] = known.get(part, 0.0) + time.perf_counter() - started
            with suppress(OSError):  # of a full disk; it would hide the error of the part
                write_json(self.output / _SECONDS, known)

    def trainer(self, policy: Policy) -> Trainer:
        """The trainer of the loaded policy."""
        inputs, held_out, run_id = self.inputs, self.held_out(policy), read_object(self.output / MARKER)["id"]
        return Trainer(
            self.config, policy, inputs.grader, inputs.train, held_out, self.output, run_id, inputs.show_progress
        )

    def held_out(self, policy: Policy) -> HeldOut:
        """The held-out questions, and how the policy answers them."""
        inputs = self.inputs
        return HeldOut(
            self.config, policy, inputs.grader, inputs.evaluate, self.output, inputs.show_progress, self.prompt.form
        )

    def _with_adapters(self, policy: Policy) -> Policy:
        if policy.adapters is None:
            add_adapters(policy, self.config.model.lora, derived_seed(self.config.seed, "adapters"))
            if (newest := self.inputs.state.newest) is not None and self.config.model.lora.rank is not None:
                load_adapters(policy, newest.adapters)
        return policy


def warm_start(
    config: RunConfig,
    output: Path,
    train: Sequence[Record],
    device: torch.device,
    show_progress: bool,
    symbols: Sequence[str] = "",
) -> Path:
    """The directory of the warmed-up tiny model, made if it is missing; ``symbols`` are tokens to add."""
    path = output / "warm_start"
    if not path.exists():
        untrained = output / "untrained"
        write_tiny_model(untrained, derived_seed(config.seed, "weights"), symbols)
        policy = load_policy(untrained, config.model, device, where="tiny model")
        with sft_progress(config.warm_up.steps, show_progress, output) as progress:
            warm_up(policy, train, config.method, config.warm_up, config.seed, progress)
        export_model(policy, path)
    return path
