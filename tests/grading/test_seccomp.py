"""The filter for system calls, run here for both machines: what it allows, and what it denies by which error."""

import errno

import pytest

from coca_mindspeed.grading.code.inside.seccomp import filter_program

X86_64, AARCH64 = 0xC000003E, 0xC00000B7
ALLOWED, KILLED, FAKED = "allowed", "killed", 0


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> str | int:
    """The filter's verdict on a system call: an error number, or one of the words above."""
    found = {"x86_64": X86_64, "aarch64": AARCH64}[machine] if architecture is None else architecture
    words = {0: number, 4: found}
    for place, argument in enumerate(arguments):
        words |= {16 + 8 * place: argument & 0xFFFFFFFF, 20 + 8 * place: argument >> 32}
    program, at, accumulator = filter_program(machine), 0, 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x20:
            accumulator = words.get(operand, 0)
        elif code == 0x06:
            return {0x7FFF0000: ALLOWED, 0x80000000: KILLED}.get(operand, operand & 0xFFFF)
        else:
            taken = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: accumulator & operand != 0}[code]
            at += if_true if taken else if_false


# name, arguments: number on x86-64, number on ARM64, what the filter says
CALLS = {
    ("read", ()): (0, 63, ALLOWED),
    ("execve", ()): (59, 221, ALLOWED),
    ("setsid", ()): (112, 157, ALLOWED),
    ("fanotify_init", ()): (300, 262, errno.EPERM),
    ("fanotify_mark", ()): (301, 263, errno.EPERM),
    ("inotify_init1", ()): (294, 26, errno.EPERM),
    ("io_setup", ()): (206, 0, errno.EPERM),
    ("io_uring_enter", ()): (426, 426, errno.EPERM),
    ("setpriority", (0, 0, 19)): (141, 140, errno.EPERM),
    ("sched_setattr", ()): (314, 274, errno.EPERM),
    ("sched_yield", ()): (24, 124, FAKED),
    ("mount_setattr", ()): (442, 442, errno.EPERM),
    ("pidfd_getfd", ()): (438, 438, errno.EPERM),
    ("kexec_load", ()): (246, 104, errno.EPERM),
    ("setsockopt", ()): (54, 208, errno.EPERM),
    ("socket", (1,)): (41, 198, ALLOWED),
    ("socket", (2,)): (41, 198, errno.EAFNOSUPPORT),
    ("socketpair", (1,)): (53, 199, ALLOWED),
    ("prlimit64", (0, 7)): (302, 261, ALLOWED),
    ("prlimit64", (1, 7)): (302, 261, errno.EPERM),
    ("rt_sigaction, ignore SIGCHLD", (17, 0x7FFF00000000)): (13, 134, errno.EPERM),
    ("rt_sigaction, ignore SIGCHLD at a low address", (17, 0x1000)): (13, 134, errno.EPERM),
    ("rt_sigaction, ask about SIGCHLD", (17, 0)): (13, 134, ALLOWED),
    ("rt_sigaction, SIGTERM", (15, 0x7FFF00000000)): (13, 134, ALLOWED),
    ("clone", (0x11,)): (56, 220, ALLOWED),
    ("clone", (0x10000011,)): (56, 220, errno.EPERM),
    ("clone3", ()): (435, 435, errno.ENOSYS),
}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("call", CALLS)
def test_the_filter(machine: str, call: tuple[str, tuple[int, ...]]) -> None:
    on_x86_64, on_aarch64, expected = CALLS[call]
    assert verdict(machine, on_x86_64 if machine == "x86_64" else on_aarch64, *call[1]) == expected


def test_calls_of_another_machine_are_not_taken_for_this_ones() -> None:
    assert verdict("x86_64", 0, architecture=AARCH64) == KILLED
    assert verdict("x86_64", 0x40000000) == errno.ENOSYS


def test_an_unknown_machine_has_no_filter() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        filter_program("riscv64")
