"""What `quantize bench` times, on a CPU: the figures themselves need a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from quantize import bench
from quantize.bundled import CHECKPOINT
from quantize.runtime import Sampler
from quantize.runtime.fused.engine import FusedEngine
from quantize.runtime.fused.weights import load_packed


@pytest.mark.parametrize("context", [100, 7])
def test_canvases_stand_behind_the_context(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every timed canvas but the first has `context` tokens before it, its last canvas among them."""
    weights = load_packed(CHECKPOINT, "cpu")
    length = weights.config.canvas_length
    engine = FusedEngine(weights, capacity=2, max_context=context + 2 * length)
    before: list[tuple[int, int]] = []
    plain = engine.denoise

    def denoise(slots: Sequence[int], *rest: Any) -> Any:
        state = engine._slots[slots[0]]
        before.append((state.context, len(state.unencoded)))
        return plain(slots, *rest)

    monkeypatch.setattr(engine, "denoise", denoise)
    monkeypatch.setattr(engine, "profile_step", lambda slots: {})
    sampler = replace(Sampler(), max_denoising_steps=2, confidence_threshold=1e-30)
    prompts = [[5] * context] * 2
    times = bench._measure(engine, prompts, sampler, 3)
    assert times.forwards == 3
    timed = before[4:-1:2]
    assert len(timed) == 3
    assert all(sum(parts) == max(context, 1 + length) for parts in timed), before
    assert all(parts[1] == length for parts in timed), before
