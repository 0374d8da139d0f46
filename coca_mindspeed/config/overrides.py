"""Overrides as they are typed, read so that Hydra's grammar stands in nobody's way.

The value of a key that is a text in our schema is that text: ``model.path=models/a=b, c`` needs no quotes.  Any other
value is Hydra's (``[1, 2]``, ``{a: 1}``, ``null``), or a text where Hydra cannot read it.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from pydantic import BaseModel

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import UsageError, nearest

GROUPS = ("model", "hardware", "parallel", "method", "data")
_ROLLOUT_BY_VLLM = "to roll out by vLLM, on one GPU too, train on verl: launch/verl.sh, docs/verl.md"
#: Keys of earlier versions, their defaults, and the alternative that the error names.
REMOVED_KEYS: dict[str, tuple[Any, str]] = {
    "confidence_start": (
        {"questions": 0, "steps": 100, "batch": 32, "lr": 5e-05, "confidence_weight": 1.0},
        "method.advantage_scale=batch teaches the confidence without it: docs/method.md",
    ),
    "rollout.engine": ("local", _ROLLOUT_BY_VLLM),
    "rollout.importance_cap": (None, _ROLLOUT_BY_VLLM),
    "rollout.vllm": ({"python": None, "dtype": "auto", "kv_cache_gib": 4.0, "eager": False}, _ROLLOUT_BY_VLLM),
}
#: MindSpeed-RL's keys of the parallel layout by the names that people type.
_LAYOUT_KEYS = {
    "tp": "mindspeed_rl.actor_config.tensor_model_parallel_size",
    "pp": "mindspeed_rl.actor_config.pipeline_model_parallel_size",
    "cp": "mindspeed_rl.actor_config.context_parallel_size",
    "rollout_tp": "mindspeed_rl.generate_config.infer_tensor_parallel_size",
}
_QUOTED = re.compile(r"""\s*(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\s*""", re.DOTALL)
_KEY = re.compile(r"(?P<prefix>\+\+|\+|~|)(?P<key>[^=]*)(?P<equals>=?)(?P<value>.*)", re.DOTALL)


def hydra_override(override: str, roots: Sequence[Path]) -> str:
    """An override in Hydra's grammar that means what the user typed; ``roots`` hold the groups' files.

    ``key=value`` sets a key whether or not a YAML file mentions it: the schema, not Hydra, knows the keys.

    Raises UsageError if it has no value, chooses what is not there, or cannot be read.
    """
    match = _KEY.fullmatch(override)
    assert match is not None  # it matches anything
    prefix, key, value = match["prefix"], match["key"], match["value"]
    if prefix != "~" and not (key and match["equals"]):
        raise UsageError(f"override {override!r}: expected KEY=VALUE")
    if prefix != "~" and key in GROUPS:
        _check_choice(override, key, value, roots)
        return override
    if key.startswith("hydra.") or prefix == "~":
        written = override
    else:
        text = _is_text(key) and value.strip() != "null" and "${" not in value and not _QUOTED.fullmatch(value)
        written = f"{prefix or '++'}{key}={_quoted(value) if text else value}"
    if (problem := _problem(written)) is None:
        return written
    if "[" not in value[:1] and "{" not in value[:1] and problem == "":
        as_text = f"{prefix or '++'}{key}={_quoted(value)}"
        if _problem(as_text) is None:
            return as_text
        known = _first_unknown(key)
        raise UsageError(f"override {override[:200]!r}: {known or 'cannot be read as KEY=VALUE'}")
    raise UsageError(f"override {override[:200]!r}: {problem or 'is no list or mapping'}{_as_text(key, value)}")


def unknown_key(section: str, name: str) -> str:
    """Why a key of a section (``""``: the top level) is refused: its replacement, or the nearest known key."""
    if (removed := REMOVED_KEYS.get(f"{section}.{name}".lstrip("."))) is not None:
        return f"unknown key since it was removed: {removed[1]}"
    layout = (key for short, key in _LAYOUT_KEYS.items() if name.lower() in (short, key.rpartition(".")[2]))
    if not section and (key := next(layout, None)) is not None:
        return f"unknown key, did you mean {key!r}?"
    known = known_keys(section)
    return f"unknown key{nearest(name, known)}; known: {', '.join(known)}"


def known_keys(section: str) -> list[str]:
    """The keys of a section of the schema (``""`` for the top level); none if there is no such section."""
    model = _section(section)
    return [] if model is None else list(model.model_fields)


def _check_choice(override: str, group: str, choice: str, roots: Sequence[Path]) -> None:
    known = sorted({path.stem for root in roots for path in (root / group).glob("*.yaml")})
    if choice not in known and choice != "null" and "/" not in choice:
        raise UsageError(
            f"override {override!r}: no such {group}{nearest(choice, known)}; known: {', '.join(known)}"
            + (f". To set one of its keys, write {group}.KEY=VALUE" if _QUOTED.fullmatch(choice) else "")
        )


def _problem(written: str) -> str | None:
    """None if Hydra can read it as one value; else why not, empty if its grammar is the only reason."""
    try:
        parsed = OverridesParser.create().parse_override(written)
    except HydraException:
        return ""
    except ValueError:  # Python's limit for reading a number
        return "a number of more than 4300 digits"
    except RecursionError:
        return "nested too deeply"
    return "expected one value, found several" if parsed.is_sweep_override() else None


def _first_unknown(key: str) -> str:
    parts = key.split(".")
    for depth, part in enumerate(parts):
        section = ".".join(parts[:depth])
        if (known := known_keys(section)) and part not in known:
            return unknown_key(section, part)
    return ""


def _as_text(key: str, value: str) -> str:
    if len(value) > 200 or _annotation(key) is not None:
        return ""
    kind = "for a text with a comma" if "," in value and value[:1] not in "[{" else "as text"
    quoted = _quoted(value)
    return f"; {kind}: {key}=" + (f'"{quoted}"' if '"' not in quoted else quoted)


def _quoted(value: str) -> str:
    return QuotedString(value, Quote.single).with_quotes()


def _is_text(key: str) -> bool:
    annotation = _annotation(key)
    return annotation is str or (get_origin(annotation) in (Union, UnionType) and str in get_args(annotation))


def _annotation(key: str) -> Any:
    """The type of a key of the schema, or None for what it does not know."""
    section, _, name = key.rpartition(".")
    model = _section(section)
    field = None if model is None else model.model_fields.get(name)
    return None if field is None else field.annotation


def _section(section: str) -> type[BaseModel] | None:
    model: type[BaseModel] | None = RunConfig
    for part in section.split(".") if section else []:
        field = None if model is None else model.model_fields.get(part)
        model = None if field is None else next(_models(field.annotation), None)
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType):
        for argument in get_args(annotation):
            yield from _models(argument)
