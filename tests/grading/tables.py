"""Tables of cases beside the tests: tab-separated, ``<U+000A>`` for a special character, ``<none>`` for None."""

import csv
import re
from pathlib import Path


def read_table(name):
    """The rows of a table, without the header."""
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    return [tuple(re.sub(r"<U\+(\w{4})>", lambda m: chr(int(m[1], 16)), field) for field in row) for row in rows]


def text_cases(*functions):
    """Function, text and expected result, from ``text_functions.tsv``."""
    rows = [row for row in read_table("text_functions.tsv") if row[0] in functions]
    return [(name, text, None if expected == "<none>" else expected) for name, text, expected in rows]


def read_programs(name="programs.txt"):
    """Name, outcome, test code (or the name of tests) and program."""
    sections = Path(__file__).with_name(name).read_text(encoding="utf-8").split("\n=== ")[1:]
    cases = []
    for section in sections:
        title, _, content = section.partition("\n")
        outcome, _, name = title.partition(": ")
        tests, _, program = content.partition("\n---\n")
        cases.append((name, outcome, tests, program.strip("\n")))
    return cases
