"""Programs that attack the sandbox, and a runner that can be started by another user.

``python sandbox_attacks.py REPOSITORY PORT`` runs them all and prints their reports as JSON.  Standard library only.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

MARKER = "left-behind-by-an-attack"

# Each defines attempt(), which tries everything in its power and says "contained" if nothing worked.
PROBES = {
    "read": """
import os
def attempt():
    won = []
    for path in ("/root", "/home", "/var", "/mnt", "/etc/passwd", "/etc/shadow", "/bin", "/usr/bin", REPOSITORY):
        try:
            found = os.listdir(path) if os.path.isdir(path) else open(path).read()
            if found:
                won.append(path)
        except OSError:
            pass
    return won or "contained"
""",
    "programs_of_the_host": """
import os, sys
def attempt():
    directory, name = os.path.split(sys.executable)
    return sorted(set(os.listdir(directory)) - {name}) or "contained"
""",
    "environment": """
import os
def attempt():
    return "contained" if "GRADING_SECRET" not in os.environ else "found the secret"
""",
    "write_outside": """
import os
def attempt():
    won = []
    for place in ("/", "/usr/lib", "/inside", "/python", "/python/lib", "/dev", "/etc", "/proc/sys/kernel", REPOSITORY):
        try:
            with open(os.path.join(place, "attack"), "w") as file:
                file.write("x")
            won.append(place)
        except OSError:
            pass
    try:
        with open("/proc/sys/kernel/core_pattern", "w") as file:
            file.write("|/tmp/attack")
        won.append("core_pattern")
    except OSError:
        pass
    return won or "contained"
""",
    "sockets": """
import socket
def attempt():
    won = []
    for address in (("127.0.0.1", PORT), ("1.1.1.1", 53), ("169.254.169.254", 80)):
        try:
            socket.create_connection(address, timeout=1).close()
            won.append(address)
        except OSError:
            pass
    return won or "contained"
""",
    "other_families_of_sockets": """
import socket
def attempt():
    won = []
    for family in range(64):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
            if family == socket.AF_UNIX:
                continue
            for make in (socket.socket, socket.socketpair):
                try:
                    make(family, kind)
                    won.append((family, kind))
                except OSError:
                    pass
    try:
        socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        won.append("a larger buffer")
    except OSError:
        pass
    return won or "contained"
""",
    "limits_of_the_tests": """
import resource
def attempt():
    won = []
    for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_NOFILE", "RLIMIT_STACK"):
        try:
            resource.prlimit(1, getattr(resource, name), (1, 1))
            won.append(name)
        except OSError:
            pass
    return won or "contained"
""",
    "pass_for_starved": """
import ctypes, os, signal
def attempt():
    won, tries = [], {
        "nice": lambda: os.nice(19),
        "idle": lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)),
        "batch, for the tests": lambda: os.sched_setscheduler(1, os.SCHED_BATCH, os.sched_param(0)),
        "one processor": lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
        "forget children": lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        "share of the session": lambda: open("/proc/self/autogroup", "w").write("19"),
    }
    for name, attempt in tries.items():
        try:
            attempt()
            won.append(name)
        except OSError:
            pass
    os.sched_yield()
    signal.getsignal(signal.SIGCHLD)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return won or "contained"
""",
    "watch_files": """
import ctypes, os
def attempt():
    fanotify_init, inotify_init1 = {"x86_64": (300, 294), "aarch64": (262, 26)}[os.uname().machine]
    FAN_REPORT_FID = 0x200  # anybody may watch with it
    calls = ((fanotify_init, FAN_REPORT_FID), (inotify_init1, 0))
    return [n for n, flags in calls if ctypes.CDLL(None).syscall(n, flags, 0) >= 0] or "contained"
""",
    "become_root": """
import ctypes, os
def attempt():
    won = []
    if os.getuid() == 0 or os.geteuid() == 0:
        won.append("is root")
    for call in (os.setuid, os.setgid):
        try:
            call(0)
            won.append(call.__name__)
        except OSError:
            pass
    for line in open("/proc/self/status"):
        if line.startswith(("CapPrm", "CapEff", "CapAmb")) and int(line.split()[1], 16):
            won.append(line)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10000000) == 0:
        won.append("new user namespace")
    if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0:
        won.append("mounted")
    if libc.syscall(319 if os.uname().machine == "x86_64" else 279, b"x", 0) >= 0:
        won.append("memfd")
    if libc.shmget(0, 1 << 20, 0o1600) >= 0:
        won.append("shared memory")
    return won or "contained"
""",
    "spy_on_the_tests": """
import ctypes, os
def attempt():
    won = []
    for pid in [p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]:
        for name in ("mem", "environ", "fd", "maps", "cwd", "root"):
            try:
                path = f"/proc/{pid}/{name}"
                os.listdir(path) if name in ("fd", "cwd", "root") else open(path, "rb").read(1)
                won.append(path)
            except OSError:
                pass
        if ctypes.CDLL(None).ptrace(16, int(pid), 0, 0) == 0:
            won.append("ptrace " + pid)
    return won or "contained"
""",
}

# None of these may pass the test `assert answer(6) == 42`, whatever else they do.
HOSTILE = {
    "exit_at_import": "import os; os._exit(0)",
    "exit_in_call": "import os\ndef answer(x): os._exit(0)",
    "system_exit": "import sys\ndef answer(x): sys.exit(0)",
    "exit_in_thread": """
import os, threading
threading.Thread(target=os._exit, args=(0,)).start()
def answer(x): return 0
""",
    "always_equal": """
class Yes:
    def __eq__(self, other): return True
    __bool__ = __eq__
def answer(x): return Yes()
""",
    "always_equal_int": """
class Yes(int):
    def __eq__(self, other): return True
def answer(x): return Yes(0)
""",
    "no_assertions": "import builtins\nbuiltins.AssertionError = ValueError\ndef answer(x): return 0",
    "patch_everything": """
import builtins, json, operator, sys
json.dumps = lambda *a, **k: '{"value": 42}'
for module in list(sys.modules.values()):
    for name in ("print", "exec", "compile", "encode", "dumps"):
        setattr(module, name, lambda *a, **k: None)
def answer(x): return 0
""",
    "print_token": """
import json
print(json.dumps({"token": "", "outcome": "right", "reason": ""}), flush=True)
def answer(x): return 0
""",
    "nonsense_on_the_wire": """
import os
for fd in range(3, 16):
    try:
        os.write(fd, b"[" * 100000 + b"\\n")
    except OSError:
        pass
def answer(x): return 0
""",
    "write_to_parent": """
import os
for fd in range(64):
    try:
        os.write(fd, b'{"token": "0", "outcome": "right", "reason": ""}\\n')
    except OSError:
        pass
for fd in range(8):
    try:
        with open(f"/proc/{os.getppid()}/fd/{fd}", "w") as file:
            file.write('{"token": "0", "outcome": "right", "reason": ""}')
    except OSError:
        pass
def answer(x): return 0
""",
    "search_frames_for_token": """
import gc, re, sys
def answer(x):
    for value in gc.get_objects():
        if isinstance(value, dict) and "token" in value:
            return 42
    frame = sys._getframe()
    while frame:
        # The number itself: addresses and times have these digits by chance, and 42 said by chance is no leak.
        if re.search(r"(?<![\\w.])42(?![\\w.])", str(frame.f_locals)) and "answer" not in str(frame.f_locals):
            return 42
        frame = frame.f_back
    return 0
""",
    "endless_answer": "def answer(x): return 'x' * (500 << 20)",
    "kill_parent": "import os, signal\ndef answer(x):\n    os.kill(os.getppid(), signal.SIGKILL)\n    return 0",
    "stop_parent": "import os, signal\ndef answer(x):\n    os.kill(os.getppid(), signal.SIGSTOP)\n    return 0",
    "kill_everything": "import os, signal\ndef answer(x):\n    os.kill(-1, signal.SIGKILL)\n    return 0",
    "kill_init": "import os, signal\ndef answer(x):\n    os.kill(1, signal.SIGKILL)\n    return 0",
    "signal_parent": """
import os, signal
def answer(x):
    for number in range(1, 65):
        try:
            os.kill(1, number)
        except OSError:
            pass
    return 0
""",
    "fill_sockets": """
import os, socket, time
def answer(x):
    for _ in range(4):
        os.fork()
    held = []
    while True:
        try:
            a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            held.append((a, b))
            a.setblocking(False)
            while a.send(bytes(1 << 16)):
                pass
        except BlockingIOError:
            pass
        except OSError:
            time.sleep(0.01)
""",
    "empty_files": """
import os
def answer(x):
    number = 0
    while True:
        for place in ("/tmp", "/dev/shm"):
            try:
                os.close(os.open(f"{place}/{number}", os.O_CREAT))
            except OSError:
                os.mkdir(f"{place}/d{number}")
        number += 1
""",
    "sleep": "import time\ndef answer(x): time.sleep(1000)",
    "loop": "def answer(x):\n    while True: pass",
    "sleep_at_import": "import time\ntime.sleep(1000)",
    "fork_bomb": """
import os
def answer(x):
    while True:
        try:
            os.fork()
        except OSError:
            pass
""",
    "eat_memory": "def answer(x):\n    held = []\n    while True: held.append(bytearray(64 << 20))",
    "eat_memory_in_many_processes": """
import os, time
def answer(x):
    for _ in range(16):
        if os.fork() == 0:
            held = [b"x" * (200 << 20)]
            time.sleep(1000)
    time.sleep(1000)
""",
    "write_a_gigabyte": """
def answer(x):
    for number in range(64):
        with open(f"/tmp/{number}", "wb") as file:
            for _ in range(16):
                file.write(bytes(1 << 20))
    return 0
""",
    "print_a_gigabyte": "def answer(x):\n    for _ in range(1024): print('x' * (1 << 20))\n    return 0",
    "daemon": f"""
import os, subprocess, sys
def answer(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)", "{MARKER}"])
        os._exit(0)
    return 0
""",
}


# Those whose report has to name the limit.
MEET_A_LIMIT = {"fill_sockets": "memory", "empty_files": "files", "eat_memory_in_many_processes": "memory"}


def run_all(repository: str, port: int) -> dict[str, dict[str, object]]:
    from coca_mindspeed.grading.code.sandbox import Limits, Sandbox

    sandbox = Sandbox(Limits(memory_bytes=512 << 20))
    assert sandbox.sandboxed
    constants = f"REPOSITORY, PORT = {repository!r}, {port}\n"
    contained = "assert attempt() == 'contained', attempt()"
    # A probe comes to its end by itself, on a busy machine too; a hostile program is to meet its limit, and that may
    # be another one than time's.
    jobs = {name: (constants + source, contained, 20.0) for name, source in PROBES.items()}
    jobs |= {
        name: (source, "assert answer(6) == 42", 10.0 if name in MEET_A_LIMIT else 1.5)
        for name, source in HOSTILE.items()
    }

    def run(job_of_one: "tuple[str, str, float]") -> dict[str, object]:
        source, tests, limit = job_of_one
        job = {"kind": "asserts", "source": source, "tests": tests, "prompt": None, "entry_point": None}
        started = time.monotonic()
        report = sandbox.run({**job, "seconds": limit}, total_seconds=limit + 0.5)
        seconds = time.monotonic() - started
        return {"outcome": report.outcome, "reason": report.reason, "seconds": seconds}

    with ThreadPoolExecutor(2) as threads:
        return dict(zip(jobs, threads.map(run, jobs.values()), strict=True))


if __name__ == "__main__":
    print(json.dumps(run_all(sys.argv[1], int(sys.argv[2]))))
