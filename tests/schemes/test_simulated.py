"""Simulated activations: each quantized Linear multiplies what the serving kernel would."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from quantize.checkpoints.load import load, read_input_schemes
from quantize.checkpoints.reader import Checkpoint
from quantize.schemes.records import SCHEMES
from tests.support.modules_oracle.simulated import load_rounding, rounding, simulate_activations
from tests.support.tiny import EXPERTS, LAYERS

LAYER = 1
QUERY = f"model.decoder.layers.{LAYER}.self_attn.q_proj"


def activations(rows: int, width: int = 64) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def route(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(rows, EXPERTS, generator=generator)
    weights, index = scores.topk(2)
    return index, weights


@pytest.mark.parametrize("name", ["fp8_artifact", "nvfp4_artifact"])
def test_a_dense_linear_rounds_its_input(request: pytest.FixtureRequest, name: str) -> None:
    folder = request.getfixturevalue(name)
    plain, simulated = load(folder), load_rounding(folder, "per_expert")
    scheme, scale = read_input_schemes(Checkpoint.open(folder))[QUERY]
    round_input = rounding(scheme, scale)
    assert round_input is not None
    x = activations(5)
    for tree in ("decoder", "encoder.language_model"):
        path = f"model.{tree}.layers.{LAYER}.self_attn.q_proj"
        expected = plain.get_submodule(path)(round_input(x))
        assert torch.equal(simulated.get_submodule(path)(x), expected)
        assert not torch.equal(plain.get_submodule(path)(x), expected)


@pytest.mark.parametrize("mode", ["per_expert", "per_layer"])
def test_experts_round_with_their_own_or_the_widest_scale(nvfp4_artifact: Path, mode: str) -> None:
    inputs = read_input_schemes(Checkpoint.open(nvfp4_artifact))
    plain, simulated = load(nvfp4_artifact), load_rounding(nvfp4_artifact, mode)  # type: ignore[arg-type]
    layer = f"model.decoder.layers.{LAYER}.experts"
    experts = plain.get_submodule(layer)
    x = activations(40)
    index, weights = route(40)
    scale = {
        part: [inputs[f"{layer}.{e}.{part}"][1] for e in range(EXPERTS)]
        for part in ("gate_proj", "down_proj")
    }
    assert len(set(scale["gate_proj"])) > 1, "the fixture gives every expert the same scale"
    if mode == "per_layer":
        scale = {part: [min(values)] * EXPERTS for part, values in scale.items()}
    expected = torch.zeros_like(x)
    for token in range(40):
        for slot in range(2):
            e = int(index[token, slot])
            rounded = rounding(SCHEMES["NVFP4"], scale["gate_proj"][e])(x[None, token])  # type: ignore[misc]
            gate, up = linear(rounded, experts.gate_up_proj[e]).chunk(2, -1)
            hidden = rounding(SCHEMES["NVFP4"], scale["down_proj"][e])(experts.act_fn(gate) * up)  # type: ignore[misc]
            expected[token] += weights[token, slot] * linear(hidden, experts.down_proj[e])[0]
    torch.testing.assert_close(simulated.get_submodule(layer)(x, index, weights), expected)


def test_without_rounding_the_experts_equal_transformers_own(
    nvfp4_artifact: Path, tiny_checkpoint: Path
) -> None:
    """The replaced forward computes the same sum, so any difference is the rounding's."""
    plain, model = load(tiny_checkpoint), load(tiny_checkpoint)
    inputs = read_input_schemes(Checkpoint.open(nvfp4_artifact))
    weight_only = {name: (SCHEMES["NVFP4A16"], None) for name in inputs if ".experts." in name}
    changed = simulate_activations(model, weight_only, "per_expert")  # type: ignore[arg-type]
    assert changed == 2 * LAYERS * EXPERTS * 3
    layer = f"model.decoder.layers.{LAYER}.experts"
    x = activations(40)
    torch.testing.assert_close(
        model.get_submodule(layer)(x, *route(40)), plain.get_submodule(layer)(x, *route(40))
    )


def test_zero_modules_matched_is_an_error(tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="no quantized Linear"):
        simulate_activations(load(tiny_checkpoint), {}, "per_expert")
