"""``coca-mindspeed`` without Ray and MindSpeed-RL: a training is a few lines, and what it did is in ``$STAND_IN``."""

import os
import sys
import time
from pathlib import Path

from omegaconf import OmegaConf

from coca_mindspeed.cli import main
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.mindspeed.start import driver, verifiers
from coca_mindspeed.upstream import launch
from coca_mindspeed.utils.saving import StopRequest

FOLDER = Path(os.environ["STAND_IN"])


def sleep_for_long():
    """In short pieces: a signal between Python's last check and a long sleep would wait for the end of the sleep."""
    for _ in range(10_000):
        time.sleep(0.1)


def wait_for_cluster(*_):
    """``CLUSTER_SLEEPS``: the nodes never come."""
    while not (FOLDER / "ray").exists():
        time.sleep(0.05)
    if os.environ.get("CLUSTER_SLEEPS"):
        (FOLDER / "training").write_text(f"{os.getpid()}\n")
        sleep_for_long()


def train(config):
    """``DRIVER_SLEEPS``: it never ends; ``DRIVER_STEPS``: nor does it, until it is asked to stop.

    ``DRIVER_FAILS``: a process of it dies.
    """
    os.write(1, b"a line of the training\n")  # as native libraries write
    print("a warning of the training", file=sys.stderr)
    with (FOLDER / "driver").open("a") as file:
        print(os.environ["RAY_ADDRESS"], f"{config.coca.output_dir}/coca-mindspeed.json", file=file)
    results = Path(config.coca.output_dir)
    (results / "metrics.jsonl").write_text('{"step": 1, "actor/grad_norm": 1.0}\n')
    if os.environ.get("DRIVER_SLEEPS"):
        sleep_for_long()
    if os.environ.get("DRIVER_STEPS"):
        stop = StopRequest.of(results.parent)
        while not stop.is_asked():
            time.sleep(0.1)
        stop.answer(7)
    if os.environ.get("DRIVER_FAILS"):
        raise TrainingError("training ended: a worker died")


if __name__ == "__main__":
    launch.wait_for_cluster = wait_for_cluster
    driver.prepare = lambda values, _environment, _files, **_options: OmegaConf.create(values)
    driver.train = train
    verifiers.missing_data = lambda *_: ()
    sys.exit(main(sys.argv[1:]))
