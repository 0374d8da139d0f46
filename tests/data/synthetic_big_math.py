"""Rows in Big-Math's schema, made up: ``python -m tests.data.synthetic_big_math ROWS FILE`` writes a Parquet file.

3% of the questions repeat an earlier one, 3% repeat one with a word changed, 1% have a gold answer that cannot be
parsed; word frequencies follow Zipf's law.
"""

import itertools
import random
import string
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        ("problem", pa.string()),
        ("answer", pa.string()),
        ("source", pa.string()),
        ("domain", pa.list_(pa.string())),
        ("llama8b_solve_rate", pa.float64()),
    ]
)
SOURCES = ("orca_math", "cn_k12", "olympiads", "math", "big_math")


def rows(number, seed=0):
    """``number`` rows, the same for the same seed."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 10))) for _ in range(20_000)]
    weights = list(itertools.accumulate(1 / (rank + 10) for rank in range(len(vocabulary))))
    earlier: list[tuple[str, str]] = []
    for _ in range(number):
        kind = rng.random()
        if earlier and kind < 0.06:
            question, answer = rng.choice(earlier)
            if kind >= 0.03:
                words = question.split()
                words[rng.randrange(len(words))] = rng.choice(vocabulary)
                question = " ".join(words)
        else:
            question, answer = _question(rng, vocabulary, weights), _answer(rng)
        if len(earlier) < 5_000:
            earlier.append((question, answer))
        yield {
            "problem": question,
            "answer": answer,
            "source": rng.choice(SOURCES),
            "domain": ["Mathematics -> Algebra -> Equations"],
            "llama8b_solve_rate": rng.choice([None, *(solved / 64 for solved in range(65))]),
        }


def _question(rng, vocabulary, weights):
    words = rng.choices(vocabulary, cum_weights=weights, k=rng.randint(12, 90))
    for place in range(0, len(words), 7):
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        words[place] = rng.choice([f"{a}", f"$x^2+{a}$", f"\\frac{{{a}}}{{{b}}}"])
    return " ".join(words)


def _answer(rng):
    kind = rng.random()
    a, b = rng.randint(1, 999), rng.randint(2, 99)
    if kind < 0.6:
        return str(rng.randint(-999, 9999))
    if kind < 0.85:
        return f"\\frac{{{a}}}{{{b}}}"
    return f"{a}\\sqrt{{{b}}}+x^{rng.randint(1, 9)}" if kind < 0.99 else "\\text{"


def write(number, path, seed=0):
    """Write ``number`` rows as Parquet, streamed."""
    remaining = rows(number, seed)
    with pq.ParquetWriter(path, SCHEMA) as writer:
        while batch := list(itertools.islice(remaining, 5_000)):
            writer.write_table(pa.Table.from_pylist(batch, schema=SCHEMA))


if __name__ == "__main__":
    write(int(sys.argv[1]), Path(sys.argv[2]))
