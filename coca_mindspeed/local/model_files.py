"""Download, tokenizer, context limit and shapes of a model; the weights are not read.

:func:`load_model_tokenizer` and :func:`read_model_config` use transformers, which imports torch.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from coca_mindspeed.config.checks import download_command
from coca_mindspeed.config.schema import LoraConfig, ModelConfig, RunConfig
from coca_mindspeed.data.prompts import no_chat_template, prompt_messages, reads_clock, write_into_template
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, DataError, Problem, raise_problems
from coca_mindspeed.utils.console import print_note
from coca_mindspeed.utils.json_files import read_object
from coca_mindspeed.utils.text_formats import JsonError, parse_json

# These choose all rotary frequencies by the longest position of a forward pass.  Beyond the trained length, keys
# cached token by token differ from keys computed from the whole text.
_BY_LENGTH = {"dynamic": "Dynamic NTK", "longrope": "LongRoPE", "su": "LongRoPE"}
# Layers with keys and values per token, which prompt sharing splits and repeats.  The running state of a Mamba layer, a
# linear attention or a convolution cannot be split.
_ATTEND = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_LAYER_KINDS = ("layer_types", "layers_block_type")


_DOWNLOADED = ["*.json", "*.jinja", "*.model", "*.txt", "*.safetensors"]
_NOT_DOWNLOADED = ["*/*", "consolidated*"]  # other formats of the same weights


def download_model(name: str, *, custom_code: bool, show_progress: bool) -> Path:
    """The directory of the model ``name`` (ORG/NAME) in huggingface_hub's cache, downloaded if files are missing there.

    ``custom_code`` also downloads the model's Python files.  Without a connection, the cache's newest copy is used.
    Raises ConfigError if there is no such model, it needs a login, or it can be neither downloaded nor found.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if show_progress:
        print_note(f"model.path={name}: from {constants.ENDPOINT}, cached in {constants.HF_HUB_CACHE}")
    else:
        disable_progress_bars()
    wanted = [*_DOWNLOADED, *(["*.py"] if custom_code else ())]
    fix = f"check the name and the connection, or name a directory: {download_command(name, name)}"
    try:
        path = Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=_NOT_DOWNLOADED))
        if not any(path.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["*.bin"], ignore_patterns=_NOT_DOWNLOADED)
        return path
    except GatedRepoError:
        reason, fix = "is gated on the hub", "accept its licence there and run hf auth login, or name a directory"
    except RepositoryNotFoundError:
        reason = f"is neither a directory nor a model on {constants.ENDPOINT}"
    # huggingface_hub, requests and httpx each raise their own kinds when there is no network.
    except Exception as error:  # noqa: BLE001
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"
        reason = f"can be neither read from {constants.ENDPOINT} ({cause}) nor found in {constants.HF_HUB_CACHE}"
    problem = Problem("no-model", "model.path", name, reason, fix)
    raise ConfigError(str(problem), [problem])


class ContextLimit(NamedTuple):
    """The longest sequence in tokens, prompt and response together, and the model setting that limits it."""

    tokens: int
    reason: str


def read_model_config(path: Path, config: ModelConfig, *, where: str = "model.path") -> Any:
    """The Hugging Face configuration of the decoder in ``path``; ConfigError if unreadable or not supported."""
    from transformers import AutoConfig  # it imports torch

    _require_model_type(path, config, where)
    source = {"trust_remote_code": config.trust_remote_code, "local_files_only": True}
    try:
        architecture = AutoConfig.from_pretrained(path, **source).get_text_config()
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}={path}: its config.json cannot be loaded: {error}") from error
    _require_rope(architecture, f"{where}={path}")
    if kinds := _stateful_layers(architecture):
        raise ConfigError(
            f"{where}={path}: expected a model whose layers are full or windowed attention, found "
            f"{architecture.model_type} with {kinds}; sampling and prompt sharing support keys and values only"
        )
    return architecture


def _require_model_type(path: Path, config: ModelConfig, where: str) -> None:
    """Refuse a config.json without a model type: transformers would guess it from the directory's name."""
    file = path / "config.json"
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, JsonError) as error:
        raise ConfigError(f"{where}={path}: its config.json cannot be loaded: {error}") from error
    content = content if isinstance(content, dict) else {}
    if not isinstance(content.get("model_type"), str) and not (config.trust_remote_code and "auto_map" in content):
        raise ConfigError(f"{where}={path}: expected a model_type in its config.json, found none")


def _require_rope(architecture: Any, where: str) -> None:
    """Refuse ``rope_parameters`` of transformers 5, which version 4 does not read and replaces by defaults."""
    if not (installed := version("transformers")).startswith("4."):
        return
    scaling = getattr(architecture, "rope_scaling", None) or {}
    read = {"rope_type": scaling.get("type", "default"), **scaling}
    thetas = [getattr(architecture, name, None) for name in ("rope_theta", "rope_local_base_freq")]
    for rope in _rope_settings(SimpleNamespace(rope_parameters=getattr(architecture, "rope_parameters", None))):
        for key, value in rope.items():
            if value not in (thetas if key == "rope_theta" else [read.get(key, getattr(architecture, key, None))]):
                raise ConfigError(
                    f"{where}: its config.json was written by transformers 5, and the installed {installed} ignores "
                    f"{key}={value} of its rope_parameters; install transformers 5, or write rope_theta and "
                    "rope_scaling at the top level of config.json"
                )


def _stateful_layers(architecture: Any) -> str:
    """Layers with state other than keys and values; empty: none."""
    listed: list[str] = next((kinds for name in _LAYER_KINDS if (kinds := getattr(architecture, name, None))), [])
    if others := set(listed) - _ATTEND:
        return "layers of type " + ", ".join(sorted(others))
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(architecture), None)
    return "a running state" if getattr(model, "_is_stateful", False) else ""


def context_limit(config: Any) -> ContextLimit | None:
    """The limit by a Hugging Face configuration of a decoder; None if it has none (no positions, or ALiBi)."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    limits = [_scaled(positions, rope, config) for rope in _rope_settings(config)]
    return min(limits, key=lambda limit: limit.tokens)


def _rope_settings(config: Any) -> list[Mapping[str, Any]]:
    """Return the rotary settings; in transformers 5 some models have one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope and all(isinstance(value, Mapping) for value in rope.values()):
        return list(rope.values())
    return [rope]


def _scaled(positions: int, rope: Mapping[str, Any], config: Any) -> ContextLimit:
    kind = rope.get("rope_type", rope.get("type"))
    trained = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if kind in _BY_LENGTH:
        tokens = min(positions, trained or positions)
        return ContextLimit(
            tokens,
            f"its rope_scaling is {kind!r} ({_BY_LENGTH[kind]}), which changes the frequencies beyond the {tokens} "
            "tokens that it was trained on, and then sampling and training would disagree",
        )
    if kind in ("yarn", "linear"):
        # Configurations give the length before or after scaling.
        tokens = max(positions, int((trained or positions) * rope.get("factor", 1.0)))
        return ContextLimit(tokens, f"max_position_embeddings={positions} and rope_scaling {kind!r} in its config.json")
    return ContextLimit(positions, f"max_position_embeddings={positions} in its config.json")


def check_template_file(path: Path, config: ModelConfig, *, where: str = "model.path") -> None:
    """Raise ConfigError if the files of a tokenizer hold no chat template; this needs no torch.

    A tokenizer of custom code, and one without a configuration, is checked when it is loaded.
    """
    file = path / "tokenizer_config.json"
    templates = path.glob("*chat_template*.jinja"), path.glob("additional_chat_templates/*.jinja")
    if config.trust_remote_code or not file.is_file() or any(any(found) for found in templates):
        return
    with suppress(DataError):  # which loading reports
        if not read_object(file).get("chat_template"):
            raise_problems([no_chat_template(where, path)])


def load_model_tokenizer(path: Path, config: ModelConfig, *, where: str = "model.path") -> Any:
    """Load a fast tokenizer, with ``config``'s variables and date in its chat template; ConfigError if unusable."""
    from transformers import AutoTokenizer  # it imports torch

    if not (path / "config.json").is_file():
        raise ConfigError(f"{where}={path}: not a Hugging Face model directory (it has no config.json)")
    _require_model_type(path, config, where)  # transformers 5 reports it as an error of the tokenizer
    try:
        source = {"trust_remote_code": config.trust_remote_code, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(path, **source)
    # A damaged tokenizer.json raises a bare Exception in the tokenizers library.
    except Exception as error:
        raise ConfigError(f"{where}={path}: its tokenizer cannot be loaded: {error}") from error
    if tokenizer.chat_template is None:
        raise_problems([no_chat_template(where, path)])
    day = None if config.prompt_date is None else date.fromisoformat(config.prompt_date)
    write_into_template(tokenizer, config.chat_template_kwargs, day)
    return tokenizer


def needs_date(config: RunConfig, record: Record) -> bool:
    """Whether the chat template of ``model.path`` inserts a date that ``model.prompt_date`` does not set."""
    if config.model.path is None or config.model.prompt_date is not None:
        return False
    tokenizer = load_model_tokenizer(Path(config.model.path), config.model)
    return reads_clock(tokenizer, prompt_messages(record, config.method.system_prompt))


#: Shape of each weight by its name.
Shapes = Mapping[str, Sequence[int]]
FLOAT32 = 4  # bytes of a number in a checkpoint
_EMBEDDING = re.compile(r"embed|wte|wpe|lm_head")  # in a weight's name
TINY_MODEL = {"weights": [111_000]}  # the built-in model, about
# bitsandbytes: two moments of a byte and their scales; smaller tensors and embeddings have moments in float32.
_SMALLEST_8_BIT, _MOMENTS_8_BIT = 4096, 2 + 2 * FLOAT32 / 256


def weight_shapes(path: Path) -> Shapes:
    """Shapes in a model's safetensors files (PyTorch's: one weight); empty without any.  ConfigError if damaged."""
    index = read_object(path / "model.safetensors.index.json").get("weight_map", {})
    shapes: dict[str, Sequence[int]] = {}
    for name in sorted(set(index.values())) or ["model.safetensors"]:
        if (path / name).is_file():
            try:
                with safe_open(path / name, framework="np") as weights:
                    shapes |= {key: weights.get_slice(key).get_shape() for key in weights.keys()}  # noqa: SIM118
            except SafetensorError as error:
                raise ConfigError(
                    f"{path / name}: damaged or cut off ({error}); copy the model again, or remove the checkpoint "
                    "that holds it"
                ) from error
    if not shapes and (pickled := sum(file.stat().st_size for file in path.glob("pytorch_model*.bin"))):
        config = read_object(path / "config.json")
        half = config.get("dtype", config.get("torch_dtype")) in ("bfloat16", "float16")
        shapes["weights"] = [pickled // (2 if half else FLOAT32)]
    return shapes


def trained_bytes(shapes: Shapes, lora: LoraConfig, optimizer: str) -> tuple[int, int]:
    """Bytes of the trained numbers in float32, and of AdamW's two moments; together, the size of a checkpoint."""
    if lora.rank is None:
        numbers = {name: math.prod(shape) for name, shape in shapes.items()}
    else:
        targets = None if lora.targets == "all-linear" else re.compile(lora.targets)
        numbers = {
            name: lora.rank * sum(shape)
            for name, shape in shapes.items()
            if len(shape) == 2
            and (targets.fullmatch(name.removesuffix(".weight")) if targets else not _EMBEDDING.search(name))
        }
    moments = 0.0
    for name, count in numbers.items():
        exact = optimizer == "adamw" or count < _SMALLEST_8_BIT or _EMBEDDING.search(name)
        moments += count * (2 * FLOAT32 if exact else _MOMENTS_8_BIT)
    return FLOAT32 * sum(numbers.values()), int(moments)
