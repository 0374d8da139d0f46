"""Sums in words, of graded difficulty: by how many digits the numbers have."""

from collections.abc import Callable, Iterator

import numpy as np

from experiments.real_world.question_families import Question

_DRAWS = 40  # for each record that is asked for; most fall into another part or are there already
_MOST_DIGITS = 4


def additions(size: int, random: np.random.Generator) -> Iterator[Question]:
    """Sums of two numbers of one to four digits."""
    ask = ("What is {a} plus {b}?", "How much is {a} + {b}?", "Add {b} to {a}. What is the result?")
    return _draw("sum", ask, lambda a, b: a + b, size, random)


def differences(size: int, random: np.random.Generator) -> Iterator[Question]:
    """Differences that are not negative."""
    ask = ("What is {a} minus {b}?", "How much is {a} - {b}?", "Take {b} away from {a}. What is left?")
    return _draw("difference", ask, lambda a, b: a - b, size, random)


def products(size: int, random: np.random.Generator) -> Iterator[Question]:
    """Products of numbers of one and two digits."""
    ask = ("What is {a} times {b}?", "How much is {a} x {b}?", "Multiply {a} by {b}. What is the result?")
    return _draw("product", ask, lambda a, b: a * b, size, random, digits=2)


def _draw(
    kind: str,
    ask: tuple[str, ...],
    compute: Callable[[int, int], int],
    size: int,
    random: np.random.Generator,
    digits: int = _MOST_DIGITS,
) -> Iterator[Question]:
    for _ in range(size * _DRAWS):
        longest = int(random.integers(1, digits + 1))
        left = int(random.integers(10 ** (longest - 1), 10**longest))
        right = int(random.integers(1, 10 ** int(random.integers(1, longest + 1))))
        a, b = max(left, right), min(left, right)
        result = compute(a, b)
        form = ask[int(random.integers(len(ask)))]
        yield Question(
            form.format(a=a, b=b),
            tuple(dict.fromkeys((str(result), f"{result:,}"))),
            # Both orders, and every way to ask, fall into one part.
            f"{kind}:{b}:{a}",
            difficulty=(len(str(a)) + len(str(b)) - 2) / (2 * digits - 2),
        )
