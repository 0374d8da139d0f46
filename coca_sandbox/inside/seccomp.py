"""A system call filter: denies what docker's default profile denies, and calls that evade the sandbox's limits.

Without it a program could create a user namespace of its own and mount a tmpfs of any size in it. Beyond docker's list
it denies System V and POSIX queues and shared memory, memory files, file watches and asynchronous I/O (kernel memory
that no resource limit counts), all tracing, and changes of scheduling.
"""

import ctypes
import platform
import struct

# Numbers on x86-64 and ARM64 (arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h); None
# where a machine has no such call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # Namespaces, mounts, and files without a path.
    "unshare": (272, 97), "setns": (308, 268), "chroot": (161, 51), "pivot_root": (155, 41), "mount": (165, 40),
    "umount2": (166, 39), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # Tracing, and other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "perf_event_open": (298, 241), "bpf": (321, 280),
    "userfaultfd": (323, 282), "move_pages": (279, 239), "migrate_pages": (256, 238), "lookup_dcookie": (212, 18),
    # Memory that no limit counts.
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "io_setup": (206, 0), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "inotify_init": (253, None), "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    # A program with a lower share of the processors would appear starved (process.py).
    "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "ioprio_set": (251, 30), "mbind": (237, 235),
    "get_mempolicy": (239, 236), "set_mempolicy": (238, 237), "set_mempolicy_home_node": (450, 450),
    # The machine itself.
    "acct": (163, 89), "clock_adjtime": (305, 266), "clock_settime": (227, 112), "settimeofday": (164, 170),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "create_module": (174, None),
    "query_module": (178, None), "get_kernel_syms": (177, None), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "nfsservctl": (180, 42), "sethostname": (170, 161),
    "setdomainname": (171, 162), "syslog": (103, 116), "vhangup": (153, 58), "personality": (135, 92),
    "ioperm": (173, None), "iopl": (172, None), "sysfs": (139, None), "ustat": (136, None), "uselib": (134, None),
    "_sysctl": (156, None),
}  # fmt: skip
_MACHINES = ("x86_64", "aarch64")
# Only local sockets, which asyncio and multiprocessing use, with buffers of the default size.
_SOCKET_CALLS = {"x86_64": (41, 53), "aarch64": (198, 199)}  # socket, socketpair
_SETSOCKOPT = {"x86_64": 54, "aarch64": 208}
_AF_UNIX = 1
# Limits of other processes: the program and the harness may have the same user.
_PRLIMIT64 = {"x86_64": 302, "aarch64": 261}
# If SIGCHLD is ignored, the kernel does not count the processor time of children.
_RT_SIGACTION = {"x86_64": 13, "aarch64": 134}
_SIGCHLD = 17
# Succeeds without effect: the caller would count as runnable while it yields.
_SCHED_YIELD = {"x86_64": 24, "aarch64": 124}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE_NEWUSER = 0x10000000
_X32_BIT = 0x40000000

_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_GREATER_OR_EQUAL, _JUMP_IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _FIRST_ARGUMENT_OFFSET, _SECOND_ARGUMENT_OFFSET = 0, 4, 16, 24
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def filter_program(machine: str) -> list[_Instruction]:
    """BPF instructions; ``ValueError`` for another machine."""
    if machine not in _MACHINES:
        raise ValueError(f"no system call filter for {machine}; there is one for {' and '.join(_MACHINES)}")
    column = _MACHINES.index(machine)
    denied = sorted({number for call in _DENIED.values() if (number := call[column]) is not None})
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCHITECTURE[machine]),
        (_RETURN, 0, 0, _KILL),  # another architecture's calls would have other numbers
        (_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    if machine == "x86_64":
        program += [(_JUMP_IF_GREATER_OR_EQUAL, 0, 1, _X32_BIT), (_RETURN, 0, 0, _ERROR | _ENOSYS)]
    for number in (*denied, _SETSOCKOPT[machine]):
        program += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | _EPERM)]
    program += [(_JUMP_IF_EQUAL, 0, 1, _SCHED_YIELD[machine]), (_RETURN, 0, 0, _ERROR)]
    # clone3 hides its flags behind a pointer; the C library goes back to clone where it is missing.
    program += [(_JUMP_IF_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERROR | _ENOSYS)]
    first, denied_call = (_LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET), (_RETURN, 0, 0, _ERROR | _EPERM)
    second = [(_LOAD, 0, 0, _SECOND_ARGUMENT_OFFSET + half) for half in (0, 4)]
    # Only the lower half of the first argument is compared.
    for number in _SOCKET_CALLS[machine]:
        program += _for_call(number, first, (_JUMP_IF_EQUAL, 1, 0, _AF_UNIX), (_RETURN, 0, 0, _ERROR | _EAFNOSUPPORT))
    program += _for_call(_PRLIMIT64[machine], first, (_JUMP_IF_EQUAL, 1, 0, 0), denied_call)
    program += _for_call(  # reading the action, which has a second argument of 0, is allowed
        _RT_SIGACTION[machine],
        first,
        (_JUMP_IF_EQUAL, 0, 5, _SIGCHLD),
        second[0],
        (_JUMP_IF_EQUAL, 0, 2, 0),
        second[1],
        (_JUMP_IF_EQUAL, 1, 0, 0),
        denied_call,
    )
    program += _for_call(_CLONE[machine], first, (_JUMP_IF_ANY_BIT, 0, 1, _CLONE_NEWUSER), denied_call)
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _for_call(number: int, *instructions: _Instruction) -> list[_Instruction]:
    """Instructions for one system call; after them its number is loaded again."""
    skipped = len(instructions) + 1
    return [(_JUMP_IF_EQUAL, 0, skipped, number), *instructions, (_LOAD, 0, 0, _NUMBER_OFFSET)]


def install() -> None:
    """Filter this process and everything that it starts; ``OSError`` if the kernel refuses."""
    instructions = b"".join(struct.pack("=HBBI", *instruction) for instruction in filter_program(platform.machine()))
    code = ctypes.create_string_buffer(instructions, len(instructions))
    # struct sock_fprog: a 16-bit count, padding, a pointer.
    header = struct.pack("@HxxxxxxP", len(instructions) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value, pointer in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header)):
        if libc.prctl(option, ctypes.c_ulong(value), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
            raise OSError(ctypes.get_errno(), "the kernel refuses the system call filter")
