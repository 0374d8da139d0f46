"""What is freed stays with the process, so that the kernel need not find and clear the same pages over and over."""

import os
import subprocess
import sys

import pytest

ROUNDS, BYTES = 20, 2**28
ALLOCATING = f"""
import resource, sys
import torch
from coca_mindspeed.local.memory import keep_freed_memory
kept = sys.argv[1] == "keep" and keep_freed_memory()
def allocate():
    large = torch.zeros({BYTES // 4})
    small = [torch.ones(2**18) for _ in range(64)]
allocate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}):
    allocate()
print(kept, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())
"""
glibc = pytest.mark.skipif(
    not hasattr(os, "confstr") or "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="needs glibc"
)


def clean_environment():
    return {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}


def run(how, **variables):
    """Whether freed memory is said to be kept, and bytes of the pages that the kernel had to find."""
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATING, how],
        env=clean_environment() | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, found = done.stdout.split()
    return kept == "True", int(found)


@glibc
def test_no_page_is_found_twice():
    kept, found = run("keep")
    assert kept
    assert found < BYTES
    _, without = run("leave")
    assert without > ROUNDS * BYTES / 2, "there is nothing to gain here"


@glibc
@pytest.mark.parametrize(
    "variables", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}]
)
def test_what_a_user_has_set_stays(variables):
    kept, found = run("keep", **variables)
    assert not kept
    assert found > ROUNDS * BYTES / 2
