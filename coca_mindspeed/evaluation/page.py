"""Write a report as Markdown with its pictures beside it, and as one HTML file that needs no other file."""

import base64
import html
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt

from coca_mindspeed.utils.console import one_line, printable
from coca_mindspeed.utils.files import write_atomically

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
  :root {{ color-scheme: light; }}
  body {{ font: 15px/1.5 system-ui, sans-serif; color: #111; margin: 0 auto; max-width: 1400px; padding: 1.5rem; }}
  h1 {{ font-size: 1.6rem; margin: 0; }}
  h2 {{ font-size: 1.2rem; margin: 2.2rem 0 .4rem; border-bottom: 2px solid #111; }}
  h3 {{ font-size: 1rem; margin: 1.4rem 0 .3rem; }}
  nav a {{ margin-right: 1rem; color: #0b5394; }}
  table {{ display: block; overflow-x: auto; border-collapse: collapse; font-size: .86rem; }}
  th, td {{ padding: .2rem .6rem; border-bottom: 1px solid #ccc; font-variant-numeric: tabular-nums; }}
  th {{ border-bottom: 2px solid #111; }}
  img {{ max-width: 100%; height: auto; }}
  pre {{ white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; border: 1px solid #ddd; padding: .5rem; }}
</style>
</head>
<body>
<nav>{links}</nav>
{body}</body>
</html>
"""


def write_page(path: Path, text: str, pictures: Mapping[str, bytes]) -> tuple[Path, Path]:
    """Write a report and its pictures; return the paths of the HTML file and of the Markdown file.

    Args:
        path: of the Markdown file, ``NAME.md``; the HTML file is ``NAME.html`` beside it.
        text: CommonMark with tables; it begins with a heading. HTML in it is shown as text.
        pictures: PNG files by the path that the text names, relative to the directory of ``path``.  The HTML file
            embeds them and shows no other picture.
    """
    text = printable(text)
    for name, png in pictures.items():
        write_atomically(path.parent / name, png)
    write_atomically(path, text)
    page = path.with_suffix(".html")
    write_atomically(page, _html(text, pictures))
    return page, path


def _html(text: str, pictures: Mapping[str, bytes]) -> str:
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    links: list[str] = []
    for token, content in pairwise(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            token.attrSet("id", f"section-{len(links)}")
            links.append(f'<a href="#section-{len(links)}">{parser.renderInline(content.content)}</a>')
    for picture in (child for token in tokens for child in token.children or () if child.type == "image"):
        png = base64.b64encode(pictures.get(unquote(str(picture.attrGet("src"))), b"")).decode("ascii")
        picture.attrSet("src", f"data:image/png;base64,{png}")
    title = html.escape("".join(part.content for part in tokens[1].children or ()))
    return _PAGE.format(title=title, links="".join(links), body=parser.renderer.render(tokens, parser.options, {}))


_MARKUP = re.compile(r"[\\`*<&~\[\]]|(?<!\w)_+|_+(?!\w)")


def plain_text(text: str) -> str:
    """Return text as one line of Markdown without markup; table cells also need their bars escaped."""
    return _MARKUP.sub(lambda found: "".join(f"\\{character}" for character in found[0]), one_line(text))


def inline_code(text: str) -> str:
    """Return text as inline code on one line; a backtick would end it and becomes an apostrophe."""
    return f"`{one_line(text).replace('`', chr(39))}`"


def code_block(text: str) -> str:
    """Return text as a code block of Markdown."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"
