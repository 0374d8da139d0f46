"""A filter for system calls: namespaces, mounts, tracing, networks, and memory that no resource limit counts.

bubblewrap has set up the namespaces by then.  Without the filter a program could make a user namespace of its own,
in which it may mount a tmpfs of any size.
"""

import ctypes
import platform
import struct

# Numbers from the kernel's tables (arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h).
_DENIED = {
    "x86_64": {
        "shmget": 29, "semget": 64, "msgget": 68, "ptrace": 101, "pivot_root": 155, "mount": 165, "umount2": 166,
        "mq_open": 240, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298,
        "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319, "bpf": 321,
        "userfaultfd": 323,
    },
    "aarch64": {
        "umount2": 39, "mount": 40, "pivot_root": 41, "unshare": 97, "ptrace": 117, "mq_open": 180, "msgget": 186,
        "semget": 190, "shmget": 194, "add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241,
        "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "memfd_create": 279, "bpf": 280,
        "userfaultfd": 282,
    },
}  # fmt: skip
# The same numbers on both: io_uring, the new mount interface, and memory that is nobody's.
_DENIED_EVERYWHERE = {
    "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432, "memfd_secret": 447,
}  # fmt: skip
# Of all families of sockets only the local one: asyncio and multiprocessing use it.  Their buffers stay at their size.
_SOCKET_CALLS = {"x86_64": (41, 53), "aarch64": (198, 199)}  # socket, socketpair
_SETSOCKOPT = {"x86_64": 54, "aarch64": 208}
_AF_UNIX = 1
# One process's limits set by another: the program and the harness may be of one user.
_PRLIMIT64 = {"x86_64": 302, "aarch64": 261}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE_NEWUSER = 0x10000000
_X32_BIT = 0x40000000

_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_GREATER_OR_EQUAL, _JUMP_IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


def filter_program(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter as classic BPF instructions ``(code, jump if true, jump if false, operand)``.

    Raises:
        KeyError: the machine's system call numbers are not known here.
    """
    denied = sorted({*_DENIED[machine].values(), *_DENIED_EVERYWHERE.values(), _SETSOCKOPT[machine]})
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCHITECTURE[machine]),
        (_RETURN, 0, 0, _KILL),  # another architecture's calls would have other numbers
        (_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    if machine == "x86_64":
        program += [(_JUMP_IF_GREATER_OR_EQUAL, 0, 1, _X32_BIT), (_RETURN, 0, 0, _ERROR | _ENOSYS)]
    for number in denied:
        program += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | _EPERM)]
    # clone3 hides its flags behind a pointer; the C library goes back to clone where it is missing.
    program += [(_JUMP_IF_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERROR | _ENOSYS)]
    # The number is loaded again after a first argument was looked at, which is compared in its lower half.
    for number in _SOCKET_CALLS[machine]:
        program += [
            (_JUMP_IF_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET),
            (_JUMP_IF_EQUAL, 1, 0, _AF_UNIX),
            (_RETURN, 0, 0, _ERROR | _EAFNOSUPPORT),
            (_LOAD, 0, 0, _NUMBER_OFFSET),
        ]
    program += [
        (_JUMP_IF_EQUAL, 0, 4, _PRLIMIT64[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET),
        (_JUMP_IF_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _ERROR | _EPERM),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    return [
        *program,
        (_JUMP_IF_EQUAL, 0, 3, _CLONE[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET),
        (_JUMP_IF_ANY_BIT, 0, 1, _CLONE_NEWUSER),
        (_RETURN, 0, 0, _ERROR | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]


def install() -> None:
    """Filter this process and everything that it starts, for good.

    Raises:
        OSError: the kernel refuses, or the machine is not known.
    """
    machine = platform.machine()
    if machine not in _DENIED:
        raise OSError(f"no system call filter for {machine}; there is one for {' and '.join(_DENIED)}")
    instructions = b"".join(struct.pack("=HBBI", *instruction) for instruction in filter_program(machine))
    code = ctypes.create_string_buffer(instructions, len(instructions))
    # struct sock_fprog: a 16-bit count, padding, a pointer.
    header = struct.pack("@HxxxxxxP", len(instructions) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value, pointer in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header)):
        if libc.prctl(option, ctypes.c_ulong(value), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
            raise OSError(ctypes.get_errno(), "the kernel refuses the system call filter")
