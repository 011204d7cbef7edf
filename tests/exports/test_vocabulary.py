"""The tokenizer in the file: every token at its id, of the right type; and what Gemma's becomes."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models

from quantize.bundled import CALIBRATION, CHECKPOINT, HELDOUT
from quantize.exports.vocabulary import vocabulary
from quantize.runtime.prompt.chat import load_tokenizer

SPECIAL = ("bos", "eos", "unknown", "padding", "mask")
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6


@pytest.fixture(scope="module")
def bundled() -> dict:
    return vocabulary(CHECKPOINT, 1024)


def test_tokens_stand_at_their_ids(bundled: dict):
    tokenizer = load_tokenizer(CHECKPOINT)
    assert bundled["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(range(1024))
    assert bundled["tokenizer.ggml.model"] == "gpt2"
    ids = {name: bundled[f"tokenizer.ggml.{name}_token_id"] for name in SPECIAL}
    assert ids == {"bos": 2, "eos": 1, "unknown": 3, "padding": 0, "mask": 4}
    assert bundled["tokenizer.chat_template"] == tokenizer.chat_template


def test_token_types(bundled: dict):
    types = dict(
        zip(bundled["tokenizer.ggml.tokens"], bundled["tokenizer.ggml.token_type"], strict=True)
    )
    assert types["<|turn>"] == types["<bos>"] == types["<|think|>"] == CONTROL
    assert types["<|channel>"] == types["<channel|>"] == USER_DEFINED
    assert types["A"] == types["Ġthe"] == NORMAL


def test_the_pattern_named_to_llama_cpp_gives_our_tokens(bundled: dict):
    """Tokenize with what a file says alone, as llama.cpp does, and with the checkpoint's tokenizer."""
    vocab = {text: i for i, text in enumerate(bundled["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in bundled["tokenizer.ggml.merges"]]
    theirs = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=merges))
    # `starcoder`: digits one by one, then GPT-2's pattern, which is ByteLevel's own.
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    assert bundled["tokenizer.ggml.pre"] == "starcoder"
    ours = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    texts = [json.loads(line)["question"] for line in HELDOUT.read_text("utf-8").splitlines()]
    texts += [json.loads(line)["answer"] for line in HELDOUT.read_text("utf-8").splitlines()]
    texts += CALIBRATION.read_text("utf-8").splitlines()[:50]
    assert len(texts) > 4000
    different = [t for t in texts if ours.encode(t).ids != theirs.encode(t).ids]
    assert different == []


def gemma_like(folder: Path) -> Path:
    """A tokenizer of Gemma's kind: byte fallback, no splitting, spaces as "▁"."""
    vocab = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<0x0A>": 4, "▁": 5, "a": 6, "▁a": 7}
    vocab |= {"\n\n": 8}
    special = [{"id": i, "content": t, "special": True} for t, i in vocab.items() if i < 4]
    stated = {
        "added_tokens": [*special, {"id": 8, "content": "\n\n", "special": False}],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}},
        "model": {"type": "BPE", "byte_fallback": True, "vocab": vocab, "merges": [["▁", "a"]]},
    }
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(stated))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_gemmas_own_kind(tmp_path: Path):
    keys = vocabulary(gemma_like(tmp_path / "gemma"), 10)
    assert keys["tokenizer.ggml.model"] == keys["tokenizer.ggml.pre"] == "gemma4"
    assert keys["tokenizer.ggml.merges"] == ["▁ a"]
    assert keys["tokenizer.ggml.tokens"][8:] == ["\n\n", "<unused_row_9>"]
    types = keys["tokenizer.ggml.token_type"]
    assert types == [CONTROL] * 4 + [BYTE, NORMAL, NORMAL, NORMAL, USER_DEFINED, UNUSED]
    assert len(keys["tokenizer.ggml.scores"]) == 10
