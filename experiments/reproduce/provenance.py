"""Provenance of a job (settings, questions, weights, commit, machine), so that results of another one are refused."""

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
from experiments.reproduce.plan import Job, Plan
from experiments.reproduce.questions import job_config, question_files

# Keys without influence on the figures, and paths, whose contents are compared instead.
_IGNORED = (
    *(("checkpoint",), ("logging",), ("trainer", "device"), ("trainer", "threads")),
    *(("model", "path"), ("data", "train"), ("data", "evaluate")),
)
_WEIGHT_FILES = (".safetensors", ".bin", ".json", ".jinja", ".model")


def made_from(plan: Plan, job: Job, output: Path) -> dict[str, Any]:
    """A job's settings and the SHA-256 of its question files and initial weights (None: absent)."""
    config = job_config(plan, job, output)
    settings = config.model_dump(mode="json")
    for *sections, key in _IGNORED:
        del functools.reduce(dict.__getitem__, sections, settings)[key]
    files = question_files(plan, job, output, config.data)
    questions = {name: file_sha256(path) if path.is_file() else None for name, path in files.items()}
    return {"settings": settings, "questions": questions, "weights": _weights(config.model.path)}


@functools.cache
def _weights(path: str | None) -> str | None:
    if path is None or not Path(path).is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(Path(path).iterdir()):
        if file.suffix in _WEIGHT_FILES and file.is_file():
            digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    return digest.hexdigest()


def check_made_from(plan: Plan, jobs: Sequence[Job], output: Path) -> None:
    """Compare finished jobs with what they would be made from now.

    Jobs without a record of it, and files that no longer exist, are accepted.

    Raises:
        ConfigError: with the job and the first difference.
    """
    for job in jobs:
        before = job.summary(output).get("made_from") if job.done(output) else None
        if before is not None and (found := _difference(before, made_from(plan, job, output))) is not None:
            key, then, now = found
            raise ConfigError(
                f"{job.directory(output)}: made with {key}={then!r}, found {now!r}; restore it, choose another "
                "--output, or remove this directory and those of the jobs that need it"
            )


def _difference(before: dict[str, Any], now: dict[str, Any]) -> Difference | None:
    # Only keys that both versions of the program have.
    then, settings = (_by_key(made["settings"]) for made in (before, now))
    common = then.keys() & settings.keys()
    pair = ({key: values[key] for key in common} for values in (then, settings))
    if (found := first_difference(*pair, under="settings.")) is not None:
        return found
    absent = {name for name, digest in now["questions"].items() if digest is None}
    pair = ({name: d for name, d in made["questions"].items() if name not in absent} for made in (before, now))
    if (found := first_difference(*pair, under="questions.")) is not None:
        return found
    if now["weights"] is None or before["weights"] == now["weights"]:
        return None
    return "weights", before["weights"], now["weights"]


def _by_key(settings: dict[str, Any]) -> dict[str, Any]:
    sections = {name: value if isinstance(value, dict) else {"": value} for name, value in settings.items()}
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def machine(device: torch.device) -> str:
    """GPU if the job uses one, processor, cores and versions."""
    processor = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        processor = next((n.partition(":")[2].strip() for n in lines if n.startswith("model name")), processor)
    cores = len(os.sched_getaffinity(0))
    gpu = f"{torch.cuda.get_device_name(device)}, " if device.type == "cuda" else ""
    return f"{gpu}{processor}, {cores} cores; PyTorch {torch.__version__}, Python {platform.python_version()}"


def source_commit(root: Path = Path(__file__).parents[2]) -> str:
    """The commit, with ``+`` if package, experiments or configs differ from it; ``unknown`` without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "coca_mindspeed", "experiments", "configs")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
