"""Which checkpoints are kept: in one's own folder, in a shared one, and after a kill."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from coca_mindspeed.mindspeed import checkpoints
from coca_mindspeed.mindspeed.checkpoints import prune_after_save, prune_checkpoints


def _save(directory, *iterations):
    for iteration in iterations:
        for rank in range(4):
            folder = directory / f"iter_{iteration:07d}" / f"mp_rank_{rank:02d}"
            folder.mkdir(parents=True)
            for part in range(8):
                (folder / f"part_{part}.pt").write_bytes(b"weights")


def _left(directory):
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_stay(tmp_path):
    _save(tmp_path, 40, 50, 100, 1000, 150)
    (tmp_path / "iter_0000040").rename(tmp_path / "iter_0000040.removed")  # partly, by a process that was killed
    (tmp_path / "release").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("150")
    prune_checkpoints(tmp_path, keep=2, newest=150)  # 1000 is of a save that was cut off
    kept = [f"iter_{iteration:07d}" for iteration in (100, 150, 1000)]
    assert _left(tmp_path) == [*kept, "latest_checkpointed_iteration.txt", "release"]
    prune_checkpoints(tmp_path / "of_another_node", keep=1, newest=150)


def test_a_checkpoint_that_cannot_be_removed_is_an_error(tmp_path, monkeypatch):
    _save(tmp_path, 50, 100)

    def refuse(*_arguments, **_options):
        raise PermissionError("read-only")

    monkeypatch.setattr(checkpoints.shutil.os, "unlink", refuse)
    with pytest.raises(PermissionError, match="read-only"):
        prune_checkpoints(tmp_path, keep=1, newest=100)


def test_ranks_that_share_a_folder_prune_it_at_once(tmp_path):
    _save(tmp_path, *range(10, 210, 10))
    with ThreadPoolExecutor(8) as pool:
        ranks = [pool.submit(prune_checkpoints, tmp_path, 2, 200) for _ in range(8)]
        for rank in ranks:
            rank.result()
    assert _left(tmp_path) == ["iter_0000190", "iter_0000200"]


@pytest.mark.parametrize(("keep", "left"), [(2, 2), (None, 3)])
def test_a_worker_prunes_after_it_has_saved(keep, left, tmp_path, monkeypatch):
    settings = SimpleNamespace(coca=SimpleNamespace(keep_checkpoints=keep))
    monkeypatch.setattr(checkpoints, "process_settings", lambda: settings)
    worker = SimpleNamespace(megatron_config=SimpleNamespace(save=str(tmp_path)))
    save = prune_after_save(lambda _self, iteration: _save(tmp_path, iteration))
    for iteration in (50, 100, 150):
        save(worker, iteration)
    assert len(_left(tmp_path)) == left
    assert "iter_0000150" in _left(tmp_path)
