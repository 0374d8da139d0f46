"""Texts that tests compare with what a program prints or writes now; the module of each test writes them anew."""

import difflib

import pytest


def compare(frozen: str, now: str, module: str) -> None:
    """Fail with the differences and with the command that writes the frozen text anew, ``python -m module``."""
    if frozen != now:
        lines = difflib.unified_diff(frozen.splitlines(), now.splitlines(), "frozen", "now", n=1, lineterm="")
        pytest.fail("\n".join([*lines, f"if it is meant: python -m {module}"]), pytrace=False)
