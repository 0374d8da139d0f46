"""MindSpeed-RL's own GRPO without an NPU: `python -m benchmarks.mindspeed_own_grpo CONFIG.yaml`, as the port's driver.

Of the manifest's hooks only those act without which MindSpeed-RL would not run on this machine at all: the host
platform's, and the number of its rollouts.  Trainer, workers, reference, reward, advantages and loss are
MindSpeed-RL's, whatever the section ``coca`` says of them.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from coca_mindspeed.errors import CocaError
from coca_mindspeed.mindspeed.native import compose_config
from coca_mindspeed.mindspeed.start.driver import find_checkouts, prepare, run_mindspeed_rl, train
from coca_mindspeed.mindspeed.start.process import DRIVER_HOOKS, WORKER_HOOKS, set_up
from coca_mindspeed.upstream.manifest import Hook, Manifest
from coca_mindspeed.utils.console import print_failure

# The host's rollout engine draws its noise by the number of the rollout.
_NUMBERED = "coca_mindspeed.mindspeed.stages.rollout_engine:count_rollouts"
# Ray copied the methods of MindSpeed-RL's actor before the host's hooks were in place: the same class is made into an
# actor anew, with its reference, where ours would go without.
_ACTOR = "coca_mindspeed.mindspeed.stages.actor_worker:integrated_worker"
_SAME_ACTOR = "coca_mindspeed.mindspeed.stages.actor_worker:hooked_actor"


def of_the_host(manifest: Manifest) -> Manifest:
    """The part of a manifest that lets MindSpeed-RL run without an NPU, and changes nothing of what it trains by."""
    return replace(manifest, hooks=tuple(kept for hook in manifest.hooks if (kept := _of_the_host(hook)) is not None))


def _of_the_host(hook: Hook) -> Hook | None:
    if hook.replacement == _ACTOR:
        return replace(hook, replacement=_SAME_ACTOR)
    return hook if hook.platform == "host" or hook.rollout == "transformers" or hook.replacement == _NUMBERED else None


def setup_worker() -> None:
    """What Ray calls first in every process of such a run."""
    set_up(WORKER_HOOKS, of_the_host)


def setup_driver() -> None:
    """Prepare the process in which MindSpeed-RL's ``train`` runs."""
    set_up(DRIVER_HOOKS, of_the_host)


def run_own_grpo(config: Any) -> None:
    """MindSpeed-RL's ``train`` in this Ray process, as it is."""
    run_mindspeed_rl(config, setup_driver)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="YAML file of the run")
    try:
        home = find_checkouts(os.environ)["MINDSPEED_RL_HOME"]
        training = prepare(compose_config(parser.parse_args().config, mindspeed_rl_home=home), os.environ)
        train(training, run_own_grpo, "benchmarks.mindspeed_own_grpo.setup_worker")
    except CocaError as error:
        return print_failure(error, error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
