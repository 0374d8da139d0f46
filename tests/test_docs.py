"""The pages: links between files of the repository, and the tables that are made from the code.

``make docs`` renews the tables: ``python -m tests.test_docs``.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from coca_mindspeed.local.run_directory import FILES
from coca_mindspeed.utils.directories import LOCK, MARKER

ROOT = Path(__file__).parents[1]
PACKAGE = "coca_mindspeed"
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


_PLACE = re.compile(r"((?:`[A-Za-z_][\w.]*`(?:, | and )?)+)(?: \([^)]*\))? in `([\w./{},]+)`")
_CHOICE = re.compile(r"(.*?)\{([^{}]*)\}(.*)")


def expanded(place: str) -> list[str]:
    """``a/{b,c}.py`` as two places."""
    if (choice := _CHOICE.fullmatch(place)) is None:
        return [place]
    return [path for one in choice[2].split(",") for path in expanded(f"{choice[1]}{one}{choice[3]}")]


def misplaced_names(page: Path) -> list[str]:
    """Each ``NAME in FILE`` of a page whose file does not have the name."""
    misplaced = []
    for names, place in _PLACE.findall(" ".join(page.read_text(encoding="utf-8").split())):
        paths = [
            ROOT / root / f"{path}{end}" for path in expanded(place) for root in ("", PACKAGE) for end in ("", ".py")
        ]
        texts = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
        for name in re.findall(r"[\w.]+", names) if texts else ():
            if not any(re.search(rf"\b{name.rpartition('.')[2]}\b", text) for text in texts):
                misplaced.append(f"{page.name}: {name} in {place}")
    return misplaced


def test_the_recipes_name_what_is_there():
    assert [*misplaced_names(ROOT / "CONTRIBUTING.md"), *misplaced_names(ROOT / "docs/architecture.md")] == []


def files_of_a_run() -> str:
    """The table of the files in a run's directory."""
    rows = {
        MARKER: "what the run was started with: settings, digests of data and prompt, form of the prompts, release",
        LOCK: "held while a process uses the directory",
    } | FILES
    return "".join(f"| `{name}` | {text} |\n" for name, text in rows.items())


_PROBLEMS = ("Problem", "Requirement", "Finding", "Hook", "Upstream", "Run", "Row", "item", "_problem")
_PROBLEMS += ("_off", "_grpo", "_divides", "_is_multiple", "_at_least")
_SUBJECT = re.compile(r"coca_mindspeed/(mindspeed|verl|local|integrations/(?:trl|slime|ms_swift))")
_ENGINES = {"mindspeed": "MindSpeed-RL", "verl": "verl", "local": "local engine", "trl": "TRL", "ms_swift": "ms-swift"}


def error_codes() -> str:
    """The table of the codes of problems, with the keys that the code names as constants."""
    places: dict[str, set[str]] = {}
    keys: dict[str, set[str]] = {}
    for file in sorted((ROOT / "coca_mindspeed").rglob("*.py")):
        subject = _SUBJECT.match(file.relative_to(ROOT).as_posix())
        engine = subject[1].rpartition("/")[2] if subject else ""
        tree = ast.parse(file.read_text(encoding="utf-8"))
        constants = dict(_constants(tree))
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1):
            code, key = (_text(argument, constants) for argument in call.args[:2])
            if getattr(call.func, "id", "") in _PROBLEMS and code and re.fullmatch("[a-z0-9][a-z0-9-]+", code):
                places.setdefault(code, set()).add(_ENGINES.get(engine, engine))
                keys.setdefault(code, set()).update({key} if key else ())
    files = {engine: f"{engine}/required_values.yaml" for engine in ("mindspeed", "verl")}
    files["integrations"] = "integrations/required_options.yaml"
    tables = {name: yaml.safe_load((ROOT / "coca_mindspeed" / file).read_bytes()) for name, file in files.items()}
    for engine, rows in {**tables.pop("integrations"), **tables}.items():
        for row in rows:
            places.setdefault(row["code"], set()).add(_ENGINES.get(engine, engine))
            keys.setdefault(row["code"], set()).update(row["keys"])
    rows = []
    for code in sorted(places):
        engines = ", ".join(sorted(filter(None, places[code])))
        rows.append(f"| `{code}` | {engines} | {', '.join(f'`{key}`' for key in sorted(keys[code]))} |\n")
    return "".join(rows)


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names of a module that stand for texts."""
    values: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name | ast.Tuple):
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            several = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for name, value in zip(names, several, strict=False):
                if isinstance(name, ast.Name) and (text := _text(value, values)):
                    values[name.id] = text
    yield from values.items()


def _text(node: ast.expr, constants: Mapping[str, str]) -> str | None:
    """The text of an expression of constants and names; None of any other."""
    if isinstance(node, ast.JoinedStr):
        parts = [
            _text(getattr(part, "value", part) if isinstance(part, ast.FormattedValue) else part, constants)
            for part in node.values
        ]
        return None if None in parts else "".join(map(str, parts))
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    return constants.get(node.id) if isinstance(node, ast.Name) else None


#: Page, head and rows of each table.
TABLES: list[tuple[str, str, Callable[[], str]]] = [
    ("docs/training.md", "| file | contents |", files_of_a_run),
    ("docs/errors.md", "| code | by | keys |", error_codes),
]


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
