"""Turns chats into token ids with the model's own chat template and its thinking switch.

Without thinking, DiffusionGemma's prompts end in an empty thought channel. With `enable_thinking`, the
model opens a real one. The template comes with the checkpoint, not with this module.
"""

import re
import sys
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from quantize.errors import InputError
from quantize.runtime.prompt.markup import GUARDS, markup_of, texts_of, with_guards

Message = Mapping[str, Any]  # content: text, or parts of type text and image
OPEN, CLOSE, HEADER = "<|channel>", "<channel|>", "thought\n"
BLANKS = re.compile(r"\s*")
SENTENCE = "Tom has 9 pens."
MARKUP = re.compile(r"<\|\w+\|?>|<\w+\|>")
TEMPLATE_FAULTS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
LONGEST = 5.0  # seconds of a processor for the prompt of SENTENCE; milliseconds are usual
HALF_CHARACTER = "\ufffd"  # what an incomplete character is decoded to


def load_tokenizer(folder: Path) -> Any:
    """Return a folder's tokenizer; raise InputError if it cannot be loaded or has no chat template."""
    from quantize.checkpoints.from_transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a tokenizer's file may be damaged in any way
        reason = " ".join(str(error).split())
        raise InputError(
            f"{folder}: its tokenizer cannot be loaded ({type(error).__name__}: {reason})"
        ) from error
    if not tokenizer.chat_template:
        raise InputError(f"{folder}: its tokenizer has no chat template")
    return tokenizer


def sound_tokenizer(folder: Path) -> Any:
    """Return a folder's tokenizer; raise InputError as `load_tokenizer` and `check_prompt` do."""
    tokenizer = load_tokenizer(folder)
    try:
        check_prompt(tokenizer)
    except InputError as error:
        raise InputError(f"{folder}: {error}; download the checkpoint again") from error
    return tokenizer


def check_prompt(tokenizer: Any) -> None:
    """Raise InputError if a prompt loses text, as by another class of tokenizer, or splits markup."""
    for thinking in (False, True):
        chat = [{"role": "user", "content": SENTENCE}]
        with in_time():
            prompt = tokenizer.decode(encode_chat(tokenizer, chat, thinking=thinking))
        check_rendered(prompt, markup_of(tokenizer).ids.keys())


@contextmanager
def in_time() -> Generator[None]:
    """Raise InputError if a template's loops, which may be anybody's, take longer than LONGEST."""
    before, end = sys.gettrace(), time.thread_time() + LONGEST

    def look(*_: Any) -> Any:  # at every line
        if time.thread_time() > end:
            raise InputError(f"the chat template takes over {LONGEST:g} s for {SENTENCE!r}")
        return look

    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


def check_rendered(prompt: str, tokens: Collection[str]) -> None:
    """Raise InputError if the prompt of SENTENCE lacks it, or has markup that is none of `tokens`."""
    if SENTENCE not in prompt:
        raise InputError(
            f"tokenizer and chat template make {prompt[:100]!r} of {SENTENCE!r}; is "
            f"tokenizer_config.json missing?"
        )
    if split := sorted({*MARKUP.findall(prompt)} - {*tokens}):
        raise InputError(
            f"the chat template writes {split[0]}, which is no token of tokenizer.json, so the "
            f"model would read it as text"
        )


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    thinking: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Return the token ids of `messages` and of the declarations of `tools`, up to the model's turn.

    `thinking` lets the model think first. Only the template's own markup becomes control tokens: what
    looks like them in messages and tools is text (`markup`). InputError: the template refuses them.
    """
    markup = markup_of(tokenizer)
    chat: Any = [_without_thoughts(message) for message in messages]
    texts, guard = texts_of([chat, tools]), None
    if any(map(markup.in_text, texts)):
        guard = next((guard for guard in GUARDS if not any(guard in text for text in texts)), None)
        if guard is None:
            raise InputError(
                "messages: they hold control tokens beside all characters that guard them"
            )
        chat, tools = with_guards([chat, tools], markup, guard)
    settings: Any = {"add_generation_prompt": True, "enable_thinking": thinking}
    settings |= {"return_dict": True} if guard is None else {"tokenize": False}
    try:
        encoded = tokenizer.apply_chat_template(chat, tools=tools, **settings)
    except TEMPLATE_FAULTS as error:
        # Messages and schemas of tools may have any shape; a template assumes the shapes it knows.
        raise InputError(f"messages: the chat template refuses them: {error}") from error
    return list(encoded["input_ids"]) if guard is None else markup.encode(encoded, guard)


def _without_thoughts(message: Message) -> Message:
    """Return a message; if it is the model's own, without thoughts that its text still holds."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return message
    kept, at = list[str](), 0
    while (begin := content.find(OPEN, at)) >= 0 and (end := content.find(CLOSE, begin)) >= 0:
        kept.append(content[at:begin])
        at = BLANKS.match(content, end + len(CLOSE)).end()  # type: ignore[union-attr]
    return {**message, "content": "".join([*kept, content[at:]])}


def split_thoughts(
    tokenizer: Any, tokens: Sequence[int], keep: Collection[int] = ()
) -> tuple[str, str]:
    """Return (thoughts, answer): the text of the model's thinking channel, and all other text.

    Both omit the channel's markers and header. The answer keeps the special tokens in `keep`.
    """
    channel = set(tokenizer.convert_tokens_to_ids([OPEN, CLOSE]))
    special = (special_ids(tokenizer) if keep else set()) - set(keep)
    inside = [*zip(tokens, in_thoughts(tokenizer, tokens), strict=True)]
    thoughts = [token for token, yes in inside if yes and token not in channel]
    answer = [token for token, yes in inside if not yes and token not in channel | special]
    thought = tokenizer.decode(thoughts, skip_special_tokens=True)
    answered = tokenizer.decode(answer, skip_special_tokens=not keep)
    return "" if HEADER.startswith(thought) else thought.removeprefix(HEADER), answered


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of all special tokens, which `decode` leaves out with skip_special_tokens."""
    added: Mapping[int, Any] = tokenizer.added_tokens_decoder
    return {number for number, token in added.items() if token.special}


def in_thoughts(tokenizer: Any, tokens: Sequence[int]) -> list[bool]:
    """Return, for each token, whether it belongs to the thinking channel or is one of its markers."""
    begin, end = tokenizer.convert_tokens_to_ids([OPEN, CLOSE])
    inside_at: list[bool] = []
    inside = False
    for token in tokens:
        inside = inside or token == begin
        inside_at.append(inside or token == end)
        inside = inside and token != end
    return inside_at
