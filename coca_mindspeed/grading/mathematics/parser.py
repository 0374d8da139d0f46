r"""latex2sympy's parser with symbols as they are written.  Runs in worker processes only.

The library lower-cases symbols, reads ``I`` as ``i`` and ``\gamma`` as a constant, and drops primes, indices of numbers
and a superscript T.  Here two symbols are the same only if their letter, case, alphabet, index, prime and accent are.
"""

import re
from typing import Any

import sympy
from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from latex2sympy2_extended.math_normalization import normalize_latex
from latex2sympy2_extended.symbols import GREEK_LETTER_MAP

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
    """One parse of normalised LaTeX; symbols are real and keep their names.

    Args:
        full: predict with all of the context; without it, several times faster, and syntax errors are more frequent.
    """

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
        """A symbol, or its power, under the name that tells it from all other symbols."""
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
        """As the library does, but ``x^T`` is a power unless x is a matrix, and nothing but a number has a prime."""
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
    """An index without the braces around it and around text in it."""
    index = _TEXT_COMMAND.sub(r"\1", text.removeprefix("_"))
    return index[1:-1] if index.startswith("{") and index.endswith("}") else index


def normalised(text: str) -> str:
    """LaTeX as the grammar takes it, with a prime as a part of its symbol's index."""
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
