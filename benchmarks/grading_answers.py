"""A realistic mix of mathematical answers whose verdicts are known by construction.

60% integers and decimals, 25% fractions and radicals, 15% symbolic; half of each wrong.  A wrong answer is near the
gold one: a neighbour, a changed digit, a changed coefficient.
"""

import random
from dataclasses import dataclass

FILLER = (
    "We write down what is given and look for the quantity asked for. Substituting into the relation, we get a value "
    "for the first unknown, and from it the second. Checking with the conditions, nothing is contradicted. "
)
BOMBS = (
    "9^{{9^{{9^{{{n}}}}}}}",
    "{n}^{{{n}^{{{n}^{{{n}}}}}}}",
    r"\sum_{{k=1}}^{{10^{{{n}}}}} \frac{{1}}{{k^k}}",
    "10^{{{n}99999999}}",
)


@dataclass(frozen=True)
class Item:
    """A gold answer, a response to it, and whether the response is right (None: a bomb, which must not be)."""

    gold: str
    response: str
    right: bool | None

    @property
    def tagged(self) -> str:
        """The response in the form without which MindSpeed-RL's math_verify gives nothing."""
        return f"<think>{FILLER}</think><answer>{self.response}</answer>"


def make_items(count: int, seed: int, bomb_share: float = 0.0) -> list[Item]:
    draw = random.Random(seed)
    items: list[Item] = []
    seen: set[tuple[str, str]] = set()
    while len(items) < count:
        if draw.random() < bomb_share:
            gold, answer, right = "7", draw.choice(BOMBS).format(n=draw.randint(20, 10**6)), None
        else:
            right = draw.random() < 0.5
            kind = draw.choices((_number, _fraction_or_radical, _symbolic), (60, 25, 15))[0]
            gold, answer = kind(draw, right)
        if (gold, answer) in seen:  # graders may remember pairs; here each one is new
            continue
        seen.add((gold, answer))
        response = f"{FILLER * draw.randint(1, 6)}The answer is $\\boxed{{{answer}}}$."
        items.append(Item(gold, response, right))
    return items


def _number(draw: random.Random, right: bool) -> tuple[str, str]:
    if draw.random() < 0.7:
        value = draw.randint(-200, 100_000)
        shown = value if right else value + draw.choice((-1, 1, 10, -value * 2 or 3))
        return str(value), draw.choice((f"{shown}", f"{shown:,}", f"{shown}.0"))
    hundredths = draw.randint(1, 99_999)
    shown = hundredths if right else hundredths + draw.choice((-1, 1, 100))
    return f"{hundredths / 100:.2f}", draw.choice(
        (f"{shown / 100:.2f}", f"{shown / 100:.3f}", rf"\frac{{{shown}}}{{100}}")
    )


def _fraction_or_radical(draw: random.Random, right: bool) -> tuple[str, str]:
    a, b, scale = draw.randint(1, 60), draw.randint(2, 60), draw.randint(2, 5)
    if draw.random() < 0.5:
        shown = a if right else a + 1
        forms = (rf"\dfrac{{{scale * shown}}}{{{scale * b}}}", f"{shown}/{b}")
        return rf"\frac{{{a}}}{{{b}}}", draw.choice(forms)
    radicand = draw.choice((2, 3, 5, 6, 7, 10, 11, 13))
    shown = a if right else a + 1
    forms = (rf"\sqrt{{{radicand * shown * shown}}}", rf"\frac{{{radicand * shown}}}{{\sqrt{{{radicand}}}}}")
    return rf"{a}\sqrt{{{radicand}}}", draw.choice(forms)


def _symbolic(draw: random.Random, right: bool) -> tuple[str, str]:
    a, b, c = (draw.randint(2, 20) for _ in range(3))
    d = c if right else c + 1
    forms = (
        (f"(x+{a})(x+{c})", f"x^2+{a + d}x+{a * d}"),
        (f"{a}x+{c}", f"{d}+{a}x"),
        (f"({a},{c})", f"({a}, {d})"),
        (f"{a},{a + b},{a + b + c}", f"{a + b + d}, {a}, {a + b}"),
        (f"[{a},{a + c})", f"[{a}, {a + d})"),
        (rf"\frac{{{a}\pi}}{{{c}}}", rf"\frac{{\pi}}{{{d}}}\cdot {a}"),
        (f"x={a}+{c}t", f"x = {d}t+{a}"),
    )
    return draw.choice(forms)
