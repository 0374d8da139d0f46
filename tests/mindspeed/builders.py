"""Files, checkpoints and configurations of MindSpeed-RL for tests."""

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from coca_mindspeed.config.checks import HF_KEYS
from coca_mindspeed.config.schema import RunConfig


def write(path: Path | str, text: str = "") -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def model_config(run: RunConfig, **changes: int) -> str:
    """``config.json`` with the shapes of a run, and ``changes``."""
    return json.dumps({key: getattr(run.model.architecture, name) for name, key in HF_KEYS.items()} | changes)


def checkpoint(directory: Path, tp: int, pp: int = 1, iteration: str = "release") -> Path:
    folder = "release" if iteration == "release" else f"iter_{int(iteration):07d}"
    write(directory / "latest_checkpointed_iteration.txt", iteration)
    for t in range(tp):
        for p in range(pp):
            name = f"mp_rank_{t:02d}" if pp == 1 else f"mp_rank_{t:02d}_{p:03d}"
            write(directory / folder / name / "model_optim_rng.pt")
    return directory


def mindspeed_config(**changes: Any) -> DictConfig:
    """A configuration that the hooks accept, with ``changes`` by section."""
    config: dict[str, Any] = {
        "megatron_training": {"stage": "ray_grpo", "unknown_to_us": 7},
        "actor_config": {"save": "/somewhere"},
        "rl_config": {"verifier_function": ["coca"], "n_samples_per_prompt": 4, "init_kl_coef": 0.0},
        "generate_config": {},
        "coca": {},
    }
    for section, values in changes.items():
        config[section] = {**config.get(section, {}), **values}
    return OmegaConf.create(config)
