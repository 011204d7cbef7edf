"""Held routers: BF16's experts in another model, and an error where the passes differ."""

import copy

import pytest
import torch
from experiments.routing import held_choice, routers_held
from modules_oracle.engine import ModelEngine
from tiny import CANVAS, tiny_model

from quantize.runtime.record.trajectory import Prompt, record
from quantize.runtime.sampler.sampler import Sampler
from quantize.stages.fidelity.replay import Compared, StepDistance, replay

SAMPLER = Sampler(max_new_tokens=2 * CANVAS, max_denoising_steps=3)


def distances(held: str) -> list[StepDistance]:
    """Replay two canvases through a model whose attention is damaged."""
    model = tiny_model()
    damaged = copy.deepcopy(model)
    with torch.no_grad():
        for layer in damaged.model.decoder.layers:
            weight = layer.get_submodule("self_attn.o_proj").weight
            weight += 0.5 * weight.std() * torch.randn(weight.shape, generator=torch.Generator())
    reference = ModelEngine(model, 2)
    prompts = [Prompt((5, 6, 7, 8), False), Prompt((9, 8, 7), False)]
    made = record(reference, prompts, [1, 2], sampler=SAMPLER, canvases=2, held_out=True)
    with routers_held(model, damaged, held):
        (found,) = replay(
            reference, [Compared(ModelEngine(damaged, 2))], made, SAMPLER, batch_size=2
        )
    return found


def test_held_routers_choose_as_bf16_did() -> None:
    own = distances("own")
    assert min(d.routing.mean().item() for d in own) < 1
    for held in ("chosen", "weighted"):
        found = distances(held)
        assert all((d.routing == 1).all() for d in found)
        assert [d.kl.mean() for d in found] != [d.kl.mean() for d in own]


def test_weights_of_held_experts_are_normalised_and_scaled() -> None:
    own = (torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[1.0, 1.0]]), torch.tensor([[0, 1]]))
    theirs = (torch.zeros(1, 3), torch.tensor([[0.7, 0.9]]), torch.tensor([[2, 1]]))
    _, weights, experts = held_choice(own, theirs, torch.tensor([1.0, 2.0, 4.0]), "chosen")
    assert experts.tolist() == [[2, 1]]
    assert torch.allclose(weights, torch.tensor([[0.4 * 4, 0.6 * 2]]))
    assert held_choice(own, theirs, torch.ones(3), "weighted")[1] is theirs[1]


def test_models_that_ran_other_passes_are_an_error() -> None:
    model = tiny_model()
    other = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="same passes"), routers_held(model, other, "chosen"):
        ModelEngine(model, 1).passes([[5, 6, 7]])
