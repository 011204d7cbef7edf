r"""Reads the option that an answer chooses: "The answer is (B).", "_B_", "Option (B) is correct.".

A sentence that names the answer and a box come before a sentence that calls an option right, and
both before the only option that is marked as right ("(B) Correct: ..."). Then come a last line, or
else a first one, that is nothing but a letter, and a last sentence that concludes with an option
("Hence (B)."). Of several the last counts. An option that is denied, doubted or conditional ("not
(B)", "if (B) is right") is not chosen, and neither are two, nor "(A) if ..., (B) otherwise". Behind
a retraction ("Wait, no: it is (B)") the last option that it names is chosen, and none where the very
next sentence takes the option back ("No, that cannot be.") and names no other.
"""

import re
from functools import cache

from quantize.recovery.extraction import (
    FOREIGN,
    RETRACTION,
    before_next_question,
    is_reconsidered,
    tidy,
)

# What may come between "answer is" or a box and the letter: spaces, Markdown, brackets, quotes, TeX.
# It never backtracks (*+), since a damaged model may write asterisks for pages.
_MARKUP = r"(?:[\s*_$:({\[\"'`“”‘’„«‹「【<>=→⇒–—-]|\\[(\[{]|\\[a-zA-Z]+(?![a-zA-Z]))*+"
_CLOSING = r"\s*_$)}\]\"'`“”’»›」】>."
_NOUN = r"(?:(?i:(?:the\s+)?(?:option|choice|letter|answer|statement)\b(?:\s+is\b)?[\s*_:]*+))?"
_ADVERB = (
    r"(?:,?\s*(?i:therefore|thus|then|hence|clearly|simply|indeed|definitely|certainly|probably|likely|"
    r"most likely|given by)\b,?\s*)?"
)
_NAMED = (
    r"(?:(?i:\b(?:answer|ans\.?|option|choice|letter|solution|one|selection|pick)"
    r"(?:\s+(?:to|of|for)\s[^.:=\n]{1,60}?|,\s[^,.:=\n]{1,60},)?"
    r"[\"'”’*_]*+\s*+(?::|=|(?:is|(?:would|should|must|can only|will) be|has to be)\b:?)"
    r"|\bcorrect\s*:|\b(?:result|conclusion|verdict)\s*:(?=\W*[A-J]\W*$)|\bans\.|\banswer[\"'”’*_]*+(?:\s*+[–—-]|(?=\s*+\n)))"
    rf"|故选|(?i:{FOREIGN}))[\s*_]*+"
)
_BOXED = r"\\(?:[bB]oxed|fbox|framebox)(?![a-zA-Z])\s*+"
_IS = r"\s+(?i:is|must be|would be|should be|has to be|seems|appears(?:\s+to\s+be)?|looks)\s+"
_RIGHT = (
    r"(?i:(?:(?:the|a|thus|therefore|clearly|indeed|most|only|one|most likely)\s+){0,3}"
    r"(?:correct|right|best|true|answer|accurate|(?:more|most)\s(?:precise|plausible|likely))\b(?!\sthan))"
)
_CHOOSING = (
    r"(?i:\b(?:I|we|let us|let's|let’s)(?:'d|’d|'m|’m| would| will|'ll|’ll| am)?\s+"
    r"(?:choose|pick|select|answer|go(?:ing)? with|opt for)\b"
    r"|\b(?:it|this|that|which)(?:'s|’s|\s+is|\s+must\s+be|\s+has\s+to\s+be|\s+matches|\s+corresponds\s+to|\s+leaves(?:\s+us(?:\s+with)?)?)"
    r"(?=[\s*_]+(?:option|choice|answer)?[\s*_]*[(]|[\s*_]+(?:option|choice|answer)\b)"
    r"|(?<!none )(?<!never )(?<!neither )\bmatches(?=\s+\()|\b(?:by elimination,|leaving)(?=\s+\()"
    r"|\b(?:statement|exception|option|one|guess)(?:\s+(?:that|which|left|remaining|closest)\b[^.:=\n]{0,40}?)?\s+is(?=\s+\())"
)
_DENYING = (  # words before a letter that is not chosen, or is part of a name: "Vitamin C"
    "if", "If", "nor", "or", "and", "not", "that", "whether", "either", "Is", "is", "were",
    "itamin", "epatitis", "type",
)  # fmt: skip
_HENCE = (
    r"(?i:(?:therefore|hence|thus|so)\b[,:]?\s*+)?(?i:(?:the|my|final|correct|right|best)\s+){0,3}"
)
_CONCLUDING = r"\W*(?i:therefore|hence|thus|so|only|we conclude|in conclusion|consequently)\b[^()]*"
_DENIAL = re.compile(
    r"\bnot\b|n't\b|wrong|incorrect|false|exclu|eliminat|rul\w+ out|except|than\b|compar|unlike"
    r"|\b(?:look|consider|check|assum|suppos)|\?"
)
# "(A). No, that cannot be.", right behind an option.
_TAKEN_BACK = re.compile(
    rf"(?i)[{_CLOSING}\s]*(?:at first\b|initially\b"
    r"|(?:(?:wait|hold on|hmm+|oh|actually|no|sorry|oops)\b\W*)+(?:but\s+)?"
    r"(?:that|this|it)(?:['’]s|\s+(?:is|was|seems))?\s+(?:(?:can(?:not|['’]t)|couldn['’]t)\s+be"
    r"(?:\s+(?:right|correct|true|it|the (?:right |correct )?answer))?\s*[.,:;!–—]"
    r"|(?:\w+\s+)?(?:wrong|incorrect|impossible|false)\b"
    r"|(?:not|isn['’]t|wasn['’]t)\s+(?:right|correct|true|possible|the answer)\b))"
)
_SHORT = 100  # characters of an answer that is nothing but an option and its text
_TICK = r"(?:[✓✔✅☑]|(?i:correct|right|yes|true)\b(?!\W{0,3}\?|\s+(?:if|only|for|when|in)\b))"
# What may stand behind a letter that is followed by a word: "C because", not "C cells" or "A bit".
_CONJUNCTION = (
    r"because|since|as|is|and|or|due|by|for|with|given|from|in|on|at|where|which|when|if|after|per|but|"
    r"under|over|rather|not"
)


def final_letter(answer: str, letters: str) -> str | None:
    """Return the option that an answer chooses, one of `letters` ("ABCD"), or None."""
    rules = _OptionPatterns(letters)
    text = before_next_question(tidy(answer), lambda before, _: _stated(before, rules))
    if (letter := _stated(text, rules)) is not None:
        return letter or None
    if right := {match[1] or match[2] for match in rules.marked_right.finditer(text)}:
        return right.pop() if len(right) == 1 else None
    *before, last = text.rsplit("\n", 1)
    introduced = (
        re.search(r"(?:answer\W*|:\W*)$", before[0], re.IGNORECASE)
        if before
        else len(last) <= _SHORT and not rules.more.search(last)
    )
    alone = rules.alone.fullmatch(last) or (rules.before_text.match(last) if introduced else None)
    first, _, rest = text.partition("\n")
    if len([*filter(rules.alone.fullmatch, text.split("\n"))]) == 1 and not _TAKEN_BACK.match(rest):
        alone = alone or rules.alone.fullmatch(first)  # and the rest explains it
    if alone:
        return alone[1].upper()
    sentence = re.split(r"(?<=[.!?])\s+", last.strip())[-1]
    match = None if _DENIAL.search(sentence) else rules.concluded.fullmatch(sentence)
    return match and (match[1] or match[2])  # "Hence (B).", "Only (B) fits."


def _stated(text: str, rules: "_OptionPatterns") -> str | None:
    """Return the option that a sentence or a box names; "" if it is none, None if there is none."""
    for patterns in ([rules.named, rules.named_behind], [rules.chosen, rules.called_right]):
        if matches := [match for pattern in patterns for match in pattern.finditer(text)]:
            last_match = max(matches, key=lambda match: match.start())
            behind = text[last_match.end() :]
            if last_match["other"] or rules.otherwise.match(behind):
                return ""
            limited = rules.limited.match(behind) or RETRACTION.search(behind)
            corrected = [*rules.corrected.finditer(behind)] if limited else []
            rest = behind[corrected[-1].end() :] if corrected else behind
            letter = (corrected[-1] if corrected else last_match)["letter"].upper()
            taken_back = not corrected and _TAKEN_BACK.match(behind)
            return "" if taken_back or is_reconsidered(rest, letter) else letter
    return None


@cache
class _OptionPatterns:
    """Patterns for the options `letters`."""

    def __init__(self, letters: str) -> None:
        large, small = f"[{letters}]", f"[{letters.lower()}]"
        ends = r"(?!_*[^\W_]|['’\-–/]\w|\.\w|\.\s+[a-z]|\s*[=≡≈+^⁺⁻→⇒>]|\s*(?:->|\\to\b)|\}_|\*\*[a-z])"
        word = rf"(?!\s+(?!(?:{_CONJUNCTION})\b)[a-z])"
        letter = (
            rf"(?P<letter>{large}{ends}{word}|{small}{ends}(?=\s*(?:[{_CLOSING[2:]},;]|\\[)\]]|$)))"
        )
        verbs = (
            "is|are|was|were|has|can|cannot|does|must|(?:c|w|sh)ould|fails|violates|gives|might|may"
        )
        verb = rf"(?!(?:[)*_]*\s+(?:and|or)\s+[(*_]*{large})?[)\]*_\"]*\s+(?:{verbs})\b)"
        another = (
            rf"(?P<other>[)\]}}*_$\s]*(?:\\text\w*\s*\{{\s*)?(?:\b(?:or|and|to|through)\s|/|&|[,;]\s*(?:or\s|and\s|possibly\s)?(?![(*]*\w[)*]*\s+[a-z]))\s*\}}?\s*"
            rf"{_MARKUP}{_NOUN}{_MARKUP}{large}(?![\w'’]){verb})?"
        )
        instead = r"(?:(?:not|neither)\b[^.\n]{1,60}?\Wbut\s(?:rather\s)?)?"
        option = rf"{_MARKUP}{_NOUN}{_MARKUP}{letter}{another}"
        denied = "".join(f"(?<!{word} )" for word in _DENYING)
        right = rf"{_IS}{_RIGHT}(?!\s+(?:only|if|when|at|for)\b)(?!\s*\?)"
        doubted = r"(?![)\]*_$\"\s]*(?:\?|only\s+(?:for|if|when|in)\b))"
        self.named = re.compile(
            rf"(?:{_NAMED}{_ADVERB}{instead}|{_BOXED}){option}{doubted}", re.MULTILINE
        )
        self.named_behind = re.compile(  # "The answer is a tetrahedron, (B)."
            rf"(?m:{_NAMED}(?![^.\n()]{{0,60}}(?:{_DENIAL.pattern}))[^.\n()]{{1,60}}?(?:[,:]\s\(|\s\((?:option|choice)\s)"
            rf"(?P<letter>{large})\)(?P<other>)[.*_\s]*$)"
        )
        self.more = re.compile(
            rf"\b(?:is|are|and|or)\b|\?|^\W*{large}\W*\s(?:{verbs}|(?i:wrong|incorrect)|\w+n['’]t)\b|{large}[).].*{large}[).]"
        )
        self.concluded = re.compile(
            rf"(?:{_CONCLUDING}|[^()]*(?:=>|[∴⇒→])\s*(?:[Oo]ption\s)?)(?:\(({large})\)[^\w(]*"
            rf"|\(({large})\)\W*(?:holds|fits|matches|satisfies|works|remains|follows)\b[^()]*[.!]\W*)"
        )
        self.marked_right = re.compile(
            rf"(?:^|(?<=[.;]\s)|(?<=[Ff]alse\s)|(?<=[Tt]rue\s))\W{{0,6}}\(?({large})[*_]*[).:]\W{{0,6}}?{_TICK}"
            rf"|^\W*[✓✔✅☑]\W*({large})\b",
            re.MULTILINE,
        )
        self.chosen = re.compile(rf"{_CHOOSING}{option}")
        self.called_right = re.compile(
            rf"{denied}(?<![\w-])(?:(?i:option|choice|answer|statement)\s+)?{denied}[(*_]*+"
            rf"(?P<letter>{large}){ends}[)*_]*+(?:{right}|\s+it\s+is\b(?!\snot))(?P<other>)"
        )
        self.otherwise = re.compile(
            rf"[{_CLOSING}]*,?\s*(?:if|when|unless|for|provided)\b[^.\n]*?"
            rf"(?:\({large}\)|\b{large}\b)[)*_]*\s+(?:otherwise|else|if|when|for)\b"
        )
        self.limited = re.compile(  # "(A) if we neglect spin, but ..."
            rf"[{_CLOSING}]*,?\s*(?:if|unless)\b[^.\n]*?\bbut\b"
        )
        # "(A). Wait, no: it is (B)", "(A). Correction: (B)", behind a retraction.
        self.corrected = re.compile(
            r"(?:(?P<brief>\b(?i:(?:no\W{1,3})?wait|no|actually|edit|update)\b[\s*_,.:;–—-]{1,5})|(?i:\b(?:it|this|that|which|answer|option|choice)"
            r"(?:['’]s|\s+(?:is|should be|must be|has to be))"
            rf"|\b(?:correction|corrected|revised)\W{{0,4}}:|\bshould be"
            rf"|\b(?i:therefore|hence|thus|so)(?=\s+\()|\bmakes(?=\s+\({large}\)\s(?:the|correct|right|true)\b)))\s*[*_]*{option}"
            rf"(?(brief)(?={right}|[{_CLOSING},;!\s]*$|[)*_\s]*[.,;!]\s)|(?!\s*(?:that|which|is)\b))",
            re.MULTILINE,
        )
        self.alone = re.compile(
            rf"[\s*_#>-]*+{_HENCE}{_NOUN}{_MARKUP}([{letters}{letters.lower()}])[{_CLOSING}]*+"
            rf"(?:\\[)\]])?[\s$.*]*"
        )
        self.before_text = re.compile(
            rf"{_MARKUP}({large})(?:[)\]]|\.\s|:\s|,\s(?:because|since)\b)"
        )
