"""Keys of verl's configuration, and the place in verl that reads each on the path of a run by the plugin.

``python -m tests.support.verl_keys SITE_PACKAGES`` writes ``coca_mindspeed/verl/upstream_keys.json``.  A reader is a
function that takes the key's last name from a section: ``rollout.n``, ``config["n"]``, ``config.get("n")``,
``getattr(config, "n")`` or ``OmegaConf.select(config, "rollout.n")``.  Modules that no run by the plugin executes are
left out, and so are branches of verl's dataclasses that only check a value.
"""

import argparse
import fnmatch
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from coca_mindspeed.config.compose import VERLS_OWN
from coca_mindspeed.verl.upstream_keys import ENGINES, SHIPPED, UNREAD_SECTIONS, leaves
from tests.support.upstream_readers import TEXT, Access, accesses

#: Modules of verl that a run by the plugin executes (patterns of their paths, the first that fits decides).
_PATH = (
    ("trainer/ppo/core_algos.py", False),  # of losses and advantages, ours take their places
    ("trainer/ppo/ray_trainer.py", False),  # the trainer before V1
    ("trainer/ppo/*", True),
    ("trainer/main_ppo.py", True),
    ("trainer/constants_ppo.py", True),
    ("trainer/config/config.py", True),
    ("experimental/agent_loop/agent_loop.py", True),
    ("experimental/agent_loop/single_turn_agent_loop.py", True),
    ("experimental/reward_loop/reward_loop.py", True),
    ("checkpoint_engine/*", True),
    ("single_controller/*", True),
    ("workers/engine_workers.py", True),
    ("workers/engine/fsdp/*", True),
    ("workers/engine/megatron/*", True),
    ("workers/engine/base.py", True),
    ("workers/engine/utils.py", True),
    ("workers/config/engine.py", False),
    ("workers/config/rollout.py", False),
    ("workers/config/actor.py", True),
    ("workers/config/model.py", True),
    ("workers/config/optimizer.py", True),
    ("workers/rollout/vllm_rollout/*", True),
    ("workers/rollout/*_rollout/*", False),
    ("workers/rollout/*", True),
    ("workers/*", False),
    ("models/mcore/*", True),
    ("models/transformers/monkey_patch.py", True),
    ("utils/*", True),
)
#: Section -> names that hold it, some only in the modules of a pattern.
_HOLDERS: dict[str, tuple[str | tuple[str, str], ...]] = {
    "": ("config",),
    "actor_rollout_ref": (("workers/engine_workers.py", "config"),),
    "actor_rollout_ref.rollout": (
        ("workers/rollout/*", "config"),
        ("checkpoint_engine/*", "config"),
    ),
    "actor_rollout_ref.actor": (("workers/config/actor.py", "self"),),
    "actor_rollout_ref.actor.fsdp_config": ("engine_config", "engine"),
    "actor_rollout_ref.actor.megatron": ("engine_config", "engine"),
    "actor_rollout_ref.actor.optim": (
        "optimizer_config",
        ("workers/config/optimizer.py", "config"),
        ("workers/config/optimizer.py", "self"),
        ("utils/megatron/optimizer.py", "config"),
        ("utils/megatron/optimizer.py", TEXT),
    ),
    "actor_rollout_ref.actor.checkpoint": ("checkpoint_load_contents",),
    "actor_rollout_ref.model": (("workers/config/model.py", "self"),),
    "data": (("utils/dataset/*", "config"),),
    "trainer": (),
    "global_profiler.global_tool_config.precision_debugger": ("tool_config",),
    "global_profiler.global_tool_config.torch_memory": ("tool_config",),
    "algorithm.rollout_correction": (
        "rollout_corr_config",
        "correction",
        ("trainer/ppo/rollout_corr_helper.py", "config"),
    ),
}
#: Sections whose keys are read one by one, also where the whole is passed on.
_NOT_WHOLE = frozenset((*_HOLDERS, "algorithm", "reward"))


def on_path(module: str) -> bool:
    return next((taken for pattern, taken in _PATH if fnmatch.fnmatch(module, pattern)), False)


def reader_of(key: str, by_name: Mapping[str, list[Access]]) -> str | None:
    """The first reader of a key, or of a section around it that is passed on as a whole."""
    section, _, name = key.rpartition(".")
    unread = any(key.startswith(f"{other}.") for other in UNREAD_SECTIONS)
    short = section.rpartition(".")[2]
    holders = [*([short, f"{short}_config", f"{short}_cfg"] if short else []), *_HOLDERS.get(section, ())]
    for access in by_name.get(name, ()):
        if unread and access.holders != tuple(section.split(".")):
            continue
        for holder in holders:
            pattern, held = holder if isinstance(holder, tuple) else ("*", holder)
            if access.holders[-1:] == (held,) and fnmatch.fnmatch(access.module, pattern):
                return access.place
    return None if unread or not section or section in _NOT_WHOLE else reader_of(section, by_name)


def keys_of(site_packages: Path) -> dict[str, str | None]:
    """Every key of verl's configuration, of both engines, with a reader if there is one."""
    root = site_packages / "verl"
    by_name: dict[str, list[Access]] = defaultdict(list)
    for access in accesses(root, on_path):
        by_name[access.name].append(access)
    keys: dict[str, Any] = {}
    for engine in ENGINES:
        with initialize_config_dir(str((root / "trainer" / "config").resolve()), version_base=None):
            composed: Any = OmegaConf.to_container(compose(VERLS_OWN, overrides=[f"model_engine={engine}"]))
        keys |= leaves(composed)
    readers = {key: reader_of(key, by_name) for key in sorted(keys)}
    for key, value in keys.items():  # a key may be the default of another
        for source in re.findall(r"\$\{(?:oc\.select:)?([\w.]+)", value) if isinstance(value, str) else ():
            if readers.get(source, "") is None and readers[key] is not None:
                readers[source] = f"={key}"
    return readers


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the keys of verl's configuration with their readers.")
    parser.add_argument("site_packages", type=Path, metavar="SITE_PACKAGES")
    keys = keys_of(parser.parse_args().site_packages)
    SHIPPED.write_text(json.dumps(keys, indent=0, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
