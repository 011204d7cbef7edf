"""Control of the canvas through the API: suffix, pinned pieces, text to begin with."""

from collections.abc import Generator
from typing import Any

import openai
import pytest

from tests.support.serving import QUESTION, Running, running, tokenizer

PROMPT = f"<|turn>user\n{QUESTION}<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    with running() as found:
        yield found


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def test_a_suffix_stands_behind_the_answer_and_the_answer_sees_it(server: Running) -> None:
    """The middle of an answer whose end is given: five and three more, were it ten or thirteen."""
    create = server.openai.completions.create
    options: dict[str, Any] = {"model": "bundled", "prompt": PROMPT, "seed": 3, "max_tokens": 5}
    free = create(**options)
    filled = [create(**options, suffix=f"\n\n#### {n}<turn|>") for n in ("8", "13")]
    assert filled[0].choices[0].text == "5+3=8"
    assert filled[0].choices[0].text != filled[1].choices[0].text
    assert filled[0].usage is not None
    assert filled[0].usage.completion_tokens == 5
    assert free.choices[0].text
    stream = create(**options, suffix="\n\n#### 8<turn|>", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "5+3=8"


def test_pinned_text_is_in_the_answer_where_it_was_put(server: Running) -> None:
    pieces = [{"position": 4, "text": "apples"}, {"position": 70, "text": "= 8"}]
    reply = server.ask(seed=3, max_tokens=128, extra_body={"pinned": pieces}, n=2)
    for choice in reply.choices:
        drafts = ids(choice.message.content)
        assert drafts[4 : 4 + len(ids("apples"))] == ids("apples")


def test_text_to_begin_with_reaches_the_canvas(server: Running) -> None:
    options = {"seed": 3, "max_tokens": 64}
    wrong = "9+9=18\n\n#### 18"
    found = [
        server.ask(**options, extra_body={"initial_text": text, "num_inference_steps": 1})
        for text in (wrong, "x" * 30)
    ]
    assert found[0].choices[0].message.content != found[1].choices[0].message.content


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"suffix": "x " * 100}, "suffix", "which leaves room for 0 before it in a canvas of 64"),
        ({"suffix": "x", "max_tokens": 64}, "suffix", "leaves room for 63"),
        ({"pinned": [{"position": 2, "text": text} for text in ("aa", "bb")]}, "pinned[1]", "twice"),
        ({"pinned": [{"position": 64, "text": "a"}], "max_tokens": 64}, "pinned", "the answer has 64"),
        ({"pinned": [{"position": -1, "text": "a"}]}, "pinned[0].position", "greater"),
        ({"pinned": [{"position": 1, "text": ""}]}, "pinned[0].text", "at least 1"),
        ({"pinned": [{"position": 1}]}, "pinned[0].text", "required"),
        ({"pinned": [{"position": 1, "text": "a"}] * 65}, "pinned", "at most 64"),
        ({"pinned": {"position": 1, "text": "a"}}, "pinned", "list"),
        ({"initial_text": ["x"]}, "initial_text", "string"),
        ({"initial_text": "x " * 3000, "max_tokens": 64}, "pinned", "raise max_tokens"),
        ({"suffix": 3}, "suffix", "string"),
    ],
)  # fmt: skip
def test_what_cannot_be_pinned_is_refused(
    server: Running, body: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        server.openai.completions.create(model="bundled", prompt="x", extra_body=body)
    assert caught.value.param == param
    server.settle()


def test_a_chat_has_no_suffix(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="a chat has none; pin text with pinned"):
        server.ask(extra_body={"suffix": "x"})
