"""The best checkpoint, without verl: what ``on_save`` and ``on_validate`` leave on disk."""

import json
import math
import shutil

import pytest
from omegaconf import OmegaConf

from coca_mindspeed.verl.checkpoints import BestCheckpoint


def callback(directory, metric="eval/ece"):
    section = {"method": {"name": "coca"}, "best_metric": metric}
    return BestCheckpoint(config=OmegaConf.create({"coca": section, "trainer": {"default_local_dir": str(directory)}}))


def save(kept, directory, step):
    checkpoint = directory / f"global_step_{step}"
    (checkpoint / "actor").mkdir(parents=True)
    (checkpoint / "actor" / "model.pt").write_text(str(step))
    kept.on_save(trainer=None, global_step=step, checkpoint_dir=str(checkpoint), async_save=False)
    return checkpoint


def best(directory):
    row = json.loads((directory / "best" / "best.json").read_text())
    (folder,) = (path for path in (directory / "best").iterdir() if path.is_dir())
    assert folder.name == f"global_step_{row['step']}"
    assert (folder / "actor" / "model.pt").read_text() == str(row["step"])
    return row["step"], row["value"]


@pytest.mark.parametrize(("metric", "values", "steps"), [
    ("eval/ece", [0.3, 0.1, 0.2, math.nan], [1, 2, 2, 2]),
    ("eval/auroc", [0.6, 0.5, 0.7, 0.7], [1, 1, 3, 3]),
])  # fmt: skip
def test_the_best_checkpoint_outlives_verls_retention(tmp_path, metric, values, steps):
    kept = callback(tmp_path, metric)
    for step, (value, expected) in enumerate(zip(values, steps, strict=True), start=1):
        checkpoint = save(kept, tmp_path, step)
        kept.on_validate(step, {metric: value})
        shutil.rmtree(checkpoint)
        assert best(tmp_path) == (expected, values[expected - 1])


def test_a_resumed_run_compares_with_the_best_so_far(tmp_path):
    first = callback(tmp_path)
    save(first, tmp_path, 1)
    first.on_validate(1, {"eval/ece": 0.2})
    again = callback(tmp_path)
    again.on_validate(1, {"eval/ece": 0.1})  # a validation before the first checkpoint of this process
    save(again, tmp_path, 2)
    again.on_validate(2, {"eval/ece": 0.3})
    assert best(tmp_path) == (1, 0.2)
    other = callback(tmp_path, "eval/auroc")
    save(other, tmp_path, 3)
    other.on_validate(3, {"eval/auroc": 0.4})
    assert best(tmp_path) == (3, 0.4)
