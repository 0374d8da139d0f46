"""Imported by verl in each of its processes through the entry point ``verl.plugins``; imports nothing of verl.

Each of our modules is imported right after the verl module whose registry it enters, and only in the processes that
import that module.
"""

import importlib
from typing import Any

from coca_mindspeed.utils.packages import after_import

#: A module of verl with a registry -> our module that enters it.
REGISTRIES = {
    "verl.experimental.reward_loop.reward_manager": "coca_mindspeed.verl.reward_manager",
    "verl.trainer.ppo.v1.trainer_sync": "coca_mindspeed.verl.trainer",
}


def _import_ours(module: Any) -> None:
    importlib.import_module(REGISTRIES[module.__name__])


for _name in REGISTRIES:
    after_import(_name, _import_ours)
