"""What calibration needs beside a tiny checkpoint: a tokenizer, a short schedule and chats."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tiny import VOCAB

SHORT = {"max_denoising_steps": 3, "eos_token_id": [1], "pad_token_id": 0}


def write_tokenizer(folder: Path) -> None:
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = (
        "w2 {% for m in messages %}{{ m['content'] }} {% endfor %}"
        "{{ 'w98' if enable_thinking else 'w100' }}"
    )
    fast.save_pretrained(folder)


def words_of(i: int) -> str:
    return " ".join(f"w{110 + (7 * i + j) % 300}" for j in range(5 + i % 9))


def add_chats(folder: Path) -> None:
    """Write tokenizer, generation_config.json and chats.jsonl into a checkpoint's folder."""
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps(SHORT))
    rows = [
        {"messages": [
            {"role": "user", "content": words_of(i)},
            {"role": "assistant", "content": "w400"},
        ]}
        for i in range(40)
    ]  # fmt: skip
    text = "\n".join(json.dumps(row) for row in rows)
    (folder / "chats.jsonl").write_text(text)
