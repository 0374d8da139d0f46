r"""Reject unevaluated answers in training.

By value, ``\sum_{k=1}^{100} k`` equals 5050; a policy could earn the reward by restating the question. The rule is in
docs/grading.md. It reads spelling only.
"""

import re
from collections.abc import Sequence

from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.math.extract import final_answer, formulas
from coca_mindspeed.grading.math.normalise import Answer, fraction_terms, one_spelling, read_answer
from coca_mindspeed.grading.verdict import Outcome, Verdict

# Unevaluated unless the gold answer has one too.
_UNDONE = {
    "sum": r"\\sum(?![a-z])|∑",
    "product": r"\\prod(?![a-z])|∏",
    "integral": r"\\(?:i*int|oint)(?![a-z])|∫",
    "limit": r"\\lim(?:sup|inf)?(?![a-z])|\blim\b",
    "derivative": r"\\frac\{?(?:d|\\partial|\\mathrm\{d\})\b[^{}]*\}?\{?(?:d|\\partial|\\mathrm\{d\}) ?[a-z]|\\partial",
    "greatest common divisor": r"gcd|\\operatorname\{?hcf|\bhcf\b",
    "least common multiple": r"lcm",
    "greatest or least": r"(?<![a-z])(?:max|min|sup)(?![a-z])|\\inf(?![a-z])",
    "remainder": r"mod(?![a-z])|(?<=\d) ?\\?% ?(?=\d)",
    "determinant": r"\\det(?![a-z])|\{vmatrix\}",
    "average": r"\b(?:mean|average|median)\b",
}
# Closed forms: answers, unless the question asks for their value.
_CLOSED_FORMS = {
    "power": r"\^|\*\*",
    "root": r"\\sqrt|sqrt|√",
    "factorial": r"!",
    "binomial coefficient": r"\\[dt]?binom|\\choose|C\(",
    "logarithm": r"\\(?:log|ln|lg)(?![a-z])|(?<![a-z\\])(?:log|ln|lg)(?![a-z])",
    "trigonometric function": r"(?:sin|cos|tan|cot|sec|csc)h?(?![a-z])",
    "floor or ceiling": r"\\[lr]?(?:floor|ceil)",
    "absolute value": r"\||\\[lr]?vert(?![a-z])",
}
_UNDONE_SIGNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _UNDONE.items()}
_CLOSED_SIGNS = {name: re.compile(pattern) for name, pattern in _CLOSED_FORMS.items()}

_ARITHMETIC = re.compile(
    r"(?<=[\w)}!|%])\s*(?:[-+*/]|\\(?:cdot|times|div|pm)(?![a-z]))|\\[dtc]?frac|\)\s*\(|\\over(?![a-z])"
)
_FRACTION = re.compile(r"/|\\[dtc]?frac")
_ONLY_DIGITS = re.compile(r"[\d\s.()+-]+")
_ELEMENTS = re.compile(r",|;|&|\\\\|\\cup(?![a-z])|(?<![a-z])(?:or|and)(?![a-z])|\\(?:begin|end)\{\w+\}")
_EQUALS = re.compile(r"(?<![<>!\\])=(?![^{}]*(?<!\\)\})")  # not the one of \sum_{k=1}


def why_unevaluated(question: str, gold: str, response: str) -> str:
    """Return why a right response (or bare answer) is unevaluated or restates the question, or ``""``."""
    final = final_answer(response)
    wanted, given = read_answer(gold), read_answer(response if final is None else final)
    if _plain_form(wanted) is not None and _plain_form(wanted) == _plain_form(given):
        return ""
    tokens = _tokens(one_spelling(response if final is None else final))
    if sorted(tokens) == sorted(_tokens(one_spelling(gold))):  # 1+x is written as x+1 is
        return ""
    value = _EQUALS.split(given.body)[-1].partition(r"\approx")[0].strip()  # in 2+3=5\approx 5.0, only 5 is judged
    for name, sign in _UNDONE_SIGNS.items():
        if sign.search(value) and not sign.search(gold):
            return f"a {name} is left to evaluate"
    for name, sign in _CLOSED_SIGNS.items():
        if sign.search(value) and sign.search(question) and not sign.search(gold):
            return f"the question asks for the value of the {name}"
    wanted_elements = _elements(wanted.body)
    if wanted_elements and all(map(_is_number, wanted_elements)):
        # 391/17 has to be worked out, unless the gold answer is a fraction as well.
        as_fraction = bool(_FRACTION.search(gold))
        undone = next((element for element in _elements(value) if _needs_evaluation(element, as_fraction)), "")
        if undone:
            return f"arithmetic is left to do: {undone:.40}"
    return "it restates the question" if _restates(question, given, tokens) else ""


def _plain_form(answer: Answer) -> tuple[object, ...] | None:
    """A number up to blanks and zeros: the value of a decimal, the terms of a fraction."""
    if answer.value is None:
        return None
    whole_or_decimal = re.fullmatch(r"[-+]?[\d,. ]+", answer.body.replace("{,}", ","))
    return (answer.value, answer.percent) if whole_or_decimal else (answer.value, answer.percent, *_tokens(answer.body))


def _needs_evaluation(element: str, as_fraction: bool) -> bool:
    if not _is_number(element):
        return bool(_ARITHMETIC.search(element) or _ONLY_DIGITS.fullmatch(element))
    terms = fraction_terms(read_answer(element).body.lstrip("-+ "))
    if as_fraction or terms is None:
        return False
    lowest = terms[1] / terms[2]
    return abs(terms[1]) != abs(lowest.numerator) or terms[2] != lowest.denominator


def _elements(body: str) -> list[str]:
    match = re.fullmatch(r"(?:[(\[]|\\\{)([^()\[\]]*?)(?:[)\]]|\\\})", body)
    elements = (element.strip() for element in _ELEMENTS.split(match[1] if match else body))
    return [element for element in elements if element]


def _is_number(element: str) -> bool:
    return read_answer(element).value is not None


def _restates(question: str, given: Answer, tokens: list[str]) -> bool:
    """Whether a formula of the question has the same tokens in any order, or its text contains the answer."""
    if not any(not token.isalnum() for token in tokens):
        return False  # a bare number or word: many questions hold their answer
    if given.value is not None and re.fullmatch(r"[-+]?[\d,.]+", given.body) and not given.percent:
        return False
    if any(sorted(_tokens(one_spelling(formula))) == sorted(tokens) for formula in formulas(question)):
        return True
    joined, text = " ".join(tokens), " ".join(_tokens(one_spelling(question)))
    edge = r"[-+*/^=!.]"
    return re.search(rf"(?<!{edge} )(?<![^ ]){re.escape(joined)}(?![^ ])(?! {edge} \w)", text) is not None


def _tokens(text: str) -> list[str]:
    r"""Tokens without grouping: ``\frac{17}{4}``, ``(17)/4`` and ``17 \div 4`` are the same."""
    argument = r"\s*(?:\{([^{}]*)\}|(\\[a-zA-Z]+|\w))"
    text = re.sub(rf"\\[dtc]?frac{argument}{argument}", r"\1\2/\3\4", text)
    text = re.sub(r"\\(?:cdot|times)(?![a-zA-Z])|\*", "*", re.sub(r"\\div(?![a-zA-Z])", "/", text))
    return re.findall(r"\\[a-zA-Z]+|\d+(?:\.\d+)?|[a-zA-Z]+|[^\s\w(){}\[\]$\\]", text)


def reject_unevaluated(records: Sequence[Record], answers: Sequence[str], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Verdicts for training: a right math answer is wrong if :func:`why_unevaluated` gives a reason."""
    judged = []
    for record, answer, verdict in zip(records, answers, verdicts, strict=True):
        named = record.metadata.get("grader")
        is_math = record.category == "math" if named is None else named == "math"
        if verdict.correct and not verdict.final and is_math:
            problem = why_unevaluated(record.question, record.answer, answer)
            verdict = Verdict(Outcome.WRONG, problem, verdict.seconds) if problem else verdict
        judged.append(verdict)
    return judged
