"""What a run leaves behind for people to read: samples of rollouts, and a line of metrics each iteration.

A resumed run cuts all of it back to its checkpoint: what came after is done once more, and would be told twice.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coca_mindspeed.files import nulls_for_what_json_lacks, to_json_line, write_json_lines
from coca_mindspeed.mindspeed.stages.dock import read_rows
from coca_mindspeed.mindspeed.start.settings import METRICS, VALIDATION, CocaSettings
from coca_mindspeed.step_log import cut_back

_SAMPLES, _OF_ITERATION = "samples", "iteration_"


class SampleWriter:
    """Writes ``output_dir/samples/iteration_000010.jsonl``: some prompts with all their responses."""

    def __init__(self, settings: CocaSettings, tokenizer: Any) -> None:
        self._settings = settings
        self._tokenizer = tokenizer.tokenizer

    def prompts_wanted(self, iteration: int) -> int:
        """How many prompts to dump in this iteration (from 1)."""
        interval = self._settings.samples_interval
        return self._settings.samples_prompts if interval and (iteration == 1 or iteration % interval == 0) else 0

    def write(self, iteration: int, rows: Sequence[Mapping[str, Any]], dock: Any) -> None:
        """Add prompts and responses to the advantage stage's rows, and write them; nothing to do without rows."""
        if not rows or self._settings.output_dir is None:
            return
        indexes = [row["index"] for row in rows]
        texts = read_rows(dock, ["prompts", "responses"], indexes, stall_timeout=self._settings.stall_timeout)
        decoded = {name: [self._tokenizer.decode(ids.tolist()) for ids in texts[name]] for name in texts}
        write_json_lines(
            self._settings.output_dir / _SAMPLES / f"{_OF_ITERATION}{iteration:06d}.jsonl",
            (
                {"step": iteration, "prompt": prompt, "response": response, **row}
                for row, prompt, response in zip(rows, decoded["prompts"], decoded["responses"], strict=True)
            ),
        )


def go_on_from(output: Path, iteration: int) -> None:
    """Remove what an earlier start has logged beyond the iteration that this one goes on from; 0 starts anew.

    Raises:
        DataError: a log is damaged elsewhere than at its end.
    """
    for name in (METRICS, VALIDATION):
        cut_back(output / name, iteration or -1)  # the initial weights are validated by each start
    for path in (output / _SAMPLES).glob(f"{_OF_ITERATION}*.jsonl"):
        if int(path.stem.removeprefix(_OF_ITERATION)) > iteration:
            path.unlink()


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append one JSON object to a log that only this process writes; NaN and infinity become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(to_json_line(nulls_for_what_json_lacks(row)))
