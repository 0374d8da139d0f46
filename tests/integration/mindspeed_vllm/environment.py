"""What these tests need: the checkouts of the port's other tests, and the environment that ``make test-vllm`` makes."""

import importlib.metadata

import pytest

from tests.integration.mindspeed.environment import needs_mindspeed


def _vllm() -> str | None:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


VERSION = _vllm()
needs_vllm = [
    *needs_mindspeed,
    pytest.mark.skipif(
        VERSION != "0.9.1.post2+cpu", reason=f"needs vLLM 0.9.1's build for CPUs (make test-vllm), found {VERSION}"
    ),
]
