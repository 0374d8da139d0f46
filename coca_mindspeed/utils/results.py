"""Results that are computed in parts: answers to all items, and the settings that they belong to."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.utils.directories import LOCK
from coca_mindspeed.utils.json_files import read_json_lines, write_json, write_json_lines
from coca_mindspeed.utils.progress import StepProgress
from coca_mindspeed.utils.text_formats import first_difference

_Item = TypeVar("_Item")
Rows = Sequence[Mapping[str, Any]]


def resumable_map(
    directory: Path,
    items: Sequence[_Item],
    size: int,
    work: Callable[[int, Sequence[_Item]], Rows],
    *,
    title: str,
    show_progress: bool = True,
) -> list[dict[str, Any]]:
    """Run ``work(part number, items of the part)`` on the parts that ``directory`` lacks; return all rows in order.

    ``work`` returns a JSON row for each item.  It must draw its random numbers from the part's number alone, so that a
    resumed run gives the same result.

    Raises:
        ConfigError: an existing part has another number of rows than items.
    """
    count = -(-len(items) // size)
    rows: list[dict[str, Any]] = []
    with StepProgress(count, show_progress, title=title) as progress:
        for number in range(count):
            path = directory / f"part_{number:06d}.jsonl"
            chunk = items[number * size : (number + 1) * size]
            if not path.exists():
                write_json_lines(path, work(number, chunk))
            found = [row for _, row in read_json_lines(path)]
            if len(found) != len(chunk):
                raise ConfigError(
                    f"{path}: holds {len(found)} results, and the part has {len(chunk)}; it is of other work"
                )
            rows += found
            progress.show(number + 1, f"{min(len(items), (number + 1) * size)} of {len(items)}")
    return rows


def check_directory(directory: Path, settings: Mapping[str, Any]) -> bool:
    """Check that ``directory`` is free or holds results of the same settings; return whether it holds them.

    Raises:
        ConfigError: it holds results of other settings.
    """
    path = directory / "settings.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if (found := first_difference(before, settings)) is not None:
            name, then, now = found
            raise ConfigError(
                f"--output {directory}: holds results with {name}={then!r}, found {now!r}; choose another directory or "
                "the same settings"
            )
        return True
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--output {directory}: is a file; the results need a directory")
    if directory.exists() and any(entry.name != LOCK for entry in directory.iterdir()):
        raise ConfigError(f"--output {directory}: is not empty and has no settings.json; choose another directory")
    return False


def claim_directory(directory: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings into ``directory``, or check that they are there.

    Raises ConfigError as :func:`check_directory`, or it cannot be written.
    """
    if not check_directory(directory, settings):
        try:
            write_json(directory / "settings.json", settings)
        except OSError as error:
            raise ConfigError(f"--output {directory}: cannot be written: {error.strerror}") from error
