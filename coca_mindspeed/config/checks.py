"""Problems of a run: how every check reports one, and the checks that all engines share.

A check is a function of its subject (a run, a resolved configuration) that yields problems. Simple checks are lists of
conditions, one line each: ``code, key, whether it holds, the expected value, how to fix it``.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from coca_mindspeed.config.schema import ArchitectureConfig, RunConfig
from coca_mindspeed.errors import CocaError, ConfigError
from coca_mindspeed.utils.text_formats import parse_json

Subject = TypeVar("Subject")
Check = Callable[[Subject], Iterable["Problem"]]
#: Code, key, whether it holds, expected value, and optionally a fix: a :class:`Problem` if it does not hold.
Condition = tuple[Any, ...]
UNKNOWN_KEY = "extra_forbidden"  # code of pydantic
_MODEL_ID = re.compile(r"(?!models/)[\w-]+/[\w.-]+", re.ASCII)  # of a hub: ORG/NAME
_LONGEST_VALUE = 200  # characters of a value in a message


class Problem(NamedTuple):
    """Why a run or a machine is refused.

    Attributes:
        code: name of the check; it does not change when a message is rewritten.
        key: dotted configuration key, or the item of a machine.
        value: value found.
        expected: the condition, as a phrase.
        fix: what to do about it, if known.
    """

    code: str
    key: str
    value: Any
    expected: str
    fix: str = ""

    def __str__(self) -> str:
        value = "" if isinstance(self.value, dict) else f"={show_value(self.value)}"
        first = f"{self.key}{value}: {self.expected} [{self.code}]"
        return f"{first}\n    {self.fix}" if self.fix else first


def _attribute(subject: Any, key: str) -> Any:
    return attrgetter(key)(subject)


def as_check(
    conditions: Callable[[Subject], Iterable[Condition]], value: Callable[[Subject, str], Any] = _attribute
) -> Check[Subject]:
    """Make a check of a function that yields conditions; ``value(subject, key)`` returns the value of a key."""

    def check(subject: Subject) -> Iterator[Problem]:
        for code, key, holds, *text in conditions(subject):
            if not holds:
                yield Problem(code, key, value(subject, key), *text)

    return check


def find_problems(subject: Subject, *groups: Sequence[Check[Subject]]) -> list[Problem]:
    """Run groups of checks, cheap ones first; a group runs only if the groups before it found nothing.

    The first problem of a key is kept.
    """
    found: dict[str, Problem] = {}
    for group in groups:
        for check in group:
            for problem in check(subject):
                found.setdefault(problem.key, problem)
        if found:
            break
    return list(found.values())


def refuse(problems: Collection[Problem], title: str = "") -> None:
    """Raise :class:`ConfigError` with all problems, if there are any."""
    if problems:
        lines = [title] if title else []
        raise ConfigError("\n".join([*lines, *map(str, problems)]), problems=problems)


def problems_of(error: CocaError, code: str, key: str, value: Any = None) -> list[Problem]:
    """The problems that an error carries, or the error itself as a problem of ``key``."""
    return list(getattr(error, "problems", ())) or [Problem(code, key, value, str(error))]


def show_value(value: Any) -> str:
    """A value as YAML writes it, shortened; text is quoted."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        shown = repr(str(value)) if isinstance(value, Path) else repr(value)
    except ValueError:
        return "a number of more than 4300 digits"
    return shown if len(shown) <= _LONGEST_VALUE else f"{shown[:_LONGEST_VALUE]}..."


def validation_problems(error: ValidationError, section: str = "") -> list[Problem]:
    """The errors of pydantic as problems, under dotted keys below ``section``.

    A validator of ours names the key below its section at the start of its message: ``key: reason``.
    """
    problems = []
    for found in error.errors():
        parts = [section, *map(str, found["loc"])]
        message = found["msg"].removeprefix("Value error, ")
        value = None if found["type"] == "missing" else found["input"]
        if found["type"] == "value_error":
            inner, separator, reason = message.partition(": ")
            if separator and inner.replace(".", "").replace("_", "").isalnum():
                parts, message = [*parts, inner], reason
                value = value_of(value, inner)
        key = ".".join(part for part in parts if part)
        problems.append(Problem(found["type"], key, value, f"{message[:1].lower()}{message[1:]}"))
    return problems


def value_of(values: Any, key: str, default: Any = None) -> Any:
    """The value of a dotted key in nested mappings and lists, or ``default`` if it or a section above it is absent."""
    for part in key.split("."):
        if isinstance(values, Mapping) and part in values:
            values = values[part]
        elif isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        else:
            return default
    return values


def _held_out_records(run: RunConfig) -> Iterator[Problem]:
    interval, data = run.evaluation.interval, run.data
    if interval and data.name == "records" and data.evaluate is None:
        fix = "set data.evaluate, or evaluation.interval=0"
        yield Problem("no-held-out-records", "evaluation.interval", interval, "needs data.evaluate, found null", fix)


#: Checks of every run, whatever its engine; they read no file.
CHECKS: tuple[Check[RunConfig], ...] = (_held_out_records,)


def missing_data(run: RunConfig) -> Iterator[Problem]:
    for key, path, fix in (
        ("data.train", run.data.train, "coca-mindspeed data prepare (docs/data.md), or data.train=FILE"),
        ("data.evaluate", run.data.evaluate, "coca-mindspeed data prepare (docs/data.md), or data.evaluate=FILE"),
    ):
        if path is not None and not Path(path).is_file():
            yield Problem("no-data", key, path, "must be a file", fix)


def missing_model(run: RunConfig) -> Iterator[Problem]:
    if run.model.path is not None and not (Path(run.model.path) / "config.json").is_file():
        yield Problem("no-model", "model.path", run.model.path, "must hold a config.json", _download(run.model.path))


HF_KEYS = {  # name of a shape -> key of config.json
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_groups": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "rope_theta": "rope_theta",
}


def differing_shapes(key: str, directory: str | None, shape: ArchitectureConfig | None, origin: str) -> list[Problem]:
    """A problem of ``key`` if the model in a directory has other shapes than ``shape``, which ``origin`` names."""
    file = Path(str(directory)) / "config.json"
    if directory is None or shape is None or not file.is_file():
        return []
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [Problem("shapes", key, directory, f"must have a readable config.json: {error}")]
    values = found if isinstance(found, dict) else {}
    pairs = [(name, getattr(shape, ours), values.get(name)) for ours, name in HF_KEYS.items()]
    differing = [f"{name} {wanted} (found {value})" for name, wanted, value in pairs if value != wanted]
    if not differing:
        return []
    fix = ""
    if "rope_theta" not in values and "rope_parameters" in values:
        fix = "transformers 5 wrote rope_parameters, which older ones ignore: write rope_theta too"
    return [Problem("shapes", key, directory, f"must have the shapes of {origin}: {', '.join(differing)}", fix)]


def _download(path: str) -> str:
    """How to get the model; ``path`` itself may be the model's id."""
    name = path if _MODEL_ID.fullmatch(path) and not Path(path).parent.is_dir() else "ORG/NAME"
    return f"download the model: hf download {name} --local-dir {path} (or modelscope download --model {name})"
