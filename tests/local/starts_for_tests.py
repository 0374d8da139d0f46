"""Starts in copies of a directory with something changed, as test_starts.py describes them.

As a program, it reads ``[[arguments, changes], ...]`` and writes what each start did; it has not imported torch.
"""

import contextlib
import fnmatch
import functools
import io
import json
import re
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coca_mindspeed.cli import config as config_command
from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run

AND = "; "  # between changes, and between results
_PROBLEM = re.compile(r"^(?:.*?: )??([\w.-]+)(?:=(.*?))?: .*\[([\w-]+)\]$", re.MULTILINE)
_compose = functools.cache(compose_run)  # it takes most of the time of a start without torch
# The stages of `LocalRun`, by a function that each begins with.  Those before them need no torch.
_STAGES = {"choose_device": "device", "load_policy": "weights", "run_preflight": "samples"}


class Started(NamedTuple):
    code: int
    stage: str  # the last one that began: files, or of _STAGES; torch: it was imported, and was not before
    changed: bool  # whether anything was written, renamed or removed
    shown: str  # on both outputs

    @property
    def problems(self) -> list[str]:
        """``code|key|value`` of each problem of the refusal."""
        _, _, refusal = self.shown.partition("coca-mindspeed: ")
        return [f"{code}|{key}|{value}" for key, value, code in _PROBLEM.findall(refusal)]


def start(place: Path, arguments: list[str], changes: str) -> Started:
    """Run a command in a copy of ``place`` with these changes."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        here = shutil.copytree(place, Path(directory, "here"))
        patch.chdir(here)
        for change in filter(None, changes.split(AND)):
            _change(change, patch)
        patch.setattr(config_command, "compose_run", lambda name, typed, **named: _compose(name, tuple(typed), **named))
        stages, before = _noted_stages(patch), _content(here)
        with io.StringIO() as shown, contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            try:
                code = main(arguments)
            except SystemExit as ended:  # of argparse
                code = int(ended.code or 0)
            except Exception:  # noqa: BLE001 - the other starts are made too
                code = -1
                traceback.print_exc()
            if stages is None:
                stages = ["torch" if "torch" in sys.modules else "files"]
            return Started(code, stages[-1], _content(here) != before, shown.getvalue())


def _content(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in directory.rglob("*")}


def _noted_stages(patch: pytest.MonkeyPatch) -> list[str] | None:
    """The stages that will begin; None: torch is not imported."""
    if "torch" not in sys.modules:
        return None
    from coca_mindspeed.local import run

    begun = ["files"]

    def noted(name, stage):
        function = getattr(run, name)
        patch.setattr(run, name, lambda *given, **named: begun.append(stage) or function(*given, **named))

    for name, stage in _STAGES.items():
        noted(name, stage)
    return begun


def _change(change: str, patch: pytest.MonkeyPatch) -> None:
    match change.split(" ", 2):
        case ["disk", free]:
            patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=int(free)))
        case ["memory", free]:
            patch.setattr("coca_mindspeed.local.plan.free_bytes", lambda _: int(free))
        case ["without", package]:
            patch.setitem(sys.modules, package, None)
        case ["transformers", _]:  # the caller looks at it
            pass
        case [name, sign, *rest]:
            _change_file(Path(name), sign, "".join(rest))
        case _:
            raise ValueError(change)


def _change_file(path: Path, sign: str, text: str) -> None:
    match sign, path.suffix:
        case "=", _:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        case "-", _ if not text:
            path.unlink(missing_ok=True)
        case "+", ".jsonl":
            path.write_text(f"{path.read_text()}{text}\n")
        case "+", ".json":
            path.write_text(json.dumps({**json.loads(path.read_text()), **json.loads(text)}))
        case "-", ".json":
            path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != text}))
        case "+", ".safetensors":
            _save(path, {**load_file(path), text: np.ones(3, np.float32)})
        case "-", ".safetensors":
            _save(path, {k: v for k, v in load_file(path).items() if not fnmatch.fnmatch(k, text)})
        case _:
            raise ValueError(f"{path} {sign}")


def _save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


if __name__ == "__main__":
    json.dump([start(Path.cwd(), *row) for row in json.load(sys.stdin)], sys.stdout)
