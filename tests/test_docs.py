"""The pages: links between files of the repository, and the tables that are made from the code.

``make docs`` renews the tables: ``python -m tests.test_docs``.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from coca_mindspeed.local.run_directory import FILES
from coca_mindspeed.utils.directories import LOCK, MARKER

ROOT = Path(__file__).parents[1]
_FOLDERS = ("benchmarks", "docs", "experiments", "recipes")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
_CODE = re.compile(r"^[ ]*```.*?^[ ]*```$", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    below = [page for folder in _FOLDERS for page in (ROOT / folder).rglob("*.md")]
    return sorted([*ROOT.glob("*.md"), *below])


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", _CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(f"{page.relative_to(ROOT)}: {link}")
    return broken


def test_links_within_the_repository_lead_to_a_file_and_a_heading():
    assert [link for page in pages() for link in broken_links(page)] == []


def files_of_a_run() -> str:
    """The table of the files in a run's directory."""
    rows = {
        MARKER: "id, release, method, digests of data and prompt; marks the directory as a run",
        LOCK: "held while a process uses the directory",
    } | FILES
    return "".join(f"| `{name}` | {text} |\n" for name, text in rows.items())


#: Page, head and rows of each table.
TABLES: list[tuple[str, str, Callable[[], str]]] = [("docs/training.md", "| file | contents |", files_of_a_run)]


def renewed(page: str, head: str, rows: str) -> str:
    """The text of ``page`` with ``rows`` in its table of this head."""
    text = (ROOT / page).read_text(encoding="utf-8")
    begin, old = re.search(rf"({re.escape(head)}\n\|[ |-]+\|\n)((?:\|.*\n)*)", text).groups()
    return text.replace(begin + old, begin + rows)


@pytest.mark.parametrize(("page", "head", "made"), TABLES)
def test_a_table_that_is_made_from_the_code_is_current(page, head, made):
    assert renewed(page, head, made()) == (ROOT / page).read_text(encoding="utf-8"), "make docs"


if __name__ == "__main__":
    for page, head, made in TABLES:
        (ROOT / page).write_text(renewed(page, head, made()), encoding="utf-8")
