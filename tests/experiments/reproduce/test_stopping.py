"""A reproduction that is stopped takes the processes of its cells along, however it is stopped."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coca_mindspeed.local.interrupt import InterruptedRunError
from experiments.__main__ import main
from tests.grading.dying_trainer import descendants, end_survivors

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_cells_end_with_the_reproduction(tmp_path, how):
    plan = Path(__file__).with_name("tiny_plan.yaml")
    command = [sys.executable, "-m", "tests.experiments.reproduce.endless_cells", str(plan), str(tmp_path / "out")]
    with (tmp_path / "said").open("w+") as said:
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, cwd=REPOSITORY)
        assert parent.stdout is not None
        lines = iter(parent.stdout)
        assert "running\n" in lines
        processes = descendants(parent.pid)
        assert len(processes) >= 2
        parent.send_signal(how)
        try:
            parent.wait(200)
        finally:
            parent.kill()
        left = end_survivors(processes, 2.0)
        said.seek(0)
        assert left == []
        if how != signal.SIGKILL:
            assert parent.returncode == 130
            assert "finished cells are kept" in said.read()


def test_a_cell_that_is_stopped_in_this_process_says_how_a_reproduction_goes_on(tmp_path, monkeypatch, capsys):
    """By ``--jobs 1`` a cell is stopped as a training of its own would be, but ``reproduce`` has no ``--resume``."""

    def stopped(*_):
        raise InterruptedRunError("stopped after step 24; saved step_000024", "go on with --resume")

    monkeypatch.setattr("experiments.reproduce.work_queue.run_cells", stopped)
    plan = str(Path(__file__).with_name("tiny_plan.yaml"))
    command = ["reproduce", "--plan", plan, "--seeds", "1", "--jobs", "1", "--output", str(tmp_path / "out")]
    assert main(command) == 130
    said = capsys.readouterr().err
    assert "stopped after step 24; saved step_000024; finished cells are kept in" in said
    assert "the same command goes on" in said
    assert "--resume" not in said
