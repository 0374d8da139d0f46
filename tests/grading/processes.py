"""Tasks of the pool of processes, and a machine that is busy with other work.  Every worker imports this module."""

import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from multiprocessing.connection import Connection


def double(number):
    return 2 * number


def nap(seconds):
    time.sleep(seconds)
    return seconds


def announce_and_sleep(seconds):
    print("running", flush=True)
    time.sleep(seconds)


def hang_in_one_bytecode(_):
    return sum(itertools.repeat(1))  # a loop in C, in which Python handles no signals


def announce_and_hang_in_one_bytecode(_):
    print("running", flush=True)
    return hang_in_one_bytecode(_)


def eat_memory(_):
    return len(bytearray(8 << 30))


def die(_):
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_sending(_):
    """Send a part of the result, as a worker does that is killed from outside."""

    def send(self, data, _write=None):
        os.write(self.fileno(), bytes(data[:20_000]))
        os.kill(os.getpid(), signal.SIGKILL)

    Connection._send = send  # noqa: SLF001  # nothing public lies between two parts of a message
    return b"x" * 100_000


def fail(_):
    raise KeyError("nothing there")


def ignore_termination_and_sleep(ignores):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ignores.touch()
    time.sleep(1000)


def process_id(_):
    return os.getpid()


def compute(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    return seconds


def processor_time_left(_):
    return signal.getitimer(signal.ITIMER_PROF)[0]


def imported(name):
    return name in sys.modules


def dispatch(task):
    function, value = task
    return function(value)


def hard_limit(name):
    return resource.getrlimit(getattr(resource, name))[1]


@contextmanager
def one_processor(competitors):
    """Only one processor for this thread and what it starts, and others that compute on it all the time."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    others = [
        # A session of its own, because the kernel may divide the processors among sessions first.
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"], start_new_session=True)
        for _ in range(competitors)
    ]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, mine)


def search_path(_):
    return list(sys.path)
