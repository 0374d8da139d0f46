"""The plain path for transformers before 4.57, such as the 4.52.1 that MindSpeed-RL 2.3.0 pins.

These releases have no cache of layers and no table of masks, which prefix sharing, preallocated caches, CUDA graphs and
our attention need.  Here a policy uses transformers' own cache and masks with eager attention, as an architecture does
that no test covers: prompts share nothing, and the sampler is compared with plain passes when the policy is loaded.
"""

from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from transformers import DynamicCache, cache_utils

#: The installed release of transformers, and whether it needs this module.
RELEASE = version("transformers")
PLAIN = Version(RELEASE) < Version("4.57")
#: The argument of ``from_pretrained`` for the dtype of the weights.
DTYPE = "torch_dtype" if PLAIN else "dtype"
#: The base class of our cache layers; where it is ``object``, none is ever made.
DynamicLayer: Any = getattr(cache_utils, "DynamicLayer", object)


class PlainCache(DynamicCache):
    """An empty cache of transformers that grows by copies, with the methods of :class:`.PreallocatedCache`."""

    def repeat_rows(self, rows: Tensor, current: int, _capacity: int) -> None:
        """Append copies of ``rows`` (int64) to a cache of ``current`` rows."""
        self.batch_select_indices(torch.cat([torch.arange(current, device=rows.device), rows]))
