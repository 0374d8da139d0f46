"""What a step frees is kept for the next step, in the place of being handed back to the system.

A microbatch frees a gigabyte of activations and the next one asks for as much.  glibc returns such memory at once, and
the kernel has to find and clear every page anew: on two cores a quarter of an update's processor time.

PyTorch asks for aligned memory, and glibc cuts up to 96 bytes off the ends of each piece.  In a fast bin these are not
joined with the piece when it is freed, so it is too small for the next tensor of its size: updates with a vocabulary of
40,000 grew from 234 to 429 MiB in five passes.  Fast bins are therefore off.
"""

import ctypes
import os
import sys

# Of glibc's <malloc.h>.
_M_MXFAST, _M_TRIM_THRESHOLD, _M_MMAP_MAX = 1, -1, -4
_NEVER = -1  # becomes the largest size_t; the largest int is two gigabytes
_OF_A_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let this process keep what it frees; whether it does.

    Left alone is a process whose user has set glibc's own variables, and one without glibc.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _OF_A_USER):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    # No piece of its own mapping, however large: glibc's before 2.35 refuse a threshold above 32 MiB.
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER) and mallopt(_M_MXFAST, 0))
