"""Function calls read from text: the inverse of what a template writes, and everything else is text."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantize.serve.calls import DEEPEST, MARKERS, Call, read_call, read_calls
from tests.support.serving import text_with_tools

NAMES = ("weather", "a.b-c")
WORDS = st.text("aZ0_é", min_size=1, max_size=4)
STRINGS = st.text('a9.,:{}[]<|"> \n€', max_size=12).filter(
    lambda s: not any(m in s for m in MARKERS)
)
VALUES: Any = st.recursive(
    st.booleans() | st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@cache
def template() -> jinja2.Template:
    return jinja2.Template(text_with_tools().tokenizer.chat_template)


def written(arguments: dict[str, Any]) -> str:
    """A call as the template of the tests writes it, which a second parser reads as Gemma 4's."""
    turn = {"role": "assistant", "content": ""}
    turn |= {"tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}  # type: ignore[dict-item]
    rendered = template().render(messages=[turn], bos_token="")
    return rendered[rendered.index("<|tool_call>") : rendered.index("<|turn>model", 30)]


@given(st.dictionaries(WORDS, VALUES, max_size=4))
def test_what_the_template_writes_is_read_back(arguments: dict[str, Any]) -> None:
    content, (call,) = read_calls("so: " + written(arguments), NAMES, whole=False)
    assert (content, call.name) == ("so: ", "weather")
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("call:weather{}", {}),
        ('call:weather{c:<|"|>a,}]b<|"|>,days:-3,x:1.5e3}', {"c": "a,}]b", "days": -3, "x": 1.5e3}),
        ('call:weather{l:[<|"|>a<|"|>,[],{k:null}],t:true}', {"l": ["a", [], {"k": None}], "t": True}),
        (' call:weather { "c" : "Par\\"is" , <|"|>k l<|"|>: no }\n', {"c": 'Par"is', "k l": "no"}),
        ("call:weather{day:2026-11-22,n:007,z:None}", {"day": "2026-11-22", "n": "007", "z": None}),
        ("call:weather{x:['a, b','c']}", {"x": ["a, b", "c"]}),
        ("call:weather{x:{'mode':'fast'}}", {"x": {"mode": "fast"}}),
        ("call:weather{t:True,f:False,n:None}", {"t": True, "f": False, "n": None}),
        ("call:weather{a: 'it\\'s' , b:'x:{,}]'}", {"a": "it's", "b": "x:{,}]"}),
        (r"call:weather{a:'\x41\u20ac\n\d\\'}", {"a": "A€\n\\d\\"}),
        ("call:weather{a:'1\n2'}", {"a": "1\n2"}),
        ("call:weather{a:'tis late,b:it's,c:'x'}", {"a": "'tis late", "b": "it's", "c": "x"}),
        ("call:weather{'k l':'',\"m\":'\"'}", {"k l": "", "m": '"'}),
        ("call:weather{a:[True,true,'True',\"true\"]}", {"a": [True, True, "True", "true"]}),
        ("call:weather{a:[1, 2,],b:{'k': 1,},}", {"a": [1, 2], "b": {"k": 1}}),
        ("call:weather{a:(1, 2),b:('x',),c:(),d:((1,), [2]),e:(None, {'k': (3, 4)})}",
         {"a": [1, 2], "b": ["x"], "c": [], "d": [[1], [2]], "e": [None, {"k": [3, 4]}]}),
        ("call:weather{a:('a, b'),b:(see below),c:f(x),d:(555) 1-2,e:(f(x), 2)}",
         {"a": "a, b", "b": "(see below)", "c": "f(x)", "d": "(555) 1-2", "e": ["f(x)", 2]}),
        ("call:weather{a:'''it's \"so\"''',b:\"\"\"x, {y}\nz\"\"\",c:''''''}",
         {"a": "it's \"so\"", "b": "x, {y}\nz", "c": ""}),
        (r"""call:weather{a:u'x\x41',b:r'a\n',c:R"\d, ",d:r'''\z''',u'k':U"y"}""",
         {"a": "xA", "b": r"a\n", "c": r"\d, ", "d": r"\z", "k": "y"}),
        ("call:weather{a:'a' 'b',b:'a, ' \n\"b\" r'c'}", {"a": "ab", "b": "a, bc"}),
        (r'call:weather{a:"it\'s \x41",b:"\/\ud83d\ude00"}', {"a": "it's A", "b": "/😀"}),
        ("call:weather{a:1_000,b:0x1F,c:1.,d:-.5,e:+3,f:12:30,g:the 'best' one}",
         {"a": "1_000", "b": "0x1F", "c": "1.", "d": "-.5", "e": "+3", "f": "12:30",
          "g": "the 'best' one"}),
    ],
)  # fmt: skip
def test_calls_that_are_read(body: str, arguments: dict[str, Any]) -> None:
    assert read_call(body, NAMES) == Call("weather", json.dumps(arguments, ensure_ascii=False))


@given(VALUES)
def test_what_python_writes_is_read_back(value: Any) -> None:
    written_by_python = repr(value)
    call = read_call(f"call:weather{{x:{written_by_python}}}", NAMES)
    markers = [marker for marker in MARKERS if marker in written_by_python]
    assert markers or (call is not None and json.loads(call.arguments) == {"x": value})


@pytest.mark.parametrize(
    "spell", [repr, lambda value: repr(value).replace("[", "(").replace("]", ",)")]
)
@given(st.lists(st.text("ab'\\\" ,(", max_size=4), min_size=1, max_size=3))
def test_lists_and_tuples_of_python_are_read_back(
    spell: Callable[[Any], str], texts: list[str]
) -> None:
    call = read_call(f"call:weather{{x:{spell(texts)}}}", NAMES)
    assert call is not None
    assert json.loads(call.arguments) == {"x": texts}


@pytest.mark.parametrize(
    "body",
    [
        "", "call:", "call:weather", "weather{}", "call:other{}", "call:weather{}{}",
        "call:weather[]", "call:weather{a}", "call:weather{a:}", "call:weather{a:1",
        "call:weather{:1}", "call:weather{,}", "call:weather{a:1,,}", "call:weather{a:[,]}",
        "call:weather{a:[1,,2]}", "call:weather{a:(1, 2}", "call:weather{a:(1, 2]}",
        "call:weather{a:(1, 2) x}", "call:weather{a:{1, 2}}", "call:weather{a:('x') y}",
        "call:weather{a:b'abc'}", "call:weather{a:f'{x}'}", 'call:weather{a:Rb"x"}',
        "call:weather{b'k':1}", "call:weather{'k:1}'}", "call:weather{''k':1}",
        "call:weather{a:'a' or 'b'}", "call:weather{a:'a' + 'b'}", "call:weather{a:['a, b' + 'c']}",
        "call:weather{a:'it's'}", "call:weather{a:'''x}", "call:weather{a:'a' # c}",
        "call:weather{a:{'a':'b':'c'}}", 'call:weather{a:"a" "b}', "call:weather{a:'a'b'}",
        'call:weather{a:<|"|>x}', "call:weather{a:[1}", 'call:weather{a:"x}',
        "call:weather{a:" + "[" * 40 + "]" * 40 + "}", "call:weather{a:" + "9" * 5000 + "}",
        "call:weather{a:1e999}", 'call:weather{a:"\\x"}', 'call:weather{a:"\\ud800"}',
        "call:weather{a:'\\ud800'}", "call:weather{a:'\\x4'}", "call:weather{a:'\\N{no}'}",
    ],
)  # fmt: skip
def test_calls_that_stay_text(body: str) -> None:
    assert read_call(body, NAMES) is None
    text = f"<|tool_call>{body}<tool_call|>."
    assert read_calls(text, NAMES, whole=True) == (text, [])


def test_arguments_are_read_to_a_depth() -> None:
    def call(levels: int) -> Call | None:
        return read_call(f"call:weather{{a:{'[' * levels}{']' * levels}}}", NAMES)

    assert call(DEEPEST) == Call("weather", f'{{"a": {"[" * DEEPEST}{"]" * DEEPEST}}}')
    assert call(DEEPEST + 1) is None
    assert DEEPEST == 32


def spelled(value: Any) -> Any:
    """A value with its bare words as the template spells them, which vLLM's parser reads as strings."""
    if isinstance(value, dict):
        return {key: spelled(each) for key, each in value.items()}
    if isinstance(value, list):
        return [spelled(each) for each in value]
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_calls_are_read_as_vllm_reads_them() -> None:
    """What vLLM 0.26.0's parser made of them (tests/data): the same but for types; scraps are text."""
    recorded = json.loads((Path(__file__).parents[1] / "data" / "gemma4_calls.json").read_text())
    assert len(recorded["written"]) > 40
    for body, theirs in recorded["written"]:
        call = read_call(body, NAMES)
        assert call is not None, body
        assert spelled(json.loads(call.arguments)) == theirs, body
        assert read_calls(written(json.loads(call.arguments)), NAMES, whole=True) == ("", [call])
    for body, theirs in recorded["scraps"]:
        assert isinstance(theirs, dict)  # where vLLM returns what it can make of it
        assert read_call(body, NAMES) is None, body


CHOPPED = (
    'I ask.<|tool_call>call:weather{d:1}<tool_call|><|tool_call>call:weather{d:<|"|>x<|"|>}<tool_call|>'
    "<|tool_call>call:nobody{}<tool_call|>and<|tool_call>call:weather{"
)


def test_text_and_calls_only_grow_while_an_answer_does() -> None:
    content, calls = "", list[Call]()
    for end in range(len(CHOPPED) + 1):
        now, found = read_calls(CHOPPED[:end], NAMES, whole=False)
        if "<|tool_call>".startswith(now[len(content) :]) and now != content:
            continue  # half a marker, which the answer holds back
        assert now.startswith(content)
        assert found[: len(calls)] == calls
        content, calls = now, found
    assert content == "I ask.<|tool_call>call:nobody{}<tool_call|>and"
    assert [json.loads(call.arguments) for call in calls] == [{"d": 1}, {"d": "x"}]
    whole, _ = read_calls(CHOPPED, NAMES, whole=True)
    assert whole == content + "<|tool_call>call:weather{"
