"""Loads calibration prompts: bundled word problems, a local jsonl of chats, or Hub datasets.

A row of data becomes a chat that ends with its last user message, which the model answers. Chats of
a local file may show pictures: {"type": "image", "path": "a.png"} is then one part of a message, with a
path relative to the file. Rows are taken from the recipe's datasets in turn. The recipe says for which
share of chats, spread evenly, the thinking channel is on. A recipe always gives the same prompts: its
seed shuffles local files, and Hub datasets are read from the first row on.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from quantize.bundled import CALIBRATION
from quantize.checkpoints.layout import model_config
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError, ResourceError
from quantize.host.files import parse_json
from quantize.recipe.sections import Calibration
from quantize.runtime.prompt.chat import Message, encode_chat, load_tokenizer
from quantize.runtime.prompt.images import open_picture, place, prepare
from quantize.runtime.record.trajectory import Prompt

BUNDLED = "bundled"
QUESTION_FIELDS = ("question", "problem", "prompt", "instruction")


def load_prompts(checkpoint: Path, calibration: Calibration, count: int) -> list[Prompt]:
    """Return `count` prompts, tokenized with the checkpoint's own chat template.

    Raises:
        InputError: a file is unreadable; a row is no chat; there are too few chats, or no tokenizer.
        ResourceError: a Hub dataset cannot be read.
    """
    tokenizer = load_tokenizer(checkpoint)
    chats = [read_chats(name, calibration.seed) for name in calibration.datasets]
    prompts: list[Prompt] = []
    for messages in (
        messages_of_turn
        for turn in zip_longest(*chats)
        for messages_of_turn in turn
        if messages_of_turn is not None
    ):
        before, after = (int(n * calibration.thinking) for n in (len(prompts), len(prompts) + 1))
        thinking = after > before  # spread evenly: every second for 0.5
        ids, images = encode_chat(tokenizer, messages, thinking=thinking), None
        if paths := _pictures(messages):
            config = model_config(Checkpoint.open(checkpoint).config)
            images, counts = prepare([open_picture(path) for path in paths], config)
            ids = place(ids, counts, config)
        if len(ids) <= calibration.max_prompt_tokens:
            prompts.append(Prompt(tuple(ids), thinking, images))
        if len(prompts) == count:
            return prompts
    raise InputError(
        f"calibration: {', '.join(calibration.datasets)} hold {len(prompts)} usable prompts and "
        f"{count} are needed; name a larger dataset or lower `prompts`"
    )


def _pictures(messages: list[Message]) -> list[Path]:
    contents = (message["content"] for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [Path(part["path"]) for part in parts if part["type"] == "image"]


def read_chats(name: str, seed: int) -> Iterator[list[Message]]:
    """Yield the chats of `bundled` or a .jsonl file (shuffled by `seed`), or of a Hub data set."""
    if name == BUNDLED:
        rows: Iterable[Mapping[str, Any]] = _read_jsonl(CALIBRATION, seed)
    elif name.endswith(".jsonl"):
        rows = _read_jsonl(Path(name), seed)
    else:
        rows = _read_hub(name)
    for number, row in enumerate(rows, start=1):
        try:
            messages = chat_of(row, Path(name).parent if name.endswith(".jsonl") else None)
        except (TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{name}: row {number} is no chat of texts ({error!r})") from error
        if messages is None:
            raise InputError(
                f"{name}: row {number} has neither `messages` with a user message nor one of "
                f"{', '.join(QUESTION_FIELDS)}; its fields are {', '.join(sorted(row))}"
            )
        yield messages


def chat_of(row: Mapping[str, Any], folder: Path | None = None) -> list[Message] | None:
    """Return a row's chat up to its last user message, or None if it has no user message or question.

    Paths of pictures are relative to `folder`; without a folder a row may not show pictures.

    Raises:
        TypeError, KeyError, AttributeError: the row is no object, or no chat of texts and pictures.
    """
    messages = row.get("messages")
    if isinstance(messages, list):
        turns = [
            {"role": _text(m["role"]), "content": _content(m["content"], folder)} for m in messages
        ]
        last = max((i for i, m in enumerate(turns) if m["role"] == "user"), default=None)
        return None if last is None else [*turns[: last + 1]]
    for field in QUESTION_FIELDS:
        if isinstance(row.get(field), str):
            return [{"role": "user", "content": row[field]}]
    return None


def _text(value: Any) -> str:
    if not isinstance(value, str):  # such as the None of a tool call
        raise TypeError(f"{str(value)[:60]} is not text")
    return value


def _content(content: Any, folder: Path | None) -> str | list[dict[str, str]]:
    if not isinstance(content, list) or folder is None:
        return _text(content)
    parts: list[dict[str, str]] = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": "image", "path": str(path)}:
                parts.append({"type": "image", "path": str(folder / path)})
            case _:
                raise TypeError(
                    f'{json.dumps(part)[:60]} is neither {{"type": "text", "text": ...}} nor '
                    f'{{"type": "image", "path": ...}}'
                )
    return parts


def _read_jsonl(path: Path, seed: int) -> list[Mapping[str, Any]]:
    try:
        rows = [parse_json(line) for line in path.read_text("utf-8").split("\n") if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: this calibration file cannot be read as jsonl ({error})"
        ) from error
    random.Random(seed).shuffle(rows)
    return rows


def _read_hub(name: str) -> Iterator[Mapping[str, Any]]:
    """Stream the training split of a Hub dataset, or of a local folder that `datasets` can read."""
    from datasets import get_dataset_split_names, load_dataset

    try:
        splits: list[str] = get_dataset_split_names(name)
        split = next((s for s in splits if s.startswith("train")), splits[0])
        rows: Any = load_dataset(name, split=split, streaming=True)
        first = list(islice(rows, 1))
    except Exception as error:  # datasets raises whatever its network stack and builders raise
        raise ResourceError(
            f"calibration dataset {name!r} cannot be read ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}); check network and HF_TOKEN, or name a local "
            f".jsonl of chats in the recipe"
        ) from error
    yield from first
    yield from islice(rows, 1, None)
