"""Our arithmetic against compressed-tensors' and llm-compressor's own, bit for bit."""

import pytest
import torch
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from hypothesis import given, settings
from hypothesis import strategies as st
from llmcompressor.observers import Observer
from oracle import assert_equal_quantization, assert_same_bits, oracle, preset

from quantize.recipe import SCHEMES, Scheme
from quantize.schemes import (
    E2M1,
    dequantize_weight,
    fake_quantize_fp8,
    fake_quantize_int8,
    fake_quantize_nvfp4,
    global_scale,
    is_nvfp4,
    observe,
    quantize_weight,
    round_e2m1,
)

OBSERVERS = ("memoryless_minmax", "memoryless_mse")


def random_weight(*shape: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    """Rows of very different magnitude, with zeros, ties and negative zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp(spread * torch.randn(*shape[:-1], 1, generator=generator))
    weight = (torch.randn(*shape, generator=generator) * rows * 0.05).bfloat16()
    weight[torch.rand(shape, generator=generator) < 0.02] = 0.0
    weight[torch.rand(shape, generator=generator) < 0.01] = -0.0
    return weight


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(24, 16), (7, 704), (33, 2816), (48, 80)])
def test_weights_equal_llm_compressors_bit_for_bit(scheme: Scheme, observer, shape):
    weight = random_weight(*shape, seed=shape[0])
    theirs = oracle(scheme, [weight], observer)[0]
    mine = quantize_weight(scheme, weight, observe(weight, scheme, observer))
    assert_equal_quantization(mine, theirs)
    # compressed-tensors leaves -0.0 for a code of -0: the same bits are asked of us
    assert_same_bits(dequantize_weight(scheme, mine), theirs["decompressed"])


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_together_equal_experts_one_by_one(scheme: Scheme, observer):
    weight = random_weight(5, 2, 24, 48)
    ranges = observe(weight, scheme, observer)
    shared = global_scale([ranges.flatten(1, 2)]).unsqueeze(1) if is_nvfp4(scheme) else None
    mine = quantize_weight(scheme, weight, ranges, shared)
    back = dequantize_weight(scheme, mine)
    for e in range(5):
        gate_up = oracle(scheme, [weight[e, 0], weight[e, 1]], observer)
        for i, theirs in enumerate(gate_up):
            assert_equal_quantization({k: t[e, i] for k, t in mine.items()}, theirs)
            assert_same_bits(back[e, i], theirs["decompressed"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_linear_gives_up_its_search_alone(scheme: Scheme):
    """Linears of one group each: some stop improving for 5 steps before a better range comes."""
    weight = random_weight(64, 1, 16, seed=3)
    mine = observe(weight, scheme, "memoryless_mse")
    args = preset(scheme, "memoryless_mse").weights
    for i, linear in enumerate(weight):
        seen = Observer.load_from_registry("memoryless_mse", base_name="weight", args=args)
        seen(linear)
        theirs = torch.maximum(seen.max_vals, -seen.min_vals)
        assert mine[i].item() == theirs.item()


def test_gate_and_up_share_the_larger_ones_scale():
    gate, up = random_weight(16, 32), 3 * random_weight(16, 32, seed=1)
    ranges = [observe(w, "NVFP4", "memoryless_minmax") for w in (gate, up)]
    assert torch.equal(global_scale(ranges), global_scale([ranges[1]]))
    assert not torch.equal(global_scale(ranges), global_scale([ranges[0]]))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_zero_weights_rows_and_blocks(scheme: Scheme):
    weight = random_weight(8, 64)
    weight[2] = 0
    weight[5, 16:32] = 0
    for case in (weight, torch.zeros(4, 32, dtype=torch.bfloat16)):
        mine = quantize_weight(scheme, case, observe(case, scheme, "memoryless_minmax"))
        assert_equal_quantization(mine, oracle(scheme, [case])[0])
        assert all((t.float() > 0).all() for n, t in mine.items() if n.endswith("scale"))
        assert (dequantize_weight(scheme, mine)[case == 0] == 0).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e30, 3e38])
def test_extreme_magnitudes(scheme: Scheme, magnitude: float):
    weight = (torch.randn(6, 32, generator=torch.Generator().manual_seed(0)) / 4).clamp(-1, 1)
    weight = (weight * magnitude).bfloat16()
    mine = quantize_weight(scheme, weight, observe(weight, scheme, "memoryless_minmax"))
    assert_equal_quantization(mine, oracle(scheme, [weight])[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_not_finite_shows_in_the_ranges(scheme: Scheme, bad: float):
    weight = random_weight(4, 64)
    weight[1, 33] = bad
    finite = observe(weight, scheme, "memoryless_minmax").isfinite()
    assert int((~finite).sum()) == 1
    assert not finite[1].all()


def test_every_e2m1_midpoint_rounds_to_the_even_code():
    grid = torch.tensor(E2M1)
    middles = (grid[1:] + grid[:-1]) / 2
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(round_e2m1(middles), even)
    assert torch.equal(round_e2m1(-middles), -even)
    above = torch.nextafter(middles, torch.tensor(9.0))
    below = torch.nextafter(middles, torch.tensor(0.0))
    assert torch.equal(round_e2m1(above), grid[1:])
    assert torch.equal(round_e2m1(below), grid[:-1])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 0x7F7F), min_size=16, max_size=16), st.integers(0, 0xFFFF))
def test_any_finite_block_equals_compressed_tensors(bits: list[int], signs: int):
    block = torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16)
    block = torch.where(torch.tensor([bool(signs >> i & 1) for i in range(16)]), -block, block)
    weight = torch.stack((block, block.flip(0)))
    for scheme in SCHEMES:
        mine = quantize_weight(scheme, weight, observe(weight, scheme, "memoryless_minmax"))
        assert_equal_quantization(mine, oracle(scheme, [weight])[0])


def activations(dtype: torch.dtype) -> torch.Tensor:
    x = random_weight(3, 5, 64, spread=1.0).to(dtype) * 40
    x[0, 0] = 0
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "INT8_DYNAMIC"])
def test_activations_per_token_equal_compressed_tensors(scheme: Scheme, dtype: torch.dtype):
    x = activations(dtype)
    args = preset(scheme).input_activations
    scale, zero_point = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity())
    theirs = fake_quantize(x, scale, zero_point, args)
    mine = (fake_quantize_fp8 if scheme == "FP8_DYNAMIC" else fake_quantize_int8)(x)
    assert mine.dtype == theirs.dtype
    assert torch.equal(mine, theirs)
    assert not torch.equal(mine, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("calibrated", [0.5, 1.0, 3.0])
def test_activations_in_groups_equal_compressed_tensors(calibrated: float, dtype: torch.dtype):
    x = activations(dtype)
    shared = 448 * 6 / (x.abs().max().item() * calibrated)  # too small, right, too large a range
    args = preset("NVFP4").input_activations
    tensor = torch.tensor([shared])
    scale, zero_point = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity(), tensor)
    theirs = fake_quantize(x, scale, zero_point, args, global_scale=tensor)
    mine = fake_quantize_nvfp4(x, shared)
    assert mine.dtype == theirs.dtype
    assert torch.equal(mine, theirs)
