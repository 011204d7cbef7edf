"""Chats to token ids, with the model's own template and its thinking switch.

Non-thinking prompts of DiffusionGemma end in an empty thought channel; `enable_thinking` opens a
real one. The template ships with the checkpoint: nothing of it is written here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantize.errors import InputError

Message = Mapping[str, Any]  # content: text, or parts of type text and image


OPEN, CLOSE, HEADER = "<|channel>", "<channel|>", "thought\n"
HALF_CHARACTER = "\ufffd"  # what a decoder makes of the first bytes of one


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a checkpoint folder, from its JSON files alone.

    Raises:
        InputError: the folder has no tokenizer, or one without a chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{folder}: its tokenizer cannot be loaded ({reason})") from error
    if not tokenizer.chat_template:
        raise InputError(f"{folder}: its tokenizer has no chat template")
    return tokenizer


def encode_chat(tokenizer: Any, messages: Sequence[Message], *, thinking: bool) -> list[int]:
    """Return the ids of a chat that ends where the model's turn begins."""
    encoded = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, enable_thinking=thinking, return_dict=True
    )
    return list(encoded["input_ids"])


def split_thoughts(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, str]:
    """Return (thoughts, answer): what the model wrote in its thinking channel, and the rest."""
    begin, end = tokenizer.convert_tokens_to_ids([OPEN, CLOSE])
    thoughts: list[int] = []
    answer: list[int] = []
    into = answer
    for token in tokens:
        if token == begin:
            into = thoughts
        elif token == end:
            into = answer
        else:
            into.append(token)
    thought, text = (
        tokenizer.decode(part, skip_special_tokens=True) for part in (thoughts, answer)
    )
    return "" if HEADER.startswith(thought) else thought.removeprefix(HEADER), text
