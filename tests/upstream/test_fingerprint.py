"""Fingerprints see code, and nothing but code."""

from pathlib import Path

import pytest

from coca_mindspeed.upstream.manifest import TargetError, fingerprint, source_of

SOURCE = '''"""A module."""
import os as operating
from json import dumps

REGISTRY = {}
LIMIT: int = 3


class Worker:
    table = dict()

    @staticmethod
    def run(x):  # a comment
        """Say # nothing."""

        text = """keep # this
        as it is"""
        return x + 1, text


def outside():
    return 1
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from .module import Worker\n")
    (tmp_path / "package" / "module.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize(
    ("target", "first"),
    [
        ("package.module:Worker", "class Worker:"),
        ("package.module:Worker.run", "    @staticmethod"),
        ("package.module:Worker.table", "    table = dict()"),
        ("package.module:REGISTRY", "REGISTRY = {}"),
        ("package.module:LIMIT", "LIMIT: int = 3"),
        ("package.module:operating", "import os as operating"),
        ("package.module:dumps", "from json import dumps"),
        ("package:Worker", "from .module import Worker"),
    ],
)
def test_finds_every_kind_of_definition(root: Path, target: str, first: str) -> None:
    assert source_of(root, target).splitlines()[0] == first


def test_comments_blank_lines_and_indentation_do_not_count(root: Path) -> None:
    before = fingerprint(root, "package.module:Worker.run")
    edited = SOURCE.replace("# a comment", "# another one").replace("    def run", "    # new\n\n    def run")
    (root / "package" / "module.py").write_text(edited)
    assert fingerprint(root, "package.module:Worker.run") == before


@pytest.mark.parametrize(("old", "new"), [("x + 1", "x + 2"), ("# this", "# that"), ("@staticmethod", "@classmethod")])
def test_code_strings_and_decorators_count(root: Path, old: str, new: str) -> None:
    before = fingerprint(root, "package.module:Worker.run")
    (root / "package" / "module.py").write_text(SOURCE.replace(old, new))
    assert fingerprint(root, "package.module:Worker.run") != before


@pytest.mark.parametrize("target", ["package.module:Missing", "package.module:Worker.missing", "package.nothing:x"])
def test_what_is_missing_is_named(root: Path, target: str) -> None:
    with pytest.raises(TargetError, match=target.split(":")[0]):
        fingerprint(root, target)
