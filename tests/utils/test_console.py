"""Printed text: nothing in it is obeyed, no line is wrapped, and no number is lost on a narrow terminal."""

import io

import pytest
from rich.table import Table

from coca_mindspeed.cli import main
from coca_mindspeed.utils.console import PlainConsole, one_line, print_text, printable

PATH = "/data/[bold]" + "/".join(["a folder with a long name"] * 8) + "/[/bold]/:smile:.jsonl"


def printed(width, *renderables, terminal=False):
    file = io.StringIO()
    file.isatty = lambda: terminal
    console = PlainConsole(file=file, width=width)
    for renderable in renderables:
        console.print_table(renderable) if isinstance(renderable, Table) else console.print(renderable)
    return file.getvalue()


def test_no_character_commands_the_terminal():
    for character in (*map(chr, [*range(9), *range(11, 32), *range(127, 160)]), "\u202e", "\ud800"):
        shown = printable(f"a{character}b")
        assert character not in shown
        assert shown.startswith("a\\")
        assert shown.isprintable()


def test_text_of_any_script_stays_as_it_is():
    text = "数学 naïve 🙂‍↔️ ½\n\tمرحبا"
    assert printable(text) is text
    assert one_line(" a\n\tb ") == "a b"


@pytest.mark.parametrize("width", [30, 80, None])
def test_a_path_is_one_line_and_no_markup(width):
    assert printed(width, f"model: {PATH}") == f"model: {PATH}\n"
    assert printed(width, "red \x1b[31m alert") == "red \\x1b[31m alert\n"


def metrics():
    table = Table("data", "accuracy", "ECE", "Brier", "AUROC", title="results of [a]", title_justify="left")
    for name in ("gsm8k", "a data set with a long name", "[red]x[/red]"):
        table.add_row(name, "0.123456 ± 0.012", "0.234567", "0.345678", "0.456789")
    return table


@pytest.mark.parametrize("width", [10, 40, 60, 80, 120, None])
def test_no_width_loses_a_number_or_a_heading(width):
    shown = printed(width, metrics(), terminal=True)
    for word in ("gsm8k", "0.123456", "0.012", "0.234567", "0.345678", "0.456789", "accuracy", "AUROC", "[red]x[/red]"):
        assert word in shown, (width, word)
    assert "…" not in shown


def test_a_table_in_a_pipe_is_as_wide_as_it_needs_to_be(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table("path", "n")
    table.add_row(PATH, "1")
    assert PATH in printed(None, table)
    monkeypatch.setenv("COLUMNS", "40")  # the user may still set the width
    table = Table("words")
    table.add_row("many words " * 20)
    assert max(map(len, printed(None, table).splitlines())) == 40


def test_print_text_writes_what_the_stream_can_hold_at_once():
    raw = io.BytesIO()
    ascii_only = io.TextIOWrapper(raw, encoding="ascii")
    print_text("数 \x1b[2J \udcff", ascii_only)
    assert raw.getvalue() == rb"\u6570 \x1b[2J \udcff" + b"\n"


def test_the_command_line_prints_errors_so(capsys):
    main(["config", "show", "\x1b[31m[bold].yaml"])
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert "\\x1b[31m[bold].yaml: " in error
