"""Models that a command samples from on this machine: runs, exports, Hugging Face directories and ids of the hub."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.cli.trained_prompt import model_directory, trained_prompt_of
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.prompt_form import TrainedPrompt
from coca_mindspeed.config.schema import ModelConfig, RunConfig
from coca_mindspeed.config.values import checked_method
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.utils.custom_code import is_custom
from coca_mindspeed.utils.directories import run_of_model
from coca_mindspeed.utils.files import is_hub_id


class LocalModel(NamedTuple):
    path: Path  # of the Hugging Face directory
    config: RunConfig  # its method, and how it is sampled
    trained: TrainedPrompt | None  # the form of the prompts of its training; None: unknown


def local_model(name: str, arguments: argparse.Namespace) -> LocalModel:
    """The model that ``name`` names, by the run or the export that it belongs to, if any.

    Its options are ``method``, ``thinking``, ``max_tokens``, ``temperature``, ``seed``, ``chat_template_kwargs``
    and ``trust_remote_code``.  Raises ConfigError if there is no model, or code to run without ``trust_remote_code``.
    """
    path = Path(name)
    if is_hub_id(name) and not path.exists():
        from coca_mindspeed.local.model_files import download_model

        path = download_model(name, custom_code=arguments.trust_remote_code, show_progress=True)
    path = model_directory(path)
    if not (path / "config.json").is_file():
        found = "one without config.json" if path.is_dir() else "a file" if path.exists() else "nothing there"
        expected = "a run directory that holds model/, a Hugging Face directory or ORG/NAME of the hub"
        raise ConfigError(f"{name}: expected {expected}, found {found}")
    config = compose_run("local", ["model.path=unknown", "data.train=unknown", "rollout.max_new_tokens=512"]).run
    limit = config.rollout.max_new_tokens
    if (run := run_of_model(path)) is not None:
        config = compose_run(str(run / "config.yaml")).run
        if not arguments.trust_remote_code:
            refuse_code(run, config, uses_method=arguments.method is None)
        limit = config.rollout.max_new_tokens
        trained = trained_prompt_of(path, custom_code=arguments.trust_remote_code)
    elif (trained := trained_prompt_of(path)) is not None:
        limit = trained.max_new_tokens
        if trained.method is not None:
            config = _with_method(
                config,
                name=trained.method,
                confidence_decimals=trained.form.decimals,
                max_confidence_tokens=trained.max_confidence_tokens,
                thinking=trained.form.thinking,
            )
        elif arguments.method is None:
            reason = "was trained by a method of its author's own; name one with the same responses by --method"
            raise ConfigError(f"{name}: {reason}")
    if arguments.method is not None:
        config = _with_method(config, name=arguments.method)
    if arguments.thinking:
        config = _with_method(config, thinking=True)
    rollout: dict[str, Any] = {
        "temperature": arguments.temperature,
        "max_new_tokens": arguments.max_tokens or limit,
    }
    model = ModelConfig(
        path=str(path),
        compute_dtype=(trained and trained.compute_dtype) or config.model.compute_dtype,
        chat_template_kwargs=arguments.chat_template_kwargs or config.model.chat_template_kwargs,
        prompt_date=config.model.prompt_date,
        attention=config.model.attention,
        trust_remote_code=arguments.trust_remote_code,
    )
    updated = {
        "model": model,
        "rollout": config.rollout.model_copy(update=rollout),
        "seed": arguments.seed,
    }
    return LocalModel(path, config.model_copy(update=updated), trained)


def refuse_code(directory: Path, config: RunConfig, *, uses_method: bool) -> None:
    """Raise ConfigError if the run in ``directory``, which anyone may have written, names Python code to run."""
    named = [config.method.name] if uses_method and is_custom(config.method.name) else []
    named += ["model.trust_remote_code=true"] if config.model.trust_remote_code else []
    if named:
        raise ConfigError(
            f"{directory / 'config.yaml'}: names Python code of its own ({', '.join(named)}); add --trust-remote-code "
            "if you trust whoever wrote it"
        )


def _with_method(config: RunConfig, **changes: Any) -> RunConfig:
    common = {field.name: getattr(config.method, field.name) for field in fields(MethodSettings)}
    return config.model_copy(update={"method": checked_method({**common, **changes})})
