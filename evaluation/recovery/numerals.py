r"""Reads the number that a piece of text or TeX states: "1,250", "$-4$", "m+n = 50+20 = 70".

A number is the last side of an equation or congruence that holds no variable, so that "70 = m+n"
and "N \equiv 70 \pmod{1000}" state 70. Sums, products, powers, fractions, roots and binomials of
integers are computed. Units, degrees, currencies and fonts are left out. What names variables, or
nothing at all, states no number; two numbers ("3 or 4") are SEVERAL, which is no answer either.

Words may stand before a number only as a label ("Total: 70"), an adverb ("about 70") or a sign
("minus 70"), and behind it only as units or a comment. A number that the words before it deny or
bound ("not 70", "at most 70") is not stated. In mathematics "3!" is 6, and "4k" has a variable.
"""

import ast
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Final
from unicodedata import normalize

SEVERAL: Final = "several"
LONGEST = 1200  # characters: int() takes at most 4,300 digits, and answers have a few
_LARGEST_POWER = 4096  # bits of a power that is computed
_LARGEST_RADICAND = 10**30  # up to it a whole root is a float's, rounded

_NO_LETTER = r"(?![a-zA-Z])"
_FONT = r"\\(?:text\w*|math\w+|mbox)"
# What stands around a number, in the order in which it goes.
_INVISIBLE = re.compile(
    r"\\(?:[hv]?phantom|tag)\s*\{[^{}]*\}|\\(?:text)?color(?:box)?\s*\{[^{}]*\}|\\hspace\*?\s*\{[^{}]*\}"
    r"|\\rule\s*\{[^{}]*\}\s*\{[^{}]*\}|\\begin\s*\{[a-z]+\*?\}(?:\{[lcr|]+\})?|\\end\s*\{[a-z]+\*?\}"
    rf"|\\(?:left|right){_NO_LETTER}\.?|(?<=\d)_\{{?10\}}?(?!\d)"
)
_COLUMNS = re.compile(rf"(?<=\d)\s*(?:\\\\|\\q?quad{_NO_LETTER})\s*(?=[-\d]|\w+\s*=)")
_SPACES = re.compile(rf"\\[,;:! ]|\\\\|~|\\q?quad{_NO_LETTER}|[\u00a0\u2009\u202f]")
_MODULUS = re.compile(
    r"\(?\s*(?:\\[pb]?mod|\bmod)\b\s*[{(]?\s*(\d{1,9})\s*[)}]?\s*\)?|(?<=[A-Za-z])\s*\\?%\s*(\d{1,9})"
)
_TEXT = re.compile(rf"{_FONT}\s*\{{([^{{}}]*)\}}")
# Words before a number after which it is no statement: denials, bounds, conditions.
DENIAL = re.compile(
    r"(?i)\b(?:not?|never|neither|nor|none|without|can(?:not|['’]t)|\w+n['’]t|if|unless|whether|suppose"
    r"|insufficient|impossible|unknown|undetermined|between|than|at (?:least|most)|up to)\b"
    r"|\b(?:over|under|above|below)\W*\Z"
)
_INSTEAD = re.compile(r"\bnot\b[^.;\n]{1,60}?\bbut\s+(?:rather\s+)?", re.IGNORECASE)
# "18 or more" and "18 more than", and "2 dozen": 24, or 2 where a question asks for dozens.
_BOUND_BEHIND = re.compile(
    r"(?i)\d\W*(?:dozens?|score|gross)\b|\d.*\sand\s+(?:an?|one)\s+(?:half|third|quarter)\b|\d\W*\s(?:\w+\s){0,3}?(?:or\s+(?:more|less|fewer|greater|above|below|higher|lower)\b"
    r"|(?:more|less|fewer|greater|larger|smaller|higher|lower|older|younger|longer|shorter)\b"
    r"(?:\s+\w+){0,3}\s+than\b)"
)
_ADVERB = re.compile(
    r"(?i)^\W*(?:(?:about|approximately|approx\.?|around|roughly|nearly|almost|exactly|precisely|just|only)"
    r"\s+|(?:USD|EUR|US|Rs\.?)\s*(?=[$\d]))"
)
_SIGN_IN_WORDS = re.compile(
    r"(?<![\d)}])(?<![\d)}]\s)(?<!\b[a-z]\s)\b(?:minus|negative)\s+(?=[$€£]?\s?\d)", re.IGNORECASE
)
_AND_PART = re.compile(r"(?<=\d)\s+and\s+(?:(?:an?|one)\s+(half|third|quarter)\b|(?=\d+/\d))")
_PARTS: dict[str | None, str] = {"half": "1/2", "third": "1/3", "quarter": "1/4"}
_POWER_SIGNS = re.compile(r"(?<=[\w)}])[⁻⁺]?[⁰¹²³⁴-⁹]+")
_ROOT_SIGN = re.compile(r"√\s*(\d+|\([^()]*\))?")
_HEXADECIMAL = re.compile(r"\b0[xXbo][0-9a-fA-F]+\b")
_LABEL = re.compile(
    r"(?i)^(?:(?:the|my|our)\s+)?(?:(?:final|correct)\s+)?answer\s*(?:is|=)\s*"
    r"|^[A-Za-z][A-Za-z ]{0,40}:\s*"
)
# In a box, what names the number behind it: "The remainder is 70", "There are 70 ways".
_NAMING = re.compile(r"^[A-Za-z][A-Za-z ]{0,60}?\b(?:is|are|equals|gives|get|obtain)\s+")
_COMMENT = re.compile(
    r"(\d[^\n]*?)(?:(?:[,;]|(?<=[\d})$*])[:.]|\s[-–—]{1,2}(?!\W+(?:no|not|wait|oops|hmm+|actually|or|and|to)\b))\s+[\"'(]?(?:[A-Za-z]{2,}|i\.e)|\\text\s*\{\s*\(?\s*(?:where|since|"
    r"because|as|for|with|if|when)\b|\s+\((?!\s*\\?[pb]?mod)(?=[^()]*\)\W*$)).*",
    re.DOTALL,
)
# A second number behind a comma, in parallel to the first: ", Ann: 7", ", and 5 pears".
_PARALLEL = re.compile(
    r"\d[^\n,;]*[,;]\s+(?:and\s+|or\s+)?(?!(?:not|rather|so|since|because|as|i\.e|that|which|where|with|for|"
    r"in|on|at|of|from|after|before|per|by|rounded|instead|about|or)\b)(?:[A-Za-z]+\s+){0,2}[A-Za-z]*[:\s]\s*"
    r"[$€£]?\d[\d.,]*(?:\s[A-Za-z ]+)?\W*\Z"
)
_UNEQUAL = re.compile(
    rf"\\(?:[lg]eq?|[lg]eqslant|(?:less|gtr)?sim|l[lt]|g[gt]|neq?|not){_NO_LETTER}|<|(?<![-=])>|[≤≥≠≲≳≪≫]|(?<![\d)}}])!="
)
_SIDES = re.compile(
    rf":?=|\\(?:colon|equiv|cong|approx|simeq|triangleq|coloneqq|implies|to|(?:[Ll]ong)?[Rr]ightarrow)"
    rf"{_NO_LETTER}|[≡≅≈→⇒]|(?<=[A-Za-z])\s*:"
)
_EQUATIONS = re.compile(r"=[^=]*?[,;&]\s*([^=,;\d][^=,;]*)=(?!.*=)", re.DOTALL)
_UNITS = re.compile(
    rf"(?:\^\s*\{{?\s*\\circ\s*\}}?|\\degree{_NO_LETTER}|°)(?:\s*[CFK]\b)?|\\?%|\\?[$€£¥]|(?<=\d)(?:st|nd|rd|th){_NO_LETTER}|(?<=\d)\s*/-"
)
_WORD = (
    r"(?:[A-Za-z]{2,}\.?(?:/[A-Za-z]+|\s*\^\s*\{?\d\}?)?|[A-Za-z]/[A-Za-z]|m\s*\^\s*\{?[23]\}?"
    r"|/\s?(?:h|hr|hour|day|week|month|year|yr|min|minute|second|person|item|kg|lb)s?\b|\([^()\d]*\))"
)
_UNIT_WORDS = re.compile(
    rf"(?<=[\d)}}])(?:\s+|(?=(?:[ckm]?m|kg|g|deg\w*|units?|hours?|min\w*)\b|/)){_WORD}(?:[\s-]+{_WORD})*\s*$"
)
_JOINING = re.compile(r"\b(?:or|and|to)\b|\\pm")
_RANGE = re.compile(r"\s*(\d[\d,.]*)\s*[-–—]\s*(\d[\d,.]*)\s*")
# Numbers side by side; "7 0" and "1 4 4" are one number with spaces in it.
_SIDE_BY_SIDE = re.compile(
    r"\\[pm][mp](?![a-zA-Z])|[±∓]|\d\d\s+\d|\d\s+\d\d|\d\.\s+\d|\d(?:\s+\d){3}|\d[)\]]*\s*[,;&]\s*[(\[]*[-+]?\d|\d\s*:\s*\d"
)
_GROUPED = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:\{,\}|[ ,'’_])\d{3})+|(?:,\d\d)+,\d{3})(?!\d)")
_COMMA_AS_POINT = re.compile(
    r"(?<![\d.,])(?:(\d{1,3}(?:[. ]\d{3})+|\d{4,}),(\d{1,2})|(\d{1,3}(?:\.\d{3}){2,}))(?![\d,]|\.\d)"
)  # 1.234,50 and 1.234.567
_ROUNDED = re.compile(r"(?s).*\d.*\brounded\s+(?:(?:up|down|off)\s+)?to\s+([$€£]?\d[\d,.]*)\W*$")
_ONE_SIGN_FRACTION = re.compile(r"[¼-¾⅐-⅞]")
SCALES = "hundred|thousand|lakh|million|crore|billion|trillion"
_SCALE = re.compile(rf"(?<=\d)(?:[kK]\b|(M|B|bn|mn|mln)\b|\s*({SCALES})\b)(?:\s+(?=[a-z]))?")
_SCALES = {"thousand": 3, "M": 6, "mn": 6, "mln": 6, "million": 6, "B": 9, "bn": 9, "billion": 9}
_SCALES |= {"hundred": 2, "lakh": 5, "crore": 7, "trillion": 12}
_FACTORIAL = re.compile(r"(?<![\d.)}])(1?\d|20)\s*!(?![!=])")
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "  # noqa: SIM905
    "sixteen seventeen eighteen nineteen".split()
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
_NAMES = {name: n for n, name in enumerate(_ONES)} | {
    f"{ten}-{_ONES[one]}" if one else ten: 10 * (n + 2) + one
    for n, ten in enumerate(_TENS) for one in range(10)
}  # fmt: skip
_NAMED_TWICE = re.compile(  # "seventy (70)"
    rf"(?i)\b(?:(?:{'|'.join(_ONES + _TENS)}|hundred|thousand|and)[\s-]*)+\s*\((\d[\d,.]*)\)"
)
_MIXED = re.compile(r"(?<![\d/.])(\d{1,9})\s+(\d{1,9})\s*/\s*(\d{1,9})(?!\d)")
_FRACTION = re.compile(r"(\d?)\s*\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_INFIX = r"\{{([^{{}}]*)\\{}(?![a-zA-Z])([^{{}}]*)\}}"
_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{\s*(\d{1,3})\s*\}\s*\{\s*(\d{1,4})\s*\}")
_BRACED_POWER = re.compile(r"\^\s*\{\s*(-?\d+)\s*\}")
_ROOT = re.compile(r"\\sqrt\s*(?:\[\s*([2-9])\s*\]\s*)?(?:\{([^{}]*)\}|(\d+))")
_OPERATORS = {
    rf"\\(?:cdot|times|ast){_NO_LETTER}|[×·∙⋅]": "*",
    rf"\\div{_NO_LETTER}|÷": "/",
    r"(?<=\d)\s*[xX]\s*(?=\d)": "*",
    r"(?<=\d)[eE](?=[-+]?\d)": "*10^",
    r"\^": "**",
    r"[−–]": "-",
    r"\\[()\[\]]": "",
    r"(?<=[\d)])\s*\(": "*(",
}
_COMMAND = re.compile(r"\\([a-zA-Z]+)|\\")
_BETWEEN = re.compile(r"(?<=[\d)])\s*\\(?!right)[a-zA-Z]+\s*(?=[\d(])")  # an unknown operation
_FUNCTIONS = set(
    "sqrt pi log ln lg exp sin cos tan sec csc cot arcsin arccos arctan frac dfrac tfrac "  # noqa: SIM905
    "cfrac binom".split()
)
_UNKNOWNS = set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma "  # noqa: SIM905
    "tau phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell infty sum prod "
    "int lim dots ldots cdots vdots ddots leftarrow lfloor lceil".split()
)
_COMPUTED: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_SUM = re.compile(r"[^\s][-+*]|\\cdot")
_CONGRUENT = re.compile(rf"\\equiv{_NO_LETTER}|≡")
AROUND = " \n\t*_`\"'“”‘’"


def stated_number(text: str, *, mathematical: bool = False) -> str | None:
    """Return the number that `text` states, SEVERAL if it states several, None if none.

    A number is written as an integer, a decimal fraction or "7/3". An expression that has digits,
    no variables and no rational value, as "7 root 2", is returned as it stands: it is an answer.
    `mathematical`: "!" is a factorial and no exclamation, and "k" is a variable and no thousand.
    """
    if len(text) > LONGEST:
        return None
    if (named := number_name(text)) is not None:
        return named
    text = _NAMED_TWICE.sub(r"\1", _INVISIBLE.sub("", _ROUNDED.sub(r"\1", text)))
    text = _SPACES.sub(" ", _COLUMNS.sub(", ", text))
    text = _with_signs_in_ascii(_TEXT.sub(r" \1 ", text)).replace("&=", "=").strip(AROUND)
    if is_denied(text) or _HEXADECIMAL.search(text):
        return None
    if _PARALLEL.search(text):
        return SEVERAL
    text = _COMMENT.sub(r"\1", _LABEL.sub("", text)).strip(AROUND)
    if _UNEQUAL.search(text):
        return None
    if mathematical:
        text = _NAMING.sub("", text)
        text = _FACTORIAL.sub(lambda m: f"({math.factorial(int(m[1]))})", text)
        if re.search(r"(?<!\$)\b\d+\s*[kKMB]\b|[\d)}]\s*!", text):
            return None
    return _last_side(text)


def _last_side(text: str) -> str | None:
    """Return what the last equation of a text states."""
    if equations := _EQUATIONS.search(text):
        if not _SUM.search(equations[1]):
            return SEVERAL
        text = text[equations.start(1) :]
    *firsts, last = re.split(r"\b(?:or|and)\b", text)
    if firsts and "=" in last and re.search(r"\d", "".join(firsts)):
        if not _SUM.search(last.partition("=")[0]):
            return SEVERAL
        text = last
    sides = [_side(side) for side in reversed(_SIDES.split(_UNITS.sub(" ", text)))]
    values = [value for value in sides if value is not None]
    if len(values) == 2 == len(sides) and _CONGRUENT.search(text):  # 25 is congruent to 2025
        return min(values, key=lambda value: abs(rational(value) or 0))
    return values[0] if values else None


def is_denied(text: str) -> bool:
    """Return whether words deny, bound or condition the first number of a text: "not 70"."""
    before = _INSTEAD.sub("", text)
    before = before[: digit.start()] if (digit := re.search(r"[$€£]?\d", before)) else before
    return bool(DENIAL.search(before) or _UNEQUAL.search(before) or _BOUND_BEHIND.search(text))


def with_minus(text: str) -> str:
    """Return a text with "-" for "minus" before a number, and "2 1/2" for "2 and a half"."""
    text = _AND_PART.sub(lambda part: f" {_PARTS.get(part[1], '')}", text)
    return _SIGN_IN_WORDS.sub("-", text)


def _with_signs_in_ascii(text: str) -> str:
    r"""Return a text with `^{2}`, `\sqrt{2}`, "1/2" and "-2" for the one sign or word of each."""
    text = _ONE_SIGN_FRACTION.sub(lambda m: f" {normalize('NFKC', m[0])}", text)
    text = _POWER_SIGNS.sub(lambda m: f"^{{{normalize('NFKC', m[0])}}}", text)
    text = _ROOT_SIGN.sub(
        lambda m: rf"\sqrt{{{(m[1] or '').strip('()')}}}" if m[1] else r"\sqrt ", text
    )
    return with_minus(_INSTEAD.sub("", text).replace("π", r"\pi ").replace("\u2044", "/"))


def number_name(text: str) -> str | None:
    """Return the number from 0 to 99 whose English name `text` is, None if it is none."""
    name = re.sub(r"\\text\w*|[^A-Za-z\d-]", "", text).lower()
    return str(_NAMES[name]) if name in _NAMES else None


def written(value: Fraction) -> str:
    """Return a number as text: "70", "-1.5", or "7/3" where no decimal fraction is equal."""
    denominator, places = value.denominator, 0
    while denominator > 1 and places < LONGEST and 10**places % denominator:
        places += 1
        if math.gcd(denominator, 10) == 1:
            break
    if 10**places % denominator:
        return f"{value.numerator}/{value.denominator}"
    digits = str(abs(value.numerator) * 10**places // denominator).rjust(places + 1, "0")
    whole = f"{digits[:-places]}.{digits[-places:]}" if places else digits
    return f"{'-' * (value < 0)}{whole}"


def rational(text: str) -> Fraction | None:
    """Return the number that `stated_number` wrote, None if it is not rational."""
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def _side(text: str) -> str | None:
    """Return what one side of an equation states."""
    if modulus := _MODULUS.search(text):
        text = text[: modulus.start()] + text[modulus.end() :]
    if limits := _RANGE.fullmatch(text):  # "13-15", but "15-13" is 2
        low, high = (rational(limit.replace(",", "")) or 0 for limit in limits.groups())
        if low < high:
            return SEVERAL
    text = _ADVERB.sub("", text)
    if len([part for part in _JOINING.split(text) if re.search(r"\d", part)]) > 1:
        values = {_side(part) for part in text.split(" or ")} if " or " in text else {SEVERAL}
        return values.pop() if len(values) == 1 else SEVERAL  # "12/5 or 2.4" is one number
    plain = _plain(text)
    if not re.search(r"\d", plain) or re.search(r"[A-Za-z]", _COMMAND.sub("", plain)):
        return None
    if any(command[1] in _UNKNOWNS for command in _COMMAND.finditer(plain)):
        return None
    if _SIDE_BY_SIDE.search(plain):
        return SEVERAL
    if any(command[1] in _FUNCTIONS for command in _COMMAND.finditer(plain)):
        return plain.strip()
    value = _computed(_COMMAND.sub("", _BETWEEN.sub("?", plain)))
    base = int(modulus[1] or modulus[2]) if modulus else 0
    return None if value is None else written(value % base if base else value)


def _plain(text: str) -> str:
    """Return arithmetic in Python's notation, with what is not arithmetic left as it stands."""
    text = _COMMA_AS_POINT.sub(lambda m: re.sub(r"\D", "", m[1] or m[3]) + f".{m[2] or 0}", text)
    text = _GROUPED.sub(lambda m: m[1] + re.sub(r"\D", "", m[2]), text)
    text = _SCALE.sub(lambda m: f"*10^{_SCALES.get(m[1] or m[2], 3)} ", text)
    text = _MIXED.sub(
        r"(\1+\2/\3)", _UNIT_WORDS.sub("", text.strip()).rstrip(" .,;:!").strip(" ,;")
    )
    text = _BRACED_POWER.sub(r"^\1", text)
    for infix, prefix in (("over", "frac"), ("choose", "binom")):
        if f"\\{infix}" in text:
            text = re.sub(_INFIX.format(infix), rf"{{\\{prefix}{{\1}}{{\2}}}}", f"{{{text}}}")
    text = _ROOT.sub(_exact_root, text)
    text = _BINOMIAL.sub(lambda m: f"({math.comb(int(m[1]), int(m[2]))})", text)
    for _ in range(3):  # fractions within fractions
        text = _FRACTION.sub(
            lambda m: f"{m[1] and m[1] + '+'}(({m[2] or m[3]})/({m[4] or m[5]}))", text
        )
    text = text.replace(r"\{", "{").replace(r"\}", "}").replace("{", "(").replace("}", ")")
    for pattern, sign in _OPERATORS.items():
        text = re.sub(pattern, sign, text)
    return text


def _exact_root(match: re.Match[str]) -> str:
    degree, power = int(match[1] or 2), _computed(_plain(match[2] or match[3]))
    if power is None or power < 0:
        return match[0]
    parts = (min(part, _LARGEST_RADICAND) for part in power.as_integer_ratio())
    root = Fraction(*(round(part ** (1 / degree)) for part in parts))
    return f"({root})" if root**degree == power else match[0]


def _computed(text: str) -> Fraction | None:
    text = "".join(text.replace("[", "(").replace("]", ")").split())
    if "_" in text:  # Python would read 1_0 as 10
        return None
    try:
        return _value(ast.parse(re.sub(r"(?<![\d.])0+(?=\d)", "", text), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Fraction:
    """Return an expression's value; ValueError: it is no arithmetic, or too large."""
    match node:
        case ast.Constant(value=int() | float()):
            return Fraction(ast.unparse(node))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner)
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            base, power = _value(left), _value(right)
            bits = max(abs(base.numerator), base.denominator).bit_length()
            if power.denominator > 1 or bits * abs(power) > _LARGEST_POWER:
                raise ValueError("no power of an integer, or too large")
            return base ** int(power)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _COMPUTED:
            return _COMPUTED[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("no arithmetic")
