"""Text that never changes: thoughts, stop strings, characters that two canvases share."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantize.runtime.engine.interface import Canvas
from quantize.serve.text import Answer, Text, cut, held_back
from tests.support.serving import SAMPLER, tokenizer

EOS = 1


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def grow(tokens: Sequence[int], length: int, **settings: object) -> tuple[Answer, list[str]]:
    """Feed tokens, canvas by canvas, to an answer until it is finished; return the deltas."""
    limits: dict[str, Any] = {"max_tokens": 10**6, "max_canvases": 10**6}
    answer = Answer(Text(tokenizer()).split, SAMPLER, **(limits | settings))
    deltas: list[str] = []
    for start in range(0, len(tokens), length):
        canvas = list(tokens[start : start + length])
        canvas += [EOS] * (length - len(canvas))
        answer.commit(Canvas(canvas, 1))
        deltas.append(answer.delta().content)
        if answer.finish:
            return answer, deltas
    answer.commit(Canvas([EOS] * length, 1))
    answer.delta()
    return answer, deltas


def test_a_character_that_two_canvases_share_waits_for_the_second() -> None:
    tokens = ids("a€")
    assert len(tokens) == 4  # one, and three bytes
    answer, deltas = grow(tokens, 2)
    assert deltas == ["a", "€"]
    assert answer.content == "a€"


def test_a_stop_string_across_canvases_is_not_shown() -> None:
    tokens = ids("12\n345")
    assert len(tokens) == 6
    answer, deltas = grow(tokens, 3, stops=["\n34", "zzz"])
    assert deltas == ["12", ""]
    assert (answer.content, answer.finish) == ("12", "stop")


def test_what_looked_like_a_stop_string_is_shown_later() -> None:
    answer, deltas = grow(ids("12\n345"), 3, stops=["\n39"])
    assert deltas == ["12", "\n345"]
    assert answer.finish == "stop"  # EOS


@pytest.mark.parametrize("length", [1, 3, 64])
def test_thoughts_are_told_apart(length: int) -> None:
    tokens = ids("<|channel>thought\n2+2=4\n<channel|>#### 4")
    answer, _ = grow(tokens, length, stops=["=4"])
    assert (answer.reasoning, answer.content) == ("2+2=4\n", "#### 4")


def test_thoughts_that_never_end_are_no_answer() -> None:
    answer, _ = grow(ids("<|channel>thought\n2+2"), 4)
    assert (answer.reasoning, answer.content) == ("2+2", "")


def test_the_token_limit_cuts_inside_a_canvas() -> None:
    answer, deltas = grow(ids("123456789"), 4, max_tokens=6, max_canvases=2)
    assert (deltas, answer.finish, answer.tokens) == (["1234", "56"], "length", 6)


def test_an_end_right_at_the_token_limit_is_an_end() -> None:
    answer, _ = grow([*ids("123456"), EOS, EOS], 4, max_tokens=6, max_canvases=2)
    assert (answer.content, answer.finish) == ("123456", "stop")


def test_the_last_canvas_shows_everything() -> None:
    answer, deltas = grow(ids("12345\n"), 3, stops=["\nNo"], max_tokens=6, max_canvases=2)
    assert (deltas, answer.finish) == (["123", "45\n"], "length")


def test_the_stop_string_that_is_complete_first_counts() -> None:
    assert cut("xab##", ["ab##", "b"]) == ("xa", True)
    assert cut("xab##", ["b", "ab"]) == ("x", True)


@given(
    st.text("ab#\n", max_size=40), st.lists(st.text("ab#\n", min_size=1, max_size=4), max_size=3)
)
def test_cut_and_held_are_what_a_whole_text_says(text: str, stops: list[str]) -> None:
    """Reading one character at a time, and holding back, ends with the text before the first stop."""
    shown = ""
    for end in range(len(text) + 1):
        seen, stopped = cut(text[:end], stops)
        if not stopped:
            seen = seen[: len(seen) - held_back(seen, stops)]
        assert seen.startswith(shown)  # nothing that was shown is taken back
        shown = seen
        if stopped:
            break
    whole, stopped = cut(text, stops)
    assert shown == whole if stopped else whole.startswith(shown)
    if stopped:
        assert not any(stop in whole for stop in stops)


@given(st.text(max_size=30), st.integers(1, 9))
def test_deltas_add_up_to_the_text(text: str, length: int) -> None:
    tokens = [token for token in ids(text) if token not in SAMPLER.eos_token_ids]
    answer, _ = grow(tokens, length)
    assert answer.content == Text(tokenizer()).split(tokens)[1]
