"""The pages: links between files of the repository, and the tables that are made from the code."""

import re
from pathlib import Path

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
