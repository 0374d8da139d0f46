"""What a cell's figures were made from, so that a finished one is not taken for that of other data or weights."""

import functools
import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.utils.files import file_sha256
from coca_mindspeed.utils.text_formats import Difference, first_difference
from experiments.reproduce.cells import ReproductionCell
from experiments.reproduce.plan import Plan
from experiments.reproduce.questions import cell_config, set_files

# Sections and keys by which no figure changes but by the rounding of floats, and files, whose content is compared.
_LEFT_OUT = (
    *(("checkpoint",), ("logging",), ("trainer", "device"), ("trainer", "threads")),
    *(("model", "path"), ("data", "train"), ("data", "evaluate")),
)


def made_from(plan: Plan, cell: ReproductionCell, output: Path) -> dict[str, Any]:
    """The composed settings of a cell, and SHA-256 of its questions' files and of the weights that it begins with."""
    config = cell_config(plan, cell, output)
    settings = config.model_dump(mode="json")
    for *sections, key in _LEFT_OUT:
        place = settings
        for section in sections:
            place = place[section]
        del place[key]
    files = set_files(plan, cell, output, config.data)
    questions = {name: file_sha256(path) if path.is_file() else None for name, path in files.items()}
    return {"settings": settings, "questions": questions, "weights": _weights(config.model.path)}


def source() -> dict[str, str]:
    """The commit of the source that makes a cell, and the machine that it is made on."""
    return {"commit": source_commit(), "machine": machine()}


def machine() -> str:
    """Processor, cores and versions: what figures that are rounded differ by."""
    cores = len(os.sched_getaffinity(0))
    return f"{_processor()}, {cores} cores; PyTorch {torch.__version__}, Python {platform.python_version()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def check_made_from(plan: Plan, cells: Sequence[ReproductionCell], output: Path) -> None:
    """Refuse to go on beside finished cells that were made from something else.

    Cells of before this was written down are taken as they are, and files that are not here any more as they were.

    Raises:
        ConfigError: names the cell and the first difference.
    """
    for cell in cells:
        if not cell.done(output):
            continue
        before = cell.summary(output).get("made_from")
        if before is None:
            continue
        found = _difference(before, made_from(plan, cell, output))
        if found is not None:
            key, then, now = found
            raise ConfigError(
                f"{cell.directory(output)}: was made with {key}={then!r}, found {now!r}; put it back as it was, choose "
                "another --output, or remove the directory, and those of the cells that need it, to make them anew"
            )


def _difference(before: dict[str, Any], now: dict[str, Any]) -> Difference | None:
    """The first one, but for keys that only one of two versions has, and files that are not there now."""
    then, settings = (
        {f"{section}.{key}": value for section, keys in _sections(made["settings"]) for key, value in keys.items()}
        for made in (before, now)
    )
    common = then.keys() & settings.keys()
    found = first_difference(
        {key: then[key] for key in common}, {key: settings[key] for key in common}, under="settings."
    )
    if found is not None:
        return found
    absent = {name for name, digest in now["questions"].items() if digest is None}
    questions = [{name: d for name, d in made["questions"].items() if name not in absent} for made in (before, now)]
    if (found := first_difference(*questions, under="questions.")) is not None:
        return found
    if now["weights"] is None or before["weights"] == now["weights"]:
        return None
    return "weights", before["weights"], now["weights"]


def _sections(settings: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, value if isinstance(value, dict) else {"": value}) for name, value in settings.items()]


def source_commit(package: Path = Path(__file__).parents[1]) -> str:
    """The commit, with ``+`` where experiments, the package or ``configs/`` differ; ``unknown`` outside of a clone."""
    root = package.parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", package.name, "coca_mindspeed", "configs")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@functools.cache
def _weights(path: str | None) -> str | None:
    """SHA-256 over weights, configuration and tokenizer of a Hugging Face directory; None: there is none."""
    if path is None or not Path(path).is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(Path(path).iterdir()):
        if file.suffix in (".safetensors", ".bin", ".json", ".jinja", ".model") and file.is_file():
            digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    return digest.hexdigest()
