"""The bundled tokenizer: Gemma 4's control ids, round trips, the thinking switch."""

import pytest
from experiments.bundled.problems import Problem
from experiments.bundled.tokenizer import (
    CHAT_TEMPLATE,
    CONTROL,
    NEWLINE_ID,
    VOCABULARY,
    build,
    prompt,
    response,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quantize.bundled import CHECKPOINT

TOKENIZER: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(CHECKPOINT)


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=200)
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert TOKENIZER.decode(encode(text), clean_up_tokenization_spaces=False) == text


def test_control_tokens_have_gemma_ids() -> None:
    assert len(TOKENIZER) == VOCABULARY
    assert {t: TOKENIZER.convert_tokens_to_ids(t) for t in CONTROL.values()} == {
        t: i for i, t in CONTROL.items()
    }
    assert encode("\n") == [NEWLINE_ID]
    special = (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.bos_token_id)
    assert special == (0, 1, 2)


def test_digits_are_single_tokens() -> None:
    assert len(encode("1234567890")) == 10


def test_prompt_without_thinking_closes_an_empty_channel() -> None:
    text = prompt(TOKENIZER, " Why? ", thinking=False)
    assert text == ("<bos><|turn>user\nWhy?<turn|>\n<|turn>model\n<|channel>thought\n<channel|>")
    ids = encode(text)
    assert ids[:2] == [2, 105]
    assert ids[-1] == 101


def test_prompt_with_thinking_asks_in_a_system_turn() -> None:
    assert prompt(TOKENIZER, "Why?", thinking=True) == (
        "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nWhy?<turn|>\n<|turn>model\n"
    )


def test_template_takes_a_system_message_parts_and_earlier_turns() -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "A cat."},
    ]
    text = TOKENIZER.apply_chat_template(chat, tokenize=False, enable_thinking=True)
    assert text == (
        "<bos><|turn>system\n<|think|>\nBe brief.<turn|>\n"
        "<|turn>user\n<|image|>What?<turn|>\n<|turn>model\nA cat.<turn|>\n"
    )


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (False, "1+2=3\n#### 3<turn|>"),
        (True, "<|channel>thought\n1+2=3\n<channel|>#### 3<turn|>"),
    ],
)
def test_response_puts_the_steps_where_the_prompt_asks(thinking: bool, expected: str) -> None:
    problem = Problem("q", "1+2=3\n#### 3", 3, "synthetic", 1)
    assert response(problem, thinking=thinking) == expected


def test_building_is_deterministic_and_places_every_id() -> None:
    texts = ["Tom has 12 apples and 7 pens.", "How many apples does Tom have?"] * 5
    first, second = build(texts), build(texts)
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    assert sorted(first.get_vocab().values()) == list(range(VOCABULARY))
    assert first.chat_template == TOKENIZER.chat_template == CHAT_TEMPLATE
