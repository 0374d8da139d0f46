"""Keys of released versions that are gone, and configurations that still hold them.

A run's ``config.yaml`` holds every key of the release that began it.  One that has no effect there is left out.
"""

import copy
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from coca_mindspeed.algorithm.methods.settings import keys_of_others
from coca_mindspeed.utils.console import print_note
from coca_mindspeed.utils.text_formats import value_of

_BY_VLLM = "was removed: to sample by vLLM, on one GPU too, train on verl: launch/verl.sh, docs/verl.md"
_WITHOUT_A_START = "was removed: method.advantage_scale=batch teaches the confidence without it (docs/method.md)"
_IN_A_CLONE = "was removed: python -m experiments.expected_confidence MODEL RECORDS, in a clone"


class FormerKey(NamedTuple):
    """The fate of a key or section, and its value without an effect; of a section, the keys that decide."""

    became: str
    default: Any


_BY_METHOD = "was removed: method.thinking=true accepts prompts that open a thought, and grades the text behind it"

FORMER_KEYS = {
    "model.allow_open_thinking": FormerKey(_BY_METHOD, False),
    "trainer.epochs": FormerKey("was renamed: write trainer.ppo_epochs", 1),
    "confidence_start": FormerKey(_WITHOUT_A_START, {"questions": 0}),
    "evaluation.readings": FormerKey(_IN_A_CLONE, False),
    "rollout.engine": FormerKey(_BY_VLLM, "local"),
    "rollout.importance_cap": FormerKey(_BY_VLLM, None),
    "rollout.vllm": FormerKey(_BY_VLLM, {"python": None, "dtype": "auto"}),
}


def without_former_keys(values: Mapping[str, Any], file: Path, typed: Collection[str] = ()) -> dict[str, Any]:
    """The configuration without former keys and keys of other methods at their defaults, which a note names once.

    Keys that an override sets, ``typed``, stay, and so do those with an effect: the schema refuses them.
    """
    kept, dropped = copy.deepcopy(dict(values)), []
    others = keys_of_others(value_of(kept, "method.name", "coca"))
    former = {key: default for key, (_, default) in FORMER_KEYS.items()}
    for key, default in {**former, **{f"method.{name}": default for name, default in others.items()}}.items():
        section, _, name = key.rpartition(".")
        place = value_of(kept, section) if section else kept
        if not isinstance(place, dict) or name not in place or any(f"{each}.".startswith(f"{key}.") for each in typed):
            continue
        if _is_default(place[name], default):
            del place[name]
            dropped.append(key)
    if dropped:
        _note(file, ", ".join(dropped))
    return kept


def _is_default(value: object, default: object) -> bool:
    if isinstance(default, Mapping):
        return isinstance(value, Mapping) and all(key in value and value[key] == default[key] for key in default)
    return value == default and isinstance(value, bool) == isinstance(default, bool)


@cache
def _note(file: Path, keys: str) -> None:
    print_note(f"note: {file}: keys of an earlier release or another method, without effect, left out: {keys}")
