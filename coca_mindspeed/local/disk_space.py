"""Disk space that a local run needs, by the shapes in its model's files; the weights are not read."""

import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import safe_open

from coca_mindspeed.config.schema import LoraConfig, RunConfig
from coca_mindspeed.errors import Problem, raise_problems
from coca_mindspeed.local.run_directory import WARMED_UP, RunState, list_checkpoints, nearest_directory
from coca_mindspeed.utils.files import read_object

_MIB = 2**20
_FLOAT32 = 4  # bytes of a number in a checkpoint
_EMBEDDING = re.compile(r"embed|wte|wpe|lm_head")  # in a weight's name
TINY_MODEL = {"weights": [111_000]}  # the built-in model, about
# bitsandbytes: smaller tensors and embeddings have 32-bit moments; numbers per scale.
_SMALLEST_8_BIT, _BLOCK = 4096, 256

#: Shape of each weight by its name.
Shapes = Mapping[str, Sequence[int]]


def weight_shapes(path: Path) -> Shapes:
    """The shapes in a model directory's safetensors files; empty if it has no weights.

    Of files in PyTorch's format only the size is known: one weight with so many numbers.
    """
    index = read_object(path / "model.safetensors.index.json").get("weight_map", {})
    files = [path / name for name in sorted(set(index.values())) or ["model.safetensors"]]
    shapes: dict[str, Sequence[int]] = {}
    for file in files:
        if file.is_file():
            with safe_open(file, framework="np") as weights:
                shapes |= {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    if not shapes and (pickled := sum(file.stat().st_size for file in path.glob("pytorch_model*.bin"))):
        config = read_object(path / "config.json")
        half = config.get("dtype", config.get("torch_dtype")) in ("bfloat16", "float16")
        shapes["weights"] = [pickled // (2 if half else _FLOAT32)]
    return shapes


def checkpoint_bytes(shapes: Shapes, lora: LoraConfig, optimizer: str) -> int:
    """Size of one checkpoint: trained numbers in float32, and AdamW's moments."""
    return sum(trained_bytes(shapes, lora, optimizer))


def trained_bytes(shapes: Shapes, lora: LoraConfig, optimizer: str) -> tuple[int, int]:
    """Bytes of the trained numbers in float32, and of AdamW's two moments."""
    if lora.rank is None:
        numbers = [(math.prod(shape), bool(_EMBEDDING.search(name))) for name, shape in shapes.items()]
    else:
        modules = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2}
        targets = [
            shape
            for name, shape in modules.items()
            if (not _EMBEDDING.search(name) if lora.targets == "all-linear" else re.fullmatch(lora.targets, name))
        ]
        numbers = [(lora.rank * side, False) for shape in targets for side in shape]
    weights = sum(_FLOAT32 * count for count, _ in numbers)
    return weights, sum(_moments_bytes(count, embedding, optimizer) for count, embedding in numbers)


def _moments_bytes(count: int, embedding: bool, optimizer: str) -> int:
    if optimizer == "adamw" or embedding or count < _SMALLEST_8_BIT:
        return 2 * _FLOAT32 * count
    return 2 * (count + _FLOAT32 * -(-count // _BLOCK))


def checkpoints_at_once(config: RunConfig, done: int, there: int) -> int:
    """Most checkpoints on disk at once, after ``done`` steps, with ``there`` checkpoints on disk.

    A new one is written before the oldest is removed.
    """
    total, interval = config.total_steps, config.checkpoint.interval
    new = int(done < total)  # that of the last step
    if interval:
        new = total // interval - done // interval + int(total % interval > 0 and new)
    return max(there, min(config.checkpoint.keep + 1, there + new))


def check_space(config: RunConfig, found: RunState, model: Path | None) -> None:
    """Refuse a run whose checkpoints and exported models do not fit on the disk of its output directory.

    ``model`` is the directory of its model, None for the built-in one.
    """
    shapes = TINY_MODEL if model is None else weight_shapes(model)
    there = len(list_checkpoints(found.path / "checkpoints"))
    done = 0 if found.newest is None else found.newest.step
    size = checkpoint_bytes(shapes, config.model.lora, config.optimizer.name)
    most = checkpoints_at_once(config, done, there)
    # The trained model, and the export of a warm-up that is not done.
    models = 1 + (config.warm_up.records is not None and not (found.path / WARMED_UP).exists())
    exported = _FLOAT32 * sum(map(math.prod, shapes.values()))
    needed = (most - there) * size + models * exported
    free = shutil.disk_usage(nearest_directory(found.path)).free
    if free < needed:
        reason = (
            f"{free / _MIB:,.0f} MiB are free, about {needed / _MIB:,.0f} MiB are needed for {most - there} more "
            f"checkpoint{'s' * (most - there != 1)} of {size / _MIB:,.0f} MiB at once and {models} "
            f"model{'s' * (models > 1)} of {exported / _MIB:,.0f} MiB"
        )
        fix = "make room, or choose a directory on another disk"
        if most > 2:
            fix += "; checkpoint.keep=1 keeps fewer checkpoints"
        raise_problems([Problem("disk", "--output", found.path, reason, fix)])
