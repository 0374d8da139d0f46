"""Stand-ins for slime's surroundings on a CPU; everything else in its tests is slime's own code.

- Megatron's parallel state is one process that plays each rank in turn (:data:`PARALLEL`); other modules of Megatron,
  SGLang and its router, W&B, and Transformer Engine have attributes of any name and are never called.
- Megatron's fused cross entropy, which slime 0.3.0 calls, is its formula in plain PyTorch.
- Ray's ``put`` and ``get`` return their argument, ``get`` a copy, and ``remote`` the class.
- SGLang's engine says what :func:`generate` is told; the test replaces slime's ``abort``, which asks a router.
"""

import copy
import importlib.abc
import importlib.machinery
import sys
import types
from contextlib import contextmanager
from typing import ClassVar
from unittest.mock import MagicMock

import torch

from tests.support.slime_rollout import SAID, response, tokens_of

_ABSENT = {
    "mbridge",
    "megatron",
    "pylatexenc",
    "sglang",
    "sglang_router",
    "torch_memory_saver",
    "transformer_engine",
    "wandb",
}
PARALLEL = types.SimpleNamespace(cp=1, cp_rank=0, dp=1)


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name):
        if name == "__version__":
            return "0.3.2"
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in _ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def _cross_entropy(logits, target, group):
    return -torch.log_softmax(logits.float(), -1).gather(-1, target[..., None])[..., 0]


def install(home):
    """Make ``slime`` importable from its checkout."""
    sys.meta_path.insert(0, _Finder())
    sys.path.insert(0, str(home))
    import ray

    ray.put, ray.get = (lambda value, **_: value), (lambda value, **_: copy.deepcopy(value))
    ray.remote = lambda *given, **_: given[0] if given else lambda actor: actor
    import megatron.core

    fused = importlib.import_module("megatron.core.fusions.fused_cross_entropy")
    fused.fused_vocab_parallel_cross_entropy = _cross_entropy
    megatron.core.mpu = sys.modules["megatron.core.mpu"] = mpu = _Module("megatron.core.mpu")
    mpu.get_context_parallel_world_size = lambda: PARALLEL.cp
    mpu.get_context_parallel_rank = lambda: PARALLEL.cp_rank
    mpu.get_tensor_model_parallel_world_size = lambda: 1
    mpu.get_tensor_model_parallel_rank = lambda: 0
    mpu.get_tensor_model_parallel_group = lambda: None
    mpu.get_virtual_pipeline_model_parallel_world_size = lambda: 1
    mpu.is_pipeline_last_stage = lambda *_, **__: True
    mpu.get_data_parallel_world_size = lambda with_context_parallel=False: (
        PARALLEL.dp * (PARALLEL.cp if with_context_parallel else 1)
    )


@contextmanager
def parallel(dp, cp):
    """Sizes of the parallel groups."""
    PARALLEL.dp, PARALLEL.cp = dp, cp
    try:
        yield
    finally:
        PARALLEL.dp, PARALLEL.cp, PARALLEL.cp_rank = 1, 1, 0


async def generate(args, sample, sampling_params):
    """Slime's ``--custom-generate-function-path``: the next of :data:`SAID` for this question."""
    text = SAID[("2", "3").index(sample.label)][sample.index % args.n_samples_per_prompt]
    ids, log_probs = response(text)
    sample.tokens = tokens_of("1+1=") + ids
    sample.response, sample.response_length, sample.rollout_log_probs = text, len(ids), log_probs
    sample.status = sample.Status.COMPLETED
    return sample
