"""Made-up rows in Big-Math's schema: 3% of the questions repeat an earlier one, 3% repeat one with a word changed."""

import itertools
import random
import string

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


def rows(number, seed=0):
    """``number`` rows, the same for the same seed."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 10))) for _ in range(20_000)]
    earlier: list[tuple[list[str], str]] = []
    for _ in range(number):
        kind = rng.random()
        if earlier and kind < 0.06:
            words, answer = rng.choice(earlier)
            if kind >= 0.03:
                words = [rng.choice(vocabulary), *words[1:]]
        else:
            words, answer = rng.choices(vocabulary, k=rng.randint(12, 90)), str(rng.randint(-999, 9999))
        if len(earlier) < 5_000:
            earlier.append((words, answer))
        yield {
            "problem": " ".join(words),
            "answer": answer,
            "source": rng.choice(("orca_math", "olympiads")),
            "domain": ["Mathematics -> Algebra -> Equations"],
            "llama8b_solve_rate": rng.choice([None, *(solved / 64 for solved in range(65))]),
        }


def write(number, path, seed=0):
    """Write ``number`` rows as Parquet, streamed."""
    remaining = rows(number, seed)
    with pq.ParquetWriter(path, SCHEMA) as writer:
        while batch := list(itertools.islice(remaining, 5_000)):
            writer.write_table(pa.Table.from_pylist(batch, schema=SCHEMA))
