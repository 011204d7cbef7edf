"""The runtime on the trained bundled model: token for token what transformers generates."""

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
)

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.load import load
from tests.support.parity import assert_same, prompts


@pytest.fixture(scope="module")
def model() -> DiffusionGemmaForBlockDiffusion:
    """Float64 with eager experts: grouped_mm has no float64, and no argmax hangs on rounding."""
    loaded = load(CHECKPOINT, dtype=torch.float64)
    loaded.generation_config = DiffusionGemmaGenerationConfig.from_pretrained(CHECKPOINT)
    loaded.set_experts_implementation("eager")
    return loaded


@pytest.mark.parametrize("count", [1, pytest.param(25, marks=pytest.mark.slow)])
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
