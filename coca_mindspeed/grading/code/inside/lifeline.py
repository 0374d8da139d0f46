"""End this process when the process at the other end of a pipe is gone, whatever this one is busy with."""

import ctypes
import fcntl
import os
import select
import signal


def end_with_writer(descriptor: int) -> None:
    """Have the kernel end this process once nobody holds the pipe's other end; nothing may be written to it any more.

    The signal's handler is the C library's ``_exit``: a Python one, or a thread, would wait for the interpreter,
    which may be in the middle of ``9**9**9``.  A parent-death signal would not do: it is sent in the name of the
    process that dies, which may have no right to signal this one's user, and it goes by threads.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGIO, ctypes.cast(libc._exit, ctypes.c_void_p))
    _watch(descriptor)


def end_group_with_writer(descriptor: int) -> None:
    """As :func:`end_with_writer`, with this process's whole group; may wait for the interpreter."""
    signal.signal(signal.SIGIO, lambda *_: os.killpg(0, signal.SIGKILL))
    _watch(descriptor)


def _watch(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([descriptor], [], [], 0)[0]:  # it was gone before the kernel was asked to watch
        os.kill(os.getpid(), signal.SIGIO)
