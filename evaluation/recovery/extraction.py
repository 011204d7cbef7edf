r"""Reads the final answer in a model's text as a careful human does: a number, a letter, a match.

A prompt asks for a form: `#### N`, a box, "The answer is (X)". Of what has this form the last that
holds an answer counts; what holds none (a heading `#### 1. Eggs`, an empty box, "N") is passed
over, and so is what the text calls wrong. A sentence behind it that says which the answer is comes
before it ("\boxed{3} ... So the answer is 70"), unless it is hypothetical ("if he had sold more, it
would be 22"). If nothing in this form holds an answer, the other forms are read, then such a
sentence, then a last line that is nothing but an answer with its unit or label, then a whole last
sentence that concludes ("So she pays $64."). What follows the end of a turn, or the next question,
is not read. Two numbers or letters at once are no answer, and neither is a number that the text
merely reaches: it may have been cut there. Two marks of different things ("#### Ann: 12", "#### Ben:
15") are two numbers, as are two cases in boxes, unless a total follows. A text that has second
thoughts and is cut before it says more ("Actually, hold on. Let me recount") states none.

VERSION counts the changes of this rule. It is part of the conditions of every scored answer, so
that answers read by two rules are never compared, and stored texts are read again.
"""

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import islice

from quantize.recovery.numerals import (
    LONGEST,
    SCALES,
    SEVERAL,
    is_denied,
    number_name,
    rational,
    stated_number,
    with_minus,
    written,
)

VERSION = 9  # 1: lm-eval's filters; 2: fewer numbers; 3: fewer signs; 4, 5: parts of wholes
_MOST = 300  # statements that are looked at, the last of what a damaged model repeats
_CONTROL = re.compile(r"</?\|?[a-z_]{1,20}\|?>|<<[^<>\n]*>>")  # and GSM8K's "<<2*9=18>>18"
_FULL_WIDTH: dict[int, int | str] = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_FULL_WIDTH |= {0x3001: ",", 0x3002: ".", 0x2212: "-"}
_THOUGHTS = re.compile(r"<(think(?:ing)?)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
# What ends a model's turn or text, and what begins another question behind a final answer.
_END_OF_TURN = re.compile(
    r"(?<=\S)\s*<(?:turn\||\|turn|eos|/s|end_of_turn|start_of_turn|\|im_end\||\|im_start\||\|eot_id\||"
    r"\|endoftext\|)>.*",
    re.DOTALL,
)
_NEXT_QUESTION = re.compile(
    r"(?im)^\W{0,4}(?:(?:next\s|new\s)?(?:question|problem|exercise|instruction)(?:\s\d+)?|q\d*|user|human)"
    r"\W{0,3}:"
)
# What takes back an answer, so that another one that follows is the answer.
RETRACTION = re.compile(
    r"(?i)\b(?:wait|hold on|actually|oops|sorry|mistake|correction|corrected|revised|edit|update|"
    r"forgot|(?:an?|my)\serror|mis(?:read|counted)|overlooked|on\s(?:second\sthought|reflection)|scratch\sthat)\b|\bno\s*[,:;.–—-]"
)
# Second thoughts, at a sentence's beginning; none follows where they end in a plan, or are cut.
_SECOND_THOUGHTS = re.compile(
    r"(?i)(?:\A|[.!?,\n\u2026–—-])\W*(?:(?:but|oh|no|hmm+|well),?\s)*(?:wait|hold on|actually|hmm+|oops"
    r"|on\ssecond\sthought|scratch\sthat|let\sme\sre\w+)\b"
)
_PLAN = re.compile(
    r"(?i)(?:wait\W+)?(?:let['’]?s|let (?:me|us)|I(?:['’]ll| will| need| should| must)"
    r"|we (?:need|should|must))\b[^.!?:]*"
)
_SURENESS = re.compile(
    r"(?i)(?<!\s)\s*\n\W*(?:confidence|difficulty|I hope|hope this|let me know)\b.*\Z"
)
_FORMAT_SIGNS = re.compile(r"[\u200b-\u200f\u2060-\u2064\ufeff\u00ad]")
_FOREIGN_DIGIT = re.compile(r"(?![0-9])\d")
# How some other languages say "answer is".
FOREIGN = (
    r"(?:r[ée]ponse(?: correcte| finale)?|respuesta(?: correcta| final)?|resposta(?: correta| final)?"
    r"|risposta(?: corretta| finale)?|antwort|ответ|答案|答え|정답|답)[\"'”’*_ ]*+"
    r"(?::|=|(?:est|es|é|è|ist|lautet)\b:?|是|为|は)\s*+(?:donc |la |l['’]option |option |opción ){0,2}"
)
_MARK = re.compile(r"(?<!#)#{4}(?!#)(.*?)(?=####|$)", re.MULTILINE)
_HEADING = re.compile(r"^\W{0,4}#{1,6}\W{0,4}(\d{1,2})[.):]\W{0,4}\s[^\W\d]", re.MULTILINE)
_STEP = re.compile(
    r"(?i)\W*(?:(?:step|part|case|problem|question|section|example|method|solution|stage|day|week)\s+\d"
    r"|(?:check|verif|proof|note|explanation|reason)\w*\b)"
)
_LABEL_ALONE = re.compile(r"\W*(?:the\s)?(?:final\s)?(?:answer|result|solution)?\W*", re.I)
_MARKED = "*_$`\"'“”‘’«» \t"
_SEVEN_DIGITS = re.compile(r"(?<![\d.,])(?:\d([, ])\d{3}\1\d{3}|\d{7})(?!,?\d)")
_NAMES = re.compile(r"(?:\b(?:is|be|was|answer)|[:=])[\s*_`\"']*\Z", re.I)
# What denies the number behind it: "not 18", "I first got 18".
_INSTEAD_OF = re.compile(
    r"(?i)(?:(?:\b(?:not|than|instead\sof|rul(?:e|ed|ing)\sout)|,\s(?:no|non|nicht))[\s*_`\"'$]*"
    r"|\b(?:initially|at\sfirst|first)\s(?:\w+\s)?(?:got|thought|found)\b[^.,;!?]*)\Z"
)
_BOX = re.compile(
    r"(?:\\(?:[bB]oxed|fbox|framebox)(?![a-zA-Z])|\bboxed(?=\s*\{))\s*"
    r"(?:\\ \s*|\\(?:text|math|b[fm])\w*\s*)?"
)
_BARE = re.compile(r"[-+]?\d[\d,.]*|[A-Z](?!\w)")
_CLOSING = {"{": "}", "(": ")", "[": "]"}
_ANSWER = re.compile(
    r"(?im)((?:final|correct|corrected|right)\W{1,4})?\banswer\b(?!s)[\"'”’*_} ]*+"
    r"(?:(?:to|of|for)\s[^.:=\n]{1,60}?)?\s*+"
    r"(?::|=|\.(?=\*+\s*\d)|equals\b|(?:is|(?:would|should|must)\sbe|(?:comes|turns|works)\sout\s(?:to\sbe|to|as))"
    r"\b:?)[\s*_]*+"
    r"(?:(?:therefore|thus|then|clearly|simply|indeed|exactly|approximately|about)\b,?\s*)?"
    r"(?:not\s[^.;\n]{1,60}?\sbut\s(?:rather\s)?)?"
    rf"|{FOREIGN}[\s*_]*+"
    r"|(?P<instead>\b(?:it|that|this)\s+(?:should|must)\s+(?:actually\s|instead\s)?be\s[\s*_]*+"
    r"|\b(?:it|that)(?:['’]s|\s+is)\s+(?=[$€£]?\d[\d.,]*[\s*_]*$)"
    r"|\b(?:no|actually|edit|correction|update)\b[\s,.:;*_–—-]{1,5}(?=[$€£]?\d[\d.,]*[\s*_]*$))"
)
# "... so m+n = 33+37 = 70", behind a box that holds only a part of it: a fraction, or "x = 3".
_ADDED_UP = re.compile(
    r"(?i)\b(?:therefore|thus|hence|so|remainder\b[^.\n]*?\bis)\b[\s,:$(\\]*(?:the\s(?:\w+\s){0,2}?(?:sum|value|total)\sis\W{1,3})?((?:[a-z](?:\s*[+*-]\s*[a-z])+\s*=[^\n]*?)?\d+)[$.)\\\s]*(?:[.\n]|\Z)"
)
_PART = re.compile(r"[^{]*\{\s*[a-z]\s*=", re.I)
_OPERATOR = re.compile(r"[ $]*(?:[-+*×]|\\cdot|\\times)[ $]*")
_ADDED = re.compile(rf"{_OPERATOR.pattern}\Z")
# What makes one number of several the whole or the next step, and what makes them equal parts.
_FOLLOWS = re.compile(
    r"(?i)\b(?:so|thus|hence|therefore|total|altogether|together|sum|combined|in all|finally|final|"
    r"answer|left|remain\w*|then|now|next|add\w*|subtract\w*|multipl\w+|divid\w+|giv\w+|but|result\w*|which)\b"
)
_AND_ANOTHER = re.compile(r"\b(?:or|and)[\s$]+[a-z]\s*=[\s$]*\Z")  # \boxed{3} or $x = \boxed{5}
_LABELLED_MARK = re.compile(
    r"(?m)#{4}[ *_]*(?:[A-Z][\w'’ ]{0,40}:[ *_]*)?\$?\d[\d.,]*(?: [a-z]+)?[^\w\n]*$"
)
_CASES = re.compile(r"(?i)\b(?:case|part|type)\s(?:\d|[ivx]+\b|[a-d]\b)")
_SUMMED = re.compile(
    r"(?i)(?<!of a )(?<!of the )\b(?:total|sum|altogether|together|in all|add\w*)\b"
    r"[^.\n]{0,60}?(\d[\d,]*)"
)
_TOTAL = re.compile(rf"((?:\d{{1,9}}{_OPERATOR.pattern}){{1,9}}\d{{1,9}} *= *\d+)")
_NEXT_BOX = re.compile(
    rf"[\s$.,\\()]*(?:text\{{\s*)?(?:\bor\b|\band\b|,)[\s$\\(}}]*|{_OPERATOR.pattern}"
)
_EMPHASIS = re.compile(
    r"\*\*([^*\n]{1,80})\*\*[^\d*\n]{0,80}[.!]\W*\Z|\*\*([^*\n]{1,80}[.!])\*\*\W*\Z"
    r"|(?:\A|=\s*)(?:\*\*|\\math(?:bf|rm)\{)(\d[^*{}\n]{0,80})(?:\*\*|\})\W*\Z"
)
# "Pens left: 5", "5 pens": a last line with its label or its unit; the first group is a total's.
_LABELLED = re.compile(
    r"(?i)((?:[#\s]*\d[.)]\s)?(?=\D*\b(?:answer|total|sum|result|altogether|final)\b))?"
    r"(?:[A-Za-z][A-Za-z ]{2,60}\s?[:=][*_\s]{1,6}|answer\s)?"
    r"(\\?[$€£]?\d[\d.,]*(?:\s(?!or\b|and\b|to\b|than\b)[a-z]{2,}){0,4}(?:\s\([^()]*\))?)[\s*_.]*"
)
_NUMBER_FIRST = re.compile(r"[\W_]{0,8}?(?:\\\w+\{?\s*)*[-+−]?[$€£]?\s*\d")
# What makes "the answer is 22" a hypothesis, in the words before it.
_HYPOTHESIS = re.compile(r"\b(?:if|had|suppose|assuming|were|unless|otherwise|without)\b", re.I)
# "... is wrong", behind a number and in its sentence; and what makes a number an aside there.
_WRONG = re.compile(
    r"[^.!?\n](?:(?!\\boxed|####|\s(?:and|but|while|whereas)\s(?!th|it))[^.!?\n]){0,60}?[\s$*)}](?:is|was|['’]s)\s+"
    r"(?:\w+\s){0,2}?(?:wrong|incorrect|impossible|not(?:\s+(?:right|correct|possible|the\s+answer)\b|\s*(?:[.,;!\n]|\Z)))"
)
_BESIDE = re.compile(
    r"(?i)(?:^\W*(?:\w+\{)?(?:remark|verif\w+)\b.*|\b(?:would|had|for\scomparison|check\s(?:with|for)|attained|achieved|when)\b(?:(?!but\b)[^.!?;])*)\Z"
)
# "So Kylar pays $64." as the last sentence, which does not only confirm what was stated.
_CONCLUSION = re.compile(
    r"(?i)(?:\A|(?<=[.!?\n])\s*)(?!(?:[^.!?\n]|\.\d)*(?:\b(?:is|stays|remains)\s(?:indeed\s)?(?:right|correct|unchanged)"
    r"|\b(?:confirms?|stands|holds|checks|(?:so|thus)\sfar|still|first|next|find|compute|calculate|hope|step\s\d)|\d\s?[kKMB])\b)((?:(?:[^.!?\n]|\.\d)*\b(?:so|thus|hence|therefore|altogether|conclude\sthat|in\s(?:total|all)|(?:for|giving)\sa\stotal\sof)\b,?"
    r"|\W*(?:the|our)\s(?:requested|desired|required|total|remainder|result|m(?:in|ax)imum\svalue)\b)((?:[^.!?\n]|\.\d)+))[.!][\W_]*(?:\\\w+\W*)?\Z"
)
_RELATIVE = re.compile(
    r"\W*\d[\d,.]*\W*\s(?:more|less|fewer|greater|smaller|times|out|percent more)\b"
)
# A number in a sentence, as a whole: "$1.2 million", "2 1/2", "12ft", and no part of "12pi" or "0x12".
_NUMBER = re.compile(
    r"(?<![^\s(*_$€£₹\"'“`=:[<])-?(?:\\?[$€£₹])?-?\d[\d,]*(?:\.\d+)?(?:\s\d+/\d+|/\d+)?\\?%?"
    rf"(?:\s?(?:{SCALES}|k|K|M|B|bn)\b)?"
    r"(?=[\s)*_$\"'”`\].,;:!%°€£>-]|(?:[A-Za-z]{2,}|[mgLhs])\b|[^\W\dA-Za-z_\u0370-\u03ff]|\Z)(?![.,]\d|\s?[-+*/×]\s?[b-z]\b)"
)
# What makes a number an aside, where another one is stated: "in 1 day", "each of 7 days".
_ASIDE = re.compile(
    r"(?i)\b(?:in|on|for|from|after|before|by|with|within|per|every|each"
    r"|(?:each|half|quarter|third|all|any|out|\w*\d)\sof(?:\s(?:the(?:se|ir)?|those|his|her))?)\W*\Z"
)
_ONLY_NUMBER = re.compile(r"[-+−]?\s*\\?[$€£¥]?\s*[-+−]?\d[\d,. ]*(?:\s*\\?%)?")
_HEADED = re.compile(rf"(?m)^\W{{0,4}}?#{{1,6}}[\s*_$`]*({_ONLY_NUMBER.pattern})[\s*_$`.]*$")


def final_number(answer: str) -> str | None:
    """Return the number of an answer that was asked to end with `#### N`, None if it has none."""
    number = _final(tidy(answer), _marked, _boxed, _headed)
    return None if number and "\\" in number else number  # 8 pi


def boxed_number(answer: str) -> str | None:
    r"""Return the number of an answer that was asked to end with `\boxed{N}`, None if it has none."""
    return _final(tidy(answer), _boxed, _marked)


def last_match(pattern: str, answer: str) -> str | None:
    """Return the last match of the pattern's group that is not empty, None if there is none."""
    groups = [match[1].strip() for match in re.finditer(pattern, answer) if match[1]]
    return next((group for group in reversed(groups) if group), None)


def tidy(text: str) -> str:
    """Return a text without thoughts, control tokens and tags, digits and full-width signs as ASCII."""
    text = _FOREIGN_DIGIT.sub(lambda digit: str(int(digit[0])), text.translate(_FULL_WIDTH))
    text = _END_OF_TURN.sub("", _FORMAT_SIGNS.sub("", _THOUGHTS.sub("", text)))
    return _SURENESS.sub("", _CONTROL.sub("", text).replace("\\#", "#").strip())


def seven_digits(answer: str) -> str | None:
    """Return the number of seven digits, the last that is named if there are several, or None."""
    text = tidy(answer)
    before = {m: text[max(0, m.start() - 20) : m.start()] for m in _SEVEN_DIGITS.finditer(text)}
    numbers = [match for match in before if not _INSTEAD_OF.search(before[match])]
    if len({re.sub(r"\D", "", match[0]) for match in numbers}) > 1:
        numbers = [match for match in numbers if _NAMES.search(before[match])]
    return re.sub(r"\D", "", numbers[-1][0]) if numbers else None


Found = tuple[int, str]  # where in the text, and the number there, or SEVERAL
Form = Callable[[str], Iterator[Found]]


def before_next_question(text: str, read: Callable[[str, bool], str | None]) -> str:
    """Return a text up to where another question begins behind an answer, which `read` finds.

    It is told whether that question has a number: it may then be a step of the same task.
    """
    for question in islice(_NEXT_QUESTION.finditer(text), 20):  # what repeats them has no answer
        before = text[: question.start()]
        if read(before, any(map(str.isdigit, question[0]))) not in {None, "", SEVERAL}:
            return before
    return text


def _final(text: str, *forms: Form) -> str | None:
    """Return the number that a text states in one of the forms or a sentence, or ends with."""
    text = before_next_question(text, lambda before, step: _chosen(before, forms, said=not step))
    number = _chosen(text, forms) or _ending(text)
    return None if number == SEVERAL else number


def _chosen(text: str, forms: tuple[Form, ...], *, said: bool = True) -> str | None:
    """Return the last number of the first form that has one; a later statement overrides it."""
    firm, hypothetical = _said(text) if said else ([], [])
    formal = next((numbers for form in forms if (numbers := [*form(text)])), None)
    if formal:
        begin = formal[0][0]
        formal = [pair for pair in formal[-_MOST:] if not _withdrawn(text, begin, pair[0])]
        place, number = formal[-1] if formal else (begin, SEVERAL)
        others = [pair for pair in formal if pair[1] != number]
        if others and _are_parts(text, others[-1], place):
            number = SEVERAL
        firm, hypothetical = [pair for pair in firm if pair[0] > place], [(place, number)]
    if not (firm or hypothetical):
        return None
    place, number = (firm or hypothetical)[-1]
    if said and (number == SEVERAL or RETRACTION.search(text, place)):
        number = _concluded(text, place) or number
    return SEVERAL if is_reconsidered(text[place:], number) else number


def is_reconsidered(rest: str, answer: str) -> bool:
    """Return whether second thoughts about an answer, in the text from it on, are cut or a plan."""
    if not (thoughts := _SECOND_THOUGHTS.search(rest)):
        return False
    behind = rest[thoughts.start() :].strip()
    if re.findall(r"[\w.]*\w", behind)[-1:] == [answer.lstrip("-")]:
        return False  # "Wait, I check it: 20 + 25 = 45"
    ended = re.search(r"[.!?✓✔✅。！？][\s*_)\]}\"'”$]*\Z", behind)
    return not ended or bool(_PLAN.fullmatch(re.split(r"[.!?]\s+", behind)[-1].rstrip(" .!*")))


def _are_parts(text: str, first: Found, last: int) -> bool:
    """Return whether the number at `last` is of another thing than the first, and no result of it."""
    place, number = first
    between = text[place:last]
    if text.startswith("#", last):
        lines = (between.partition("\n")[2] + text[last:].partition("\n")[0]).strip()
        if not re.search(r"[^\W\d_]", lines):  # both were worked out before
            return lines.strip("*# $.") in re.findall(r"[\d.,]*\d", text[:place])
        again = number in re.findall(r"[\d.]*\d", lines.replace(",", ""))
        return not (again or _FOLLOWS.search(lines) or RETRACTION.search(lines))
    before = re.split(r"[.!?]\s|\n", text[max(0, place - 500) : place])[-1]
    if _ADDED.search(between[-20:]) or not _BOX.match(text, last) or _BESIDE.search(before):
        return False
    if not re.search(r"[.!?][$\s]|\n", between):
        follows = "=" in between or _FOLLOWS.search(between) or RETRACTION.search(between)
        return not follows or bool(_AND_ANOTHER.search(between))
    return bool(_CASES.search(before) and _CASES.search(between))


def _concluded(text: str, begin: int = 0) -> str | None:
    """Return the number with which a last whole sentence concludes: "So Kylar pays $64."."""
    sentence = _CONCLUSION.search(text, max(begin, len(text) - 400))
    return sentence and (_in_line(sentence[2]) or _in_sentence(sentence[1]))


def _ending(text: str) -> str | None:
    """Return the number that a last line is, with its unit or label, emphasizes or concludes with."""
    before, _, ending = text.rpartition("\n")
    previous = before.rstrip().rpartition("\n")[2].strip(_MARKED + "#")
    last = ending.strip(_MARKED + ".\\[]()")
    number = stated_number(last) if _ONLY_NUMBER.fullmatch(last) else None
    if number is None and (emphasis := _EMPHASIS.search(ending)):
        content = emphasis[1] or emphasis[2] or emphasis[3]
        number = None if _STEP.match(content) else _in_line(content)
    if number is None and previous and _LABEL_ALONE.fullmatch(previous):
        number = _in_line(ending)
    labelled = _LABELLED.fullmatch(ending.strip(_MARKED))
    if number is None and labelled and not (_STEP.match(last) or is_denied(last)):
        item = _LABELLED.fullmatch(previous)
        number = stated_number(labelled[2]) if labelled[1] is not None or not item else None
    return _concluded(text) if number is None else number


def _withdrawn(text: str, begin: int, place: int) -> bool:
    """Return whether the sentence denies what stands at `place`, or says it besides, behind `begin`."""
    before = text[max(text.rfind("\n", 0, place) + 1, place - 200) : place]
    if place > begin and _BESIDE.search(before):
        return not RETRACTION.search(text, max(begin, place - 2000), place)
    return bool(_INSTEAD_OF.search(before) or _WRONG.match(text, place))


def _marked(text: str) -> Iterator[Found]:
    """Yield the numbers behind `####`, where they are no headings.

    A line with words beside its number ("2 checks") may be a heading too. It counts if it ends the
    text, or if no line is a number alone.
    """
    marked: list[tuple[int, str, str]] = []
    headings = set[int]()
    for match in _HEADING.finditer(text):
        if int(match[1]) == len(headings) + 1:
            headings.add(match.end())
    for match in [*_MARK.finditer(text)][-_MOST:]:
        line = match[1].strip()
        if any(match.start() <= end <= match.end() for end in headings) or _STEP.match(line):
            continue
        if _LABEL_ALONE.fullmatch(line):
            below = text[match.end() :].strip().partition("\n")[0]
            labelled = re.search(r"[^\W\d_]", line)
            line = below if labelled or _ONLY_NUMBER.fullmatch(below.strip(_MARKED + ".")) else ""
        if number := _in_line(line):
            certain = not (
                re.search(r"[^\W\d_]{2}", line) and text[match.end() :].strip(_MARKED + ".\n")
            )
            marked.append((match.start(), number, "" if certain else line))
    named = marked and not marked[-1][2] and _LABELLED_MARK.match(text, marked[-1][0])
    certain = [
        (place, number)
        for place, number, line in marked
        if not line or (named and _LABELLED_MARK.match(text, place))
    ]
    yield from certain or [(place, number) for place, number, _ in marked]


def _headed(text: str) -> Iterator[Found]:
    """Yield the numbers that stand alone behind another number of `#`."""
    yield from (
        (head.start(), n) for head in _HEADED.finditer(text) if (n := stated_number(head[1]))
    )


def _in_line(line: str) -> str | None:
    """Return the number that a marked line states; in a sentence, the only one that is no aside."""
    line = re.sub(r"^<([^<>]+)>", r"\1", line)
    if (number := stated_number(line)) is not None:
        return number
    if several := [*_ANSWER.finditer(line)]:
        return stated_number(line[several[-1].end() :])
    return _in_sentence(line)


def _in_sentence(sentence: str) -> str | None:
    """Return the only number of a sentence, or the only one that is no aside ("for 7 days")."""
    if len(sentence) > LONGEST:
        return None
    sentence = re.sub(r"(?<=\d)(.*?)\s\([^()]*\)\W*$", r"\1", with_minus(sentence))
    numbers = [*_NUMBER.finditer(sentence)]
    digits = sum(len(re.findall(r"\d", number[0])) for number in numbers)
    if "?" in sentence or is_denied(sentence) or digits != len(re.findall(r"\d", sentence)):
        return None
    if len(numbers) > 1:
        numbers = [number for number in numbers if not _ASIDE.search(sentence[: number.start()])]
    return stated_number(numbers[0][0]) if len(numbers) == 1 else None


def _boxed(text: str) -> Iterator[Found]:
    """Yield the numbers in boxes, or behind the equals sign of a box that holds none."""
    before = (0, "")  # where the box before ends, and its number
    numbers, partial = list[str](), False
    for place, content, end in _boxes(text):
        nested = content.count("boxed") > 2
        number = None if nested else stated_number(content, mathematical=True)
        numbers.append(number or "")
        joining = _OPERATOR if number == before[1] else _NEXT_BOX
        if before[1] and joining.fullmatch(text, before[0], place):
            number = SEVERAL
        before = (end, number or "")
        behind = re.match(r"[}$\s]*=\s*([^$\n\\]{1,40})", text[end : end + 99])
        if behind and number in (None, SEVERAL):
            number = stated_number(behind[1])
        if number is not None:
            value = rational(number)
            partial = (
                "/" in number or value is None or value > 999 or bool(_PART.match(text, place))
            )
            yield place, number
    totals = [
        t
        for t in _TOTAL.finditer(text, before[0])
        if {*numbers} >= {*re.findall(r"\d+", t[1])[:-1]}
    ]
    if len(numbers) > 1 and "" not in numbers:
        whole = sum((rational(number) or Fraction() for number in numbers), Fraction())
        totals += [
            t for t in _SUMMED.finditer(text, before[0]) if stated_number(t[1]) == written(whole)
        ]
    added_up = (partial and _ADDED_UP.search(text, before[0])) or next(iter(totals), None)
    if added_up and (number := stated_number(added_up[1])):
        yield added_up.start(), number


def _boxes(text: str) -> Iterator[tuple[int, str, int]]:
    r"""Yield (place, content, end) of every box: `\boxed{70}`, `\boxed 70`, `$\boxed{70$`."""
    ends = _pairs(text)
    for box in _BOX.finditer(text):
        start = box.end()
        opening = text[start : start + 1]
        if opening in _CLOSING and start in ends:
            yield box.start(), text[start + 1 : ends[start]], ends[start] + 1
        elif opening == "{":
            content = re.match(r"\{+([^{}$\n]{1,40})([}$\n]|\Z)", text[start : start + 100])
            # What the text's end cuts is a number only if it was stated before.
            if content and (content[2] or content[1] in re.findall(r"\d+", text[:start])):
                yield box.start(), content[1], start + content.end()
        elif bare := _BARE.match(text, start):
            yield box.start(), bare[0], bare.end()


def _pairs(text: str) -> dict[int, int]:
    """Return where each bracket is closed, for all brackets that are."""
    closings: dict[int, int] = {}
    open_: dict[str, list[int]] = {closing: [] for closing in _CLOSING.values()}
    for place, sign in enumerate(text):
        if sign in _CLOSING:
            open_[_CLOSING[sign]].append(place)
        elif open_.get(sign):
            closings[open_[sign].pop()] = place
    return closings


def _said(text: str) -> tuple[list[Found], list[Found]]:
    """Return the numbers of sentences that name the answer, and of those that do hypothetically."""
    firm: list[Found] = []
    hypothetical: list[Found] = []
    for match in [*_ANSWER.finditer(text)][-_MOST:]:
        line = text[match.end() : match.end() + 200].lstrip(" $*\n").partition("\n")[0]
        if match["instead"] and not RETRACTION.search(text[: match.end()]):
            continue
        rest = with_minus(line)
        sentence, *_ = parts = re.split(r"([.!?])(?:[\s*_]|$)", rest, maxsplit=1)
        sentence = sentence.rstrip("} ")
        first = _NUMBER_FIRST.match(rest) or "=" in rest or number_name(sentence)
        if _RELATIVE.match(rest) or not first or parts[1:2] == ["?"] or _WRONG.match(rest):
            continue
        if (number := _in_line(sentence)) is not None:
            before = re.split(r"[.!?]\s|\n", text[max(0, match.start() - 500) : match.start()])[-1]
            unreal = "would" in match[0] or _HYPOTHESIS.search(before)
            (hypothetical if unreal else firm).append((match.start(), number))
    return firm, hypothetical
