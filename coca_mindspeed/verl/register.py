"""What verl imports in every one of its processes, by the entry point ``verl.plugins``: cheap, and nothing of verl.

verl looks names up in registries that fill as its modules are imported, so each of ours is imported right after the
module that holds the registry, and never in a process that does not need it.
"""

import importlib
from typing import Any

from coca_mindspeed.upstream.after_import import after_import

#: A module of verl with a registry, and ours that enters something into it.
REGISTRIES = {
    "verl.trainer.ppo.core_algos": "coca_mindspeed.verl.estimator",
    "verl.experimental.reward_loop.reward_manager": "coca_mindspeed.verl.reward_manager",
    "verl.trainer.ppo.v1.trainer_sync": "coca_mindspeed.verl.trainer",
}


def _import_ours(module: Any) -> None:
    importlib.import_module(REGISTRIES[module.__name__])


for _name in REGISTRIES:
    after_import(_name, _import_ours)
