"""The filter for system calls, run here for both machines: what it allows, and what it denies by which error."""

import errno

import pytest

from coca_mindspeed.grading.code.inside.seccomp import filter_program
from tests.grading.tables import read_table

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


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(("name", "arguments", "on_x86_64", "on_aarch64", "expected"), read_table("system_calls.tsv"))
def test_the_filter(machine: str, name: str, arguments: str, on_x86_64: str, on_aarch64: str, expected: str) -> None:
    number = int(on_x86_64 if machine == "x86_64" else on_aarch64)
    found = verdict(machine, number, *(int(argument, 0) for argument in arguments.split()))
    assert found == {"allowed": ALLOWED, "0": FAKED}.get(expected, getattr(errno, expected, None)), name


def test_calls_of_another_machine_are_not_taken_for_this_ones() -> None:
    assert verdict("x86_64", 0, architecture=AARCH64) == KILLED
    assert verdict("x86_64", 0x40000000) == errno.ENOSYS


def test_an_unknown_machine_has_no_filter() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        filter_program("riscv64")
