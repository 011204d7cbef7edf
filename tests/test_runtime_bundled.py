"""The runtime on the trained bundled model: token for token what transformers generates."""

import json

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
)

from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.load import load
from quantize.runtime import Sample, Sampler, generate
from quantize.runtime.chat import encode_chat, load_tokenizer

NEW_TOKENS = 128  # two canvases


@pytest.fixture(scope="module")
def model() -> DiffusionGemmaForBlockDiffusion:
    """Float64 with eager experts: grouped_mm has no float64, and no argmax hangs on rounding."""
    loaded = load(CHECKPOINT, dtype=torch.float64)
    loaded.generation_config = DiffusionGemmaGenerationConfig.from_pretrained(CHECKPOINT)
    loaded.set_experts_implementation("eager")
    return loaded


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
    output = model.generate(torch.tensor(batch), max_new_tokens=NEW_TOKENS)
    torch.manual_seed(seed)
    samples: list[Sample] = generate(
        model, batch, [0] * len(batch), max_new_tokens=NEW_TOKENS, sampler=sampler,
        noise="reference",
    )  # fmt: skip
    new = output.sequences[:, len(batch[0]) :].tolist()
    for row, sample in enumerate(samples):
        committed = [token for canvas in sample.committed for token in canvas]
        assert new[row][: len(committed)] == committed
        assert not any(new[row][len(committed) :])  # padding
        expected = output.tokens_per_forward[row].item()
        assert sample.tokens_per_forward == pytest.approx(expected)
    return sum(sample.canvases for sample in samples)


@pytest.mark.parametrize("count", [3, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize("thinking", [False, True])
def test_one_prompt_at_a_time(
    model: DiffusionGemmaForBlockDiffusion, thinking: bool, count: int
) -> None:
    canvases = [
        assert_same(model, [ids], seed) for seed, ids in enumerate(prompts(thinking)[:count])
    ]
    assert count < 25 or set(canvases) == {1, 2}


@pytest.mark.parametrize("batches", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_batches_of_four_of_equal_length(
    model: DiffusionGemmaForBlockDiffusion, batches: int
) -> None:
    by_length: dict[int, list[list[int]]] = {}
    for ids in prompts(thinking=False):
        by_length.setdefault(len(ids), []).append(ids)
    full = [group[:4] for group in by_length.values() if len(group) >= 4]
    assert len(full) >= batches
    for seed, batch in enumerate(full[:batches]):
        assert_same(model, batch, seed)
