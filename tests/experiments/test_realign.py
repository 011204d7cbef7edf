"""Realigned routers and norms: fits that are known, and a walk that computes what the engine does."""

from pathlib import Path

import torch
from experiments.realign import (
    ARMS,
    Rows,
    changes_of,
    fitted_router,
    fitted_vector,
    recorded_passes,
    through,
    write_changed,
)
from safetensors.torch import load_file

from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.record.trajectory import Prompt, record
from quantize.runtime.sampler.sampler import Sampler
from quantize.runtime.weights.load import load_packed
from tests.support.tiny import CANVAS

SAMPLER = Sampler(max_new_tokens=2 * CANVAS, max_denoising_steps=2)


def engine(folder: Path) -> FusedEngine:
    """Open a tiny checkpoint on a CPU."""
    return FusedEngine(load_packed(folder, "cpu"), capacity=4)


def test_a_vector_is_fitted_unless_the_held_rows_say_that_it_is_worse() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 8, generator=generator)
    old, new = torch.ones(8).bfloat16(), torch.linspace(0.5, 2, 8).bfloat16()
    held = torch.arange(4000) % 4 == 3
    assert torch.allclose(fitted_vector(x, x * new.float(), old, held), new, rtol=0.01)
    target = torch.where(held[:, None], x, x * new.float())
    assert torch.equal(fitted_vector(x, target, old, held), old)


def test_a_router_is_fitted_to_logits_up_to_what_all_experts_share() -> None:
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(4000, 16, generator=generator)
    old = torch.randn(6, 16, generator=generator).bfloat16()
    logits = clean @ old.float().T
    held = torch.arange(4000) % 4 == 3
    assert torch.equal(fitted_router(clean, logits + clean[:, :1], old, held, 2), old)
    mixed = torch.eye(16) + 0.2 * torch.randn(16, 16, generator=generator)
    x = clean @ mixed
    fitted = fitted_router(x, logits + 1000 * clean[:, :1], old, held, 2)

    def chosen(projection: torch.Tensor) -> torch.Tensor:
        return (x @ projection.float().T).topk(2, -1).indices.sort(-1).values

    right = logits.topk(2, -1).indices.sort(-1).values
    before, after = ((chosen(p) == right).float().mean() for p in (old, fitted))
    assert before < 0.9 < 0.98 < after


def test_layers_behind_rounded_layers_come_nearer_and_bf16_stays_as_it_is(
    tiny_checkpoint: Path, nvfp4_artifact: Path, tmp_path: Path
) -> None:
    reference, quantized = engine(tiny_checkpoint), engine(nvfp4_artifact)
    prompts = [Prompt((5 + n, 6, 7, 8 - n), False) for n in range(4)]
    made = record(reference, prompts, [1, 2, 3, 4], sampler=SAMPLER, canvases=1, held_out=False)
    passes = recorded_passes(reference, made, SAMPLER)
    h = [p.h for p in passes]
    for index, layer in enumerate(reference.model.weights.layers):
        h = through(reference.model, index, layer, passes, h)["out"]
    last = reference.model.run([passes[-1]])[0]  # the keys and values before it are there
    norm = reference.model.weights.norm.float()
    ours = h[-1].float() * torch.rsqrt(h[-1].float().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal((ours * norm).bfloat16(), last)
    assert Rows.of(passes, last=True).decoded.all()

    both = reference.model, reference.model
    itself = changes_of(both, passes)  # sums are rounded, so norms of what is added move a little
    assert list(itself) == list(ARMS)
    assert itself["router"] == itself["before"] == {}
    changes = changes_of((reference.model, quantized.model), passes)
    assert all("router" in name for name in changes["router"])
    assert not any("router" in name for name in changes["after"])
    write_changed(nvfp4_artifact, tmp_path / "all", changes["all"])
    old, new = (
        load_file(folder / "model.safetensors") for folder in (nvfp4_artifact, tmp_path / "all")
    )
    differing = {name for name in old if not torch.equal(old[name], new[name])}
    assert differing == set(changes["all"])

    def away(model: FusedEngine) -> float:
        rows = [p.h for p in passes]
        for index, layer in enumerate(model.model.weights.layers):
            rows = through(model.model, index, layer, passes, rows)["out"]
        return float((rows[-1].float() - h[-1].float()).norm())

    assert away(engine(tmp_path / "all")) < away(quantized)
