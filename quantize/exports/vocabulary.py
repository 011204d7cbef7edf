"""Turns tokenizer.json and the chat template into GGUF's tokenizer keys.

llama.cpp selects a BPE by name, not by its rules, so only two kinds of tokenizer can be written:

    gemma4   byte fallback, spaces as "▁": Gemma's own
    gpt2     bytes as characters, split beforehand by the bundled model's pattern. llama.cpp's splitter
             `starcoder` splits digits and words in the same way. It keeps runs of punctuation
             together, which changes nothing: no merge of this model joins two punctuation marks

Any other tokenizer is refused; the message names its model or splitter. Special tokens get GGUF's
type CONTROL. But the markers of thinking and tool calls get USER_DEFINED, since llama.cpp's chat
parser must see them in the text. Other added tokens also get USER_DEFINED. `<0xXX>` gets BYTE.
UNUSED tokens fill up a vocabulary that is smaller than the embedding.

This module follows conversion/gemma.py and src/llama-vocab.cpp of unslothai/llama.cpp at c3fb9724.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf import TokenType

from quantize.checkpoints.reader import FIX, read_json_object
from quantize.errors import InputError

BUNDLED_PATTERN = r"\d|\n| ?[A-Za-z]+| ?[^\sA-Za-z\d]|\s"
MARKED = ("channel", "tool_call", "tool_response")
VISIBLE = {'<|"|>'} | {mark for name in MARKED for mark in (f"<|{name}>", f"<{name}|>")}
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
# Special tokens -> GGUF's names for them.
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "mask": "mask"}
DEFAULT = {"mask": "<mask>"}  # Gemma's token; `llama-diffusion-cli` does not start without one


def vocabulary(folder: Path, size: int) -> dict[str, Any]:
    """Return the tokenizer of `folder` as GGUF keys and values; the model's embedding has `size` rows.

    Raise InputError if tokenizer or chat template are missing or faulty, if llama.cpp has no name for
    the tokenizer, or if a token's id is not below `size`.
    """
    if not (path := folder / "tokenizer.json").is_file():
        raise InputError(f"{path}: missing; a GGUF file carries the tokenizer, {FIX}")
    stated = read_json_object(path)
    try:
        model, pre = _kind(path, stated)
        texts, types = _tokens(path, stated, size)
        merges = [_merge(path, merge) for merge in stated["model"]["merges"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"{path}: not a tokenizer.json ({error!r}); {FIX}") from error
    keys: dict[str, Any] = {"model": model, "pre": pre, "merges": merges}
    # llama.cpp drops the BOS that the chat template writes.
    keys |= {"tokens": texts, "token_type": types, "add_bos_token": True, "add_space_prefix": False}
    if model == "gemma4":
        keys["scores"] = [-1000.0] * size  # required but never read: merges have ranks
    config = folder / "tokenizer_config.json"
    about = read_json_object(config) if config.is_file() else {}
    keys |= _special_ids(config, about, texts)
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return named | {"tokenizer.chat_template": _chat_template(folder, about)}


def _kind(path: Path, stated: dict[str, Any]) -> tuple[str, str]:
    """Return GGUF's names of the tokenizer's model and of its pre-tokenizer (splitter)."""
    model, splitter = stated["model"], stated.get("pre_tokenizer") or {}
    if model["type"] != "BPE":
        raise InputError(f"{path}: its model is {model['type']!r}; only BPE can be exported")
    if model.get("byte_fallback") and "▁" in str(stated.get("normalizer")):
        return "gemma4", "gemma4"
    steps = splitter.get("pretokenizers", [splitter])
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    if any(step.get("type") == "ByteLevel" for step in steps) and patterns == [BUNDLED_PATTERN]:
        return "gpt2", "starcoder"
    raise InputError(
        f"{path}: it splits text by {patterns or splitter.get('type')!r}, which llama.cpp has no name "
        f"for; Gemma's tokenizer and the bundled model's can be exported"
    )


def _tokens(path: Path, stated: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Return the texts and the GGUF token types of a vocabulary; indices are token ids."""
    added = {token["content"]: token for token in stated.get("added_tokens") or []}
    ids: dict[str, int] = stated["model"]["vocab"] | {t: entry["id"] for t, entry in added.items()}
    if len(by_id := {index: text for text, index in ids.items()}) != len(ids):
        raise InputError(f"{path}: two of its tokens have the same id; {FIX}")
    if outside := sorted(index for index in by_id if not 0 <= index < size):
        raise InputError(
            f"{path}: token {by_id[outside[0]]!r} has the id {outside[0]}, and the embedding has "
            f"{size} rows; {FIX}"
        )
    texts = [by_id.get(index, f"<unused_row_{index}>") for index in range(size)]
    types = [
        int(_type(t, added.get(t)) if i in by_id else TokenType.UNUSED) for i, t in enumerate(texts)
    ]
    return texts, types


def _type(text: str, added: dict[str, Any] | None) -> TokenType:
    if added is None and text not in VISIBLE:
        return TokenType.BYTE if BYTE_TOKEN.fullmatch(text) else TokenType.NORMAL
    special = text not in VISIBLE and added is not None and added.get("special")
    return TokenType.CONTROL if special else TokenType.USER_DEFINED


def _merge(path: Path, merge: str | Sequence[str]) -> str:
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    if " " in first + second:
        raise InputError(f"{path}: the merge {[first, second]} has a space, which GGUF cannot hold")
    return f"{first} {second}"


def _special_ids(path: Path, stated: dict[str, Any], texts: list[str]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for name, theirs in SPECIAL.items():
        token = stated.get(f"{name}_token", DEFAULT.get(name))
        text = token.get("content") if isinstance(token, dict) else token
        if text is None or (text not in texts and f"{name}_token" not in stated):
            continue
        if text not in texts:
            raise InputError(f"{path}: {name}_token {text!r} is no token of tokenizer.json; {FIX}")
        ids[f"{theirs}_token_id"] = texts.index(text)
    return ids


def _chat_template(folder: Path, about: dict[str, Any]) -> str:
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text("utf-8")
    if not isinstance(stated := about.get("chat_template"), str) or not stated:
        raise InputError(f"{folder}: no chat template there (chat_template.jinja); {FIX}")
    return stated
