"""Overrides, in Hydra's grammar (docs/configuration.md), and names for keys that do not exist."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from pydantic import BaseModel

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import UsageError, did_you_mean

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
#: Keys by their former names.
RENAMED_KEYS = {"trainer.epochs": "trainer.ppo_epochs"}
#: MindSpeed-RL's keys of the parallel layout by the names that people type.
_LAYOUT_KEYS = {
    "tp": "mindspeed_rl.actor_config.tensor_model_parallel_size",
    "pp": "mindspeed_rl.actor_config.pipeline_model_parallel_size",
    "cp": "mindspeed_rl.actor_config.context_parallel_size",
    "rollout_tp": "mindspeed_rl.generate_config.infer_tensor_parallel_size",
}
_SHOWN = 200  # characters of an override in a message


def hydra_override(override: str, roots: Sequence[Path]) -> str:
    """The override that Hydra gets; ``roots`` hold the groups' files.

    ``key=value`` sets a key whether or not a YAML file mentions it: the schema, not Hydra, knows the keys.

    Raises UsageError if it is no override, holds several values, or chooses what is not there.
    """
    typed, equals, value = override.partition("=")
    key = typed.lstrip("+~")
    if not key or not (equals or typed.startswith("~")):
        raise UsageError(f"override {override!r}: expected KEY=VALUE")
    if typed in GROUPS:
        _check_choice(override, key, value, roots)
        return override
    try:
        several = OverridesParser.create().parse_override(override).is_sweep_override()
    except (HydraException, ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0][:_SHOWN]
        raise UsageError(f"override {override[:_SHOWN]!r}: cannot be read ({reason}); {_HOW_TO_QUOTE}") from error
    if several:
        raise UsageError(f"override {override[:_SHOWN]!r}: expected one value, found several; {_HOW_TO_QUOTE}")
    return override if typed != key or key.startswith("hydra.") else f"++{override}"


_HOW_TO_QUOTE = """quote a text with other characters than letters, digits and /-.:+@%: 'KEY="VALUE"'"""


def unknown_key(section: str, name: str) -> str:
    """Why a key of a section (``""``: the top level) is refused: its replacement, or the nearest known key."""
    if (renamed := RENAMED_KEYS.get(f"{section}.{name}")) is not None:
        return f"unknown key since it was renamed: {renamed}"
    if (removed := REMOVED_KEYS.get(f"{section}.{name}".lstrip("."))) is not None:
        return f"unknown key since it was removed: {removed[1]}"
    layout = (key for short, key in _LAYOUT_KEYS.items() if name.lower() in (short, key.rpartition(".")[2]))
    if not section and (key := next(layout, None)) is not None:
        return f"unknown key, did you mean {key!r}?"
    known = known_keys(section)
    return f"unknown key{did_you_mean(name, known)}; known: {', '.join(known)}"


def known_keys(section: str) -> list[str]:
    """The keys of a section of the schema (``""`` for the top level); none if there is no such section."""
    model: type[BaseModel] | None = RunConfig
    for part in section.split(".") if section else []:
        field = None if model is None else model.model_fields.get(part)
        kinds: tuple[Any, ...] = () if field is None else (field.annotation, *get_args(field.annotation))
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return [] if model is None else list(model.model_fields)


def _check_choice(override: str, group: str, choice: str, roots: Sequence[Path]) -> None:
    known = sorted({path.stem for root in roots for path in (root / group).glob("*.yaml")})
    if choice not in known and choice != "null" and "/" not in choice:
        raise UsageError(
            f"override {override!r}: no such {group}{did_you_mean(choice, known)}; known: {', '.join(known)}"
        )
