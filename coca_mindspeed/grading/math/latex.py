r"""latex2sympy's parser with symbols as they are written. Runs in worker processes only.

The library lower-cases symbols, reads ``I`` as ``i`` and ``\gamma`` as a constant, and drops primes, indices of numbers
and a superscript T. Here two symbols are equal only if letter, case, alphabet, index, prime and accent are.
"""

import functools
import re
import sys
from typing import Any

import sympy
from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from latex2sympy2_extended.math_normalization import normalize_latex
from latex2sympy2_extended.symbols import GREEK_LETTER_MAP
from math_verify.parser import get_last_eq
from sympy.core.relational import Relational

# units=False: the library's list of units includes single letters, and would read 5t as 5.
_NORMALISATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last", equations=False
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)

_INDEX = r"_\s*(?:\{[^{}]*\}|\w|\\[a-zA-Z]+)"
_SYMBOL = r"\\[a-zA-Z]+\s*\{[^{}]*\}|\\[a-zA-Z]+|[a-zA-Z]"
_PRIME_SIGNS = r"(?:'\s*)+|\^\s*\\prime(?![a-zA-Z])|\^\s*\{\s*(?:\\prime\s*)+\}"
_PRIMED = re.compile(rf"(?P<symbol>{_SYMBOL})\s*(?P<index>{_INDEX})?\s*(?P<primes>{_PRIME_SIGNS})(?P<late>{_INDEX})?")
_TEXT_COMMANDS = r"\\(?:text|textrm|textit|textbf|mathrm|mathit|mathbf|mbox|operatorname)\s*"
_ACCENT_COMMANDS = r"\\(?:bar|overline|vec|overrightarrow|hat|tilde|widetilde|dot|ddot)\s*"
_OPAQUE = re.compile(rf"((?:{_TEXT_COMMANDS}|{_ACCENT_COMMANDS})\{{)([^{{}}]*)\}}")
_TEXT_COMMAND = re.compile(_TEXT_COMMANDS + r"\{([^{}]*)\}")
# \gamma is a symbol; \Gamma is a function where a bracket follows, and a symbol elsewhere.
_GAMMA = re.compile(r"\\gamma(?![a-zA-Z])|\\Gamma(?![a-zA-Z])(?!\s*(?:\\left)?\s*\()")
# The grammar takes ≪ for <, ⊕ for + and ∘ for a product.
_MISREAD = re.compile("[∔⊕⊞∸⋄⊡⋆∘∙⊗⊠⋈⋉⋊≣≟≎≏≐≑≒≓≔≕≖≗≊≋≃≅≪≺⋖≲≾≫≻⋗≳≿≁≄≇≉≢]")
_ACCENTS = {"overline": "bar", "overrightarrow": "vec", "widetilde": "tilde"}
_PLAIN_STYLES = ("text", "textit", "textbf", "textnormal", "mathrm", "mathit", "mathbf", "mbox")


class Parser(_Latex2Sympy):
    """Parses normalised LaTeX once; ``full`` uses ANTLR's full-context prediction (slower, rejects less)."""

    def __init__(self, full: bool) -> None:
        super().__init__(is_real=True, config=_CONVERSION)
        self._full = full

    def create_parser(self, latex_str: str) -> Any:
        parser = super().create_parser(latex_str)
        parser._interp.predictionMode = PredictionMode.LL if self._full else PredictionMode.SLL
        return parser

    def parse_number(self, text: str) -> Any:
        # sympy.Number reads a string by running "from sympy import *", once for each number.
        return sympy.Integer(int(text)) if text.isascii() and text.isdigit() else super().parse_number(text)

    def convert_atom_expr(self, atom_expr: Any) -> Any:
        """A symbol under its distinctive name, or a power of it."""
        name = _letter_name(atom_expr)
        if index := atom_expr.subexpr():
            name += f"_{{{_index_name(index.getText())}}}"
        symbol = sympy.pi if name == "pi" else self.create_symbol(name)
        power = atom_expr.supexpr() if hasattr(atom_expr, "supexpr") else None
        if power is None:
            return symbol
        exponent = self.convert_expr(power.expr()) if power.expr() else self.convert_atom(power.atom())
        return sympy.Pow(symbol, exponent, evaluate=False)

    def convert_atom(self, atom: Any) -> Any:
        number = atom.number_subexpr()
        if number and number.subexpr():  # digits in another base, which have no value here
            return self.create_symbol(f"{number.NUMBER().getText()}_{{{_index_name(number.subexpr().getText())}}}")
        return super().convert_atom(atom)

    def convert_exp(self, exp: Any) -> Any:
        if exp.subexpr():  # of a bracket; the grammar has none for a symbol here
            raise ValueError("an index of a power")
        return super().convert_exp(exp)

    def convert_postfix(self, postfix: Any) -> Any:
        """As in the library, but ``x^T`` is a power unless x is a matrix, and only numbers have primes."""
        converted = super().convert_postfix(postfix)
        signs = [op.transpose().getText() for op in postfix.postfix_op() if op.transpose()]
        if not signs or getattr(converted, "is_Matrix", False):
            return converted
        if len(signs) > 1 or len(postfix.postfix_op()) > 1 or "T" not in signs[0]:
            raise ValueError("a derivative or transpose of an expression")
        nested = postfix.exp() if hasattr(postfix, "exp") else postfix.exp_nofunc()
        return sympy.Pow(self.convert_exp(nested), self.create_symbol("T"), evaluate=False)

    def convert_func(self, func: Any) -> Any:
        named = func.func_normal_single_arg() or func.func_normal_multi_arg()
        if named and func.subexpr() and named.start.text not in (r"\log", r"\ln"):
            raise ValueError("an index of a function")
        converted = super().convert_func(func)
        if func.atom_expr_no_supexpr() and isinstance(converted, sympy.core.function.AppliedUndef):
            name = str(self.convert_atom_expr(func.atom_expr_no_supexpr()))
            return sympy.Function(name)(*converted.args)
        return converted


def _letter_name(atom_expr: Any) -> str:
    if atom_expr.ACCENT():
        command, text = atom_expr.ACCENT().getText()[1:-1].split("{", 1)
        accent, text = command.strip(), re.sub(r"\s", "", text)
        if accent in _PLAIN_STYLES:  # $C$ is $\text{C}$ and $\text{(C)}$
            whole = re.fullmatch(r"\(([^()]*)\)", text)
            return whole[1] if whole else text
        return f"{_ACCENTS.get(accent, accent)}{{{text}}}"
    letter = atom_expr.LETTER_NO_E() or atom_expr.GREEK_CMD() or atom_expr.OTHER_SYMBOL_CMD()
    text = letter.getText().strip()
    return str(GREEK_LETTER_MAP.get(text.replace('"', ""), text)).removeprefix("\\")


def _index_name(text: str) -> str:
    index = _TEXT_COMMAND.sub(r"\1", text.removeprefix("_"))
    return index[1:-1] if index.startswith("{") and index.endswith("}") else index


def normalised(text: str) -> str:
    """LaTeX for the grammar; a prime becomes part of its symbol's index."""
    text = _OPAQUE.sub(lambda match: match[1] + re.sub(r"'|\^\s*\\prime", r"\\prime ", match[2]) + "}", text)
    text = _PRIMED.sub(_primes_in_index, text)
    text = _GAMMA.sub(lambda match: "γ " if "g" in match[0] else "Γ ", text)
    if re.search(r"(?<!\d)'", text) or _MISREAD.search(text):
        raise ValueError("a sign that the grammar would misread")
    return str(normalize_latex(rf"\boxed{{{text}}}", _NORMALISATION))


def _primes_in_index(match: re.Match[str]) -> str:
    index = "".join(part[1:].strip(" {}") for part in (match["index"], match["late"]) if part)
    count = match["primes"].count("'") + match["primes"].count("prime")
    return f"{match['symbol']}_{{{index}{chr(92)}prime{(chr(92) + 'prime') * (count - 1)}}}"


_OR = re.compile(r"(?<![a-zA-Z])or(?![a-zA-Z])")
# The parser drops the degree sign; inside of a function that turns the angle into radians.
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?")

# One example of each kind: the parser caches its tables, and building them is slow.
_WARM_UP = r"""
\frac{a+1}{\sqrt{2}}; 3\sqrt{5}; \frac{2\pi}{3}\cdot 5; -\frac{3}{2}x+7; x^2+3x-10; (x+2)(x-5); 2^{10}-1; (1, 2)
(\frac{1}{2}, -\sqrt{3}); [1, \infty); (-\infty, 1) \cup (2, 3]; 1, 2, 3; \{1, 2\}; x=2y; y=3x+4; 1 \le x < 2
\sin(2x); \log_{2} 8; e^{-x}+3+4i; \begin{pmatrix}1&2\\3&4\end{pmatrix}
"""


def warm_up() -> None:
    """Build the parser's tables before the first task is timed."""
    if hasattr(sys, "set_int_max_str_digits"):  # the pool's limits replace this one
        sys.set_int_max_str_digits(0)
    for text in _WARM_UP.strip().replace("\n", ";").split(";"):
        parse_latex(text.strip())


# Samples of a group share the gold answer and often a wrong one.
@functools.lru_cache(maxsize=256)
def parse_latex(text: str) -> Any | None:
    """Parse a LaTeX answer with sympy (a list becomes a set, a relation stays one); None if that fails."""
    if _TRIGONOMETRIC.search(text):
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    expression = parse_quickly(text)
    if expression is None:
        expression = parse_fully(text)
    if expression is None:
        return None
    expression = with_imaginary_unit(expression)
    return _union_of_conditions(expression) if _OR.search(text) else expression


def parse_quickly(text: str) -> Any | None:
    """The result of :func:`parse_fully`, or None if limited context does not suffice (ANTLR's two-stage parsing)."""
    try:
        return Parser(full=False).parse(normalised(text))
    except Exception:  # noqa: BLE001  # the parser raises plain Exception; the full one decides
        return None


def parse_fully(text: str) -> Any | None:
    """Parse with the full grammar; if that fails, parse the last right-hand side of a chain of equations."""
    try:
        prepared = normalised(text)
    except ValueError:
        return None
    for part in dict.fromkeys((prepared, get_last_eq(prepared))):
        try:
            return Parser(full=True).parse(part)
        except Exception:  # noqa: BLE001  # as above
            continue
    return None


def with_imaginary_unit(expression: Any) -> Any:
    """Read the symbol i as the imaginary unit, as answers mean it."""
    # Relations and sets keep their form; xreplace would evaluate them away.
    if not isinstance(expression, sympy.Expr | sympy.MatrixBase):
        return expression
    units = {symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"}
    return expression.xreplace(units) if units else expression


def _union_of_conditions(expression: Any) -> Any:
    """``x < 1 or x > 2``, which the parser reads as a set of two relations, as a set of numbers."""
    if not isinstance(expression, sympy.FiniteSet) or len(expression.free_symbols) != 1:
        return expression
    if not all(isinstance(part, Relational) and not isinstance(part, sympy.Eq) for part in expression.args):
        return expression
    return sympy.Union(*(part.as_set() for part in expression.args))
