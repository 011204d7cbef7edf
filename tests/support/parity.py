"""The runtime beside transformers' own generate on the bundled model."""

import json
from functools import cache

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.runtime import Sampler
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer
from tests.support.modules_oracle.engine import generate_as_heard
from tests.support.modules_oracle.noise import heard

NEW_TOKENS = 128  # two canvases


@cache
def prompts(thinking: bool) -> list[list[int]]:
    tokenizer = load_tokenizer(CHECKPOINT)
    rows = [json.loads(line) for line in HELDOUT.read_text("utf-8").splitlines()]
    return [
        encode_chat(tokenizer, [{"role": "user", "content": row["question"]}], thinking=thinking)
        for row in rows[:200]
    ]


def assert_same(model: DiffusionGemmaForBlockDiffusion, batch: list[list[int]], seed: int) -> int:
    """Compare one batch of equal-length prompts; return how many canvases were committed."""
    sampler = Sampler.from_checkpoint(CHECKPOINT)
    torch.manual_seed(seed)
    with heard(len(batch)) as noise:
        output = model.generate(torch.tensor(batch), max_new_tokens=NEW_TOKENS)
    samples = generate_as_heard(model, batch, noise, max_new_tokens=NEW_TOKENS, sampler=sampler)
    new = output.sequences[:, len(batch[0]) :].tolist()
    for row, sample in enumerate(samples):
        committed = [token for canvas in sample.committed for token in canvas]
        assert new[row][: len(committed)] == committed
        assert not any(new[row][len(committed) :])  # padding
        expected = output.tokens_per_forward[row].item()
        assert sample.tokens_per_forward == pytest.approx(expected)
    return sum(sample.canvases for sample in samples)
