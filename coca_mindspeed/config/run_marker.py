"""The run marker: what a run was started with, in one file for all engines beside the run's checkpoints.

``coca-mindspeed.json`` holds the settings, digests of the records, the form of the prompts and the release that began
the run.  A resumed run is compared with it.  The files of earlier releases are read too.
"""

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from coca_mindspeed import __version__
from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.config.prompt_form import PROMPT_FILE, TrainedPrompt
from coca_mindspeed.config.schema import Section
from coca_mindspeed.config.values import Engine, fields_of
from coca_mindspeed.errors import ConfigError, DataError, validation_problems
from coca_mindspeed.utils.directories import MARKER, read_marker
from coca_mindspeed.utils.json_files import read_object, write_json
from coca_mindspeed.utils.text_formats import YamlError, read_yaml

# Settings of a run that an earlier release began; the local engine still writes its file, for `train` and `check`.
_EARLIER: dict[Engine, str] = {"local": "config.yaml", "mindspeed_rl": "mindspeed_rl.yaml", "verl": "coca.json"}


def _json_values(value: Any) -> Any:
    """Settings as JSON holds them: numbers that are not finite, and values of other types, as texts."""
    return json.loads(json.dumps(value, default=str), parse_constant=str)


class RunMarker(Section):
    """Settings, data and prompts of a run when it was started."""

    made_by: Literal["coca-mindspeed"] = "coca-mindspeed"
    kind: Literal["run"] = "run"
    engine: Engine
    id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    version: str = Field(__version__, description="the release that began the run")
    settings: Annotated[dict[str, Any], BeforeValidator(_json_values)] = Field(description="empty: never written")
    data: dict[str, dict[str, Any]] = Field(default_factory=dict, description="digests of the records, by their use")
    first_prompt_sha256: str | None = Field(None, description="of the first training prompt; null: not recorded")
    prompt: TrainedPrompt | None = Field(None, description="null: not recorded")

    def write(self, directory: Path, *, resumed: bool) -> None:
        """Write the marker of a run; one that is ``resumed`` keeps its id and the release that began it."""
        before = read_run_marker(directory, self.engine) if resumed else None
        begun = {} if before is None else {"id": before.id, "version": before.version}
        write_json(directory / MARKER, {**self.model_dump(mode="json"), **begun})
        for name in {PROMPT_FILE, _EARLIER[self.engine]} - {_EARLIER["local"]}:
            (directory / name).unlink(missing_ok=True)  # of an earlier release


def is_run_of(directory: Path, engine: Engine) -> bool:
    """Whether ``directory`` is marked as a run of this engine."""
    content = read_marker(directory, "run")
    return content is not None and content.get("engine", "local") == engine


def read_run_marker(directory: Path, engine: Engine) -> RunMarker | None:
    """Read the marker of the run in ``directory``; None if there is none.

    Raises ConfigError, which names the file, if it cannot be used or is not of a run of ``engine``.
    """
    file = directory / MARKER
    try:
        content = read_object(file)
        if file.is_file() and not is_run_of(directory, engine):
            kind = content.get("kind"), content.get("engine", "local")
            raise DataError(f"expected kind and engine to be 'run' and {engine!r}, found {kind}")
        if "engine" not in content:
            file = directory / _EARLIER[engine]
            if not content and not file.is_file():
                return None
            content = _earlier(engine, content, file)
        return RunMarker.model_validate(content)
    except (OSError, DataError, YamlError) as error:
        raise ConfigError(f"{file}: the run to resume cannot be read: {error}") from error
    except ValidationError as error:
        problems = validation_problems(error)
        raise ConfigError("\n".join(f"{file}: {problem}" for problem in problems), problems) from error


def _earlier(engine: Engine, marker: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The fields of a run that an earlier release began, whose settings are in ``file``."""
    fields = {"engine": engine, "version": "unknown"}
    fields |= {name: marker[name] for name in ("id", "version", "data") if name in marker}
    read = read_object if engine == "verl" else read_yaml
    settings: Any = read(file) if file.is_file() else {}
    if not isinstance(settings, dict):
        raise DataError(f"expected a mapping, found {type(settings).__name__}")
    if engine == "local":
        return {**fields, "settings": settings, "first_prompt_sha256": (marker.get("prompt") or {}).get("sha256")}
    if engine == "verl":
        steps = {"total_training_steps": settings.pop("total_training_steps", None)}
        method = {key: settings.pop(key) for key in fields_of(MethodSettings) if key in settings}
        return {**fields, "settings": {"coca": {**settings, "method": method}, "trainer": steps}}
    coca = dict(settings.get("coca") or {})
    files = {"train": (settings.get("megatron_training") or {}).get("data_path"), "evaluate": coca.get("eval_data")}
    digests = coca.pop("data_sha256", None) or {}
    data = {use: {"file": path, "sha256": digests[path]} for use, path in files.items() if path in digests}
    return {**fields, "settings": {**settings, "coca": coca}, "data": data}
