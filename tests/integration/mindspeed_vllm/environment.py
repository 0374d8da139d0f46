"""What these tests need: the checkouts of the port's other tests, and one of the environments of ``make test-vllm``."""

import importlib.metadata
import os
from dataclasses import dataclass

import pytest

from coca_mindspeed.upstream.manifest import stack_of
from tests.integration.mindspeed.environment import needs_mindspeed


@dataclass(frozen=True)
class Installed:
    """A build of vLLM for CPUs, the release of MindSpeed-RL that pins it, and the variable that names its checkout."""

    version: str
    release: str
    variable: str

    @property
    def pin(self):
        return stack_of(self.release).packages["vllm"]

    @property
    def home(self):
        """For a child process: the checkout in the place of the one that all other tests take."""
        return {"MINDSPEED_RL_HOME": os.environ[self.variable]}


_KNOWN = (
    Installed("0.9.1.post2", "2.3.0", "MINDSPEED_RL_HOME"),
    Installed("0.11.0.post2", "master", "MINDSPEED_RL_MASTER_HOME"),
)


def _version():
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


_found = _version()
_installed = next((known for known in _KNOWN if _found == f"{known.version}+cpu"), None)
INSTALLED = _installed or _KNOWN[0]  # the tests of any other are skipped
needs_vllm = [
    *needs_mindspeed,
    pytest.mark.skipif(
        _installed is None,
        reason=f"needs the build for CPUs of vLLM {' or '.join(known.pin for known in _KNOWN)} (make test-vllm), "
        f"found {_found}",
    ),
    pytest.mark.skipif(
        not os.environ.get(INSTALLED.variable),
        reason=f"needs a checkout of MindSpeed-RL {INSTALLED.release}: {INSTALLED.variable} not set (docs/port.md)",
    ),
]
