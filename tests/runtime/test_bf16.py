"""BF16 beside BF16: both paths against transformers' bf16 model on canvases of real answers.

The modules path runs transformers' own operations, so its tokens must be equal. The kernels add up in
another order; where the two largest logits are within two steps of bf16's grid, which one is larger is
chance, so agreement is asked for where they are further apart. What remains are positions whose routing
flipped. The yardstick is how far transformers' bf16 model agrees with its own float32.
"""

import json
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
)

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.load import load
from quantize.runtime import Sampler, generate
from quantize.runtime.model.cells import Cache
from quantize.runtime.model.text_stack import FusedModel
from quantize.runtime.weights.load import load_packed
from tests.support.modules_oracle.engine import ModelEngine
from tests.support.modules_oracle.passes import decode_canvas, encode_prompts
from tests.support.parity import assert_same, prompts

LENGTH = 64  # a canvas of the bundled model


@pytest.mark.parametrize("count", [1, pytest.param(25, marks=pytest.mark.slow)])
def test_modules_in_bf16_give_the_tokens_of_transformers(count: int) -> None:
    model: Any = load(CHECKPOINT, dtype=torch.bfloat16)
    model.generation_config = DiffusionGemmaGenerationConfig.from_pretrained(CHECKPOINT)
    for thinking in (False, True):
        for seed, ids in enumerate(prompts(thinking)[:count]):
            assert assert_same(model, [ids], seed) >= 1


@dataclass
class Agreement:
    """Counts over positions, and the mean error of logits over canvases."""

    positions: int = 0
    clear: int = 0  # more than two bf16 steps between the two largest logits
    kernels: int = 0  # equal argmax, kernels and transformers' bf16
    kernels_clear: int = 0
    yardstick: int = 0  # equal argmax, transformers' bf16 and its float32
    canvases: int = 0
    error: float = 0.0

    def add(self, found: torch.Tensor, bf16: torch.Tensor, exact: torch.Tensor) -> None:
        """Add one canvas' logits [L, V]."""
        largest, second = bf16.topk(2, -1).values.unbind(-1)
        step = torch.exp2(largest.abs().log2().floor() - 7)
        clear = largest - second > 2 * step
        same = found.argmax(-1) == bf16.argmax(-1)
        self.positions += len(same)
        self.clear += int(clear.sum())
        self.kernels += int(same.sum())
        self.kernels_clear += int((same & clear).sum())
        self.yardstick += int((bf16.argmax(-1) == exact.argmax(-1)).sum())
        self.canvases += 1
        self.error += float((found - bf16).norm() / bf16.norm())


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_kernels_in_bf16_agree_with_transformers(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every denoising step of the first canvas, from the float32 model's own way to its answers."""
    exact, bf16 = load(CHECKPOINT), load(CHECKPOINT, dtype=torch.bfloat16)
    weights = load_packed(CHECKPOINT, "cpu")
    fused = FusedModel(weights, Cache.allocate(weights.config, 1, 1024, 256, torch.device("cpu")))
    taken: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = []

    def recorded(model: Any, prefix: Any, canvas: torch.Tensor, given: Any, *rest: Any) -> Any:
        logits = decode_canvas(model, prefix, canvas, given, *rest)
        taken.append((canvas.clone(), None if given is None else given.clone(), logits[0].clone()))
        return logits

    monkeypatch.setattr(
        import_module("tests.support.modules_oracle.batch"), "decode_canvas", recorded
    )
    slot, sampler, found = torch.zeros(1, dtype=torch.int32), Sampler(), Agreement()
    for seed, ids in enumerate(prompts(thinking=False)[:count]):
        taken.clear()
        generate(ModelEngine(exact), [ids], [seed], max_new_tokens=LENGTH, sampler=sampler)
        prefix = encode_prompts(bf16, [ids])
        fused.encode(torch.tensor([ids]), slot, slot)
        rows = fused.behind(slot, torch.tensor([len(ids)], dtype=torch.int32), LENGTH)
        for canvas, given, logits in taken:
            signal = None
            if given is not None:
                signal = fused.soft_embedding(given[0].to(torch.bfloat16), torch.ones(LENGTH))
            out = torch.empty(LENGTH, logits.shape[-1], dtype=torch.bfloat16)
            fused.logits(fused.run([fused.decoding(canvas, rows, signal)])[0], out)
            theirs = decode_canvas(bf16, prefix, canvas, given)[0].float()
            found.add(out.float(), theirs, logits)
    print(json.dumps(vars(found)))
    assert found.positions > 300 * count
    assert found.clear > 0.95 * found.positions
    assert found.kernels_clear > 0.999 * found.clear
    assert found.kernels >= found.yardstick - 0.002 * found.positions
    assert found.error / found.canvases < 0.03
