"""Our arithmetic against compressed-tensors' and llm-compressor's own, bit for bit."""

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from fused_dequant import formats
from fused_dequant.formats import E2M1, pack_e2m1, round_e2m1, unpack_e2m1
from hypothesis import given, settings
from hypothesis import strategies as st

from quantize.checkpoints.reader import DTYPES
from quantize.schemes.records import SCHEMES, Scheme, scheme_of_group
from quantize.schemes.rounding import (
    FP8,
    all_finite,
    global_scale,
    sound_scales,
)
from quantize.stages.convert.shard_pieces import LARGEST
from tests.support.activations import as_multiplied, round_activations
from tests.support.llm_compressor_oracle import llm_compressor
from tests.support.oracle import assert_equal_quantization, assert_same_bits, oracle, preset

OBSERVERS = ("memoryless_minmax", "memoryless_mse")
NVFP4 = SCHEMES["NVFP4"]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=str)


def quantized(scheme: Scheme, weight: torch.Tensor, observer="memoryless_minmax"):
    return scheme.quantize(weight, scheme.observe(weight, observer), None, None)


def random_weight(*shape: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    """Rows of very different magnitude, with zeros, ties and negative zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp(spread * torch.randn(*shape[:-1], 1, generator=generator))
    weight = (torch.randn(*shape, generator=generator) * rows * 0.05).bfloat16()
    weight[torch.rand(shape, generator=generator) < 0.02] = 0.0
    weight[torch.rand(shape, generator=generator) < 0.01] = -0.0
    return weight


@every_scheme
def test_a_config_group_is_compressed_tensors_preset(scheme: Scheme) -> None:
    theirs = preset(scheme, OBSERVERS[1])
    theirs.format = scheme.compressed.name
    written = theirs.model_dump(mode="json")
    ours = scheme.config_group(["Linear"], OBSERVERS[1])
    assert stated(ours) == stated(written)
    assert QuantizationScheme.model_validate(ours).model_dump(mode="json") == written


def stated(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without what is None or {}: compressed-tensors 0.20 leaves both out."""
    return {
        key: stated(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value is not None and value != {}
    }


@pytest.mark.parametrize("observer", OBSERVERS)
@every_scheme
@pytest.mark.parametrize("shape", [(24, 16), (7, 704), (33, 2816), (48, 80)])
def test_weights_equal_llm_compressors_bit_for_bit(scheme: Scheme, observer, shape):
    rows, inputs = shape
    inputs += inputs % scheme.group_size  # a group, and not quite two, of 32
    weight = random_weight(rows, inputs, seed=rows)
    theirs = oracle(scheme, [weight], observer)[0]
    mine = quantized(scheme, weight, observer)
    assert_equal_quantization(mine, theirs)
    # compressed-tensors leaves -0.0 for a code of -0: the same bits are asked of us
    assert_same_bits(scheme.dequantize(mine), theirs["decompressed"])


@pytest.mark.parametrize("observer", OBSERVERS)
@every_scheme
def test_experts_together_equal_experts_one_by_one(scheme: Scheme, observer):
    weight = random_weight(5, 2, 24, 96)
    ranges = scheme.observe(weight, observer)
    shared = (
        global_scale([ranges.flatten(1, 2)]).unsqueeze(1) if scheme.shares_global_scale else None
    )
    mine = scheme.quantize(weight, ranges, shared, None)
    back = scheme.dequantize(mine)
    for e in range(5):
        gate_up = oracle(scheme, [weight[e, 0], weight[e, 1]], observer)
        for i, theirs in enumerate(gate_up):
            assert_equal_quantization({k: t[e, i] for k, t in mine.items()}, theirs)
            assert_same_bits(back[e, i], theirs["decompressed"])


@every_scheme
def test_each_linear_gives_up_its_search_alone(scheme: Scheme):
    """Linears of one group each: some stop improving for 5 steps before a better range comes."""
    weight = random_weight(64, 1, max(16, scheme.group_size), seed=3)
    mine = scheme.observe(weight, "memoryless_mse")
    args = preset(scheme, "memoryless_mse").weights
    for i, linear in enumerate(weight):
        seen = llm_compressor("observers").Observer.load_from_registry(
            "memoryless_mse", base_name="weight", args=args
        )
        seen(linear)
        theirs = torch.maximum(seen.max_vals, -seen.min_vals)
        assert mine[i].item() == theirs.item()


def test_gate_and_up_share_the_larger_ones_scale():
    gate, up = random_weight(16, 32), 3 * random_weight(16, 32, seed=1)
    ranges = [NVFP4.observe(w, "memoryless_minmax") for w in (gate, up)]
    assert torch.equal(global_scale(ranges), global_scale([ranges[1]]))
    assert not torch.equal(global_scale(ranges), global_scale([ranges[0]]))


@every_scheme
def test_scales_a_quarter_off_are_more_than_gptq_may_err(scheme: Scheme) -> None:
    weight = random_weight(32, 256).double()
    values = scheme.dequantize(quantized(scheme, weight.bfloat16())).double()

    def error(found: torch.Tensor) -> float:
        return ((found - weight).norm() / weight.norm()).item()

    assert error(values) < scheme.largest_error("nearest") < scheme.largest_error("gptq")
    assert error(1.25 * values) > scheme.largest_error("gptq")


@every_scheme
def test_all_zero_weights_rows_and_blocks(scheme: Scheme):
    weight = random_weight(8, 64)
    weight[2] = 0
    weight[5, 32:] = 0
    for case in (weight, torch.zeros(4, 32, dtype=torch.bfloat16)):
        mine = quantized(scheme, case)
        assert_equal_quantization(mine, oracle(scheme, [case])[0])
        if scheme is not SCHEMES["MXFP4A16"]:  # byte 0 is 2^-127 there
            assert all((t.float() > 0).all() for n, t in mine.items() if n.endswith("scale"))
        assert (scheme.dequantize(mine)[case == 0] == 0).all()


@every_scheme
@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e30, 3e38])
def test_extreme_magnitudes(scheme: Scheme, magnitude: float):
    weight = (torch.randn(6, 32, generator=torch.Generator().manual_seed(0)) / 4).clamp(-1, 1)
    weight = (weight * magnitude).bfloat16()
    mine = quantized(scheme, weight)
    assert_equal_quantization(mine, oracle(scheme, [weight])[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@every_scheme
def test_what_is_not_finite_shows_in_the_ranges(scheme: Scheme, bad: float):
    weight = random_weight(4, 64)
    weight[1, 33] = bad
    finite = scheme.observe(weight, "memoryless_minmax").isfinite()
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


@settings(max_examples=60)
@given(st.lists(st.integers(0, 0x7F7F), min_size=32, max_size=32), st.integers(0, 0xFFFFFFFF))
def test_any_finite_block_equals_compressed_tensors(bits: list[int], signs: int):
    block = torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16)
    block = torch.where(torch.tensor([bool(signs >> i & 1) for i in range(32)]), -block, block)
    weight = torch.stack((block, block.flip(0)))
    for scheme in SCHEMES.values():
        if scheme.name == "MXFP4A16" and block.abs().max() > LARGEST:
            continue  # theirs is infinite from 2.98e38 on; convert refuses what is above 1e38
        mine = quantized(scheme, weight)
        assert_equal_quantization(mine, oracle(scheme, [weight])[0])


def activations(dtype: torch.dtype) -> torch.Tensor:
    x = random_weight(3, 5, 64, spread=1.0).to(dtype) * 40
    x[0, 0] = 0
    return x


def nearest_e4m3(exact: torch.Tensor) -> torch.Tensor:
    """Round float64 values by trying every e4m3 number: the nearest, of two the one of even code."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(FP8).double()  # not negative, finite
    distance = (exact.abs()[..., None] - numbers).abs()
    odd = torch.arange(0x7F) % 2 * 1e-9  # distances differ by 2^-12 at least
    return numbers[(distance + odd).argmin(-1)].copysign(exact)


@pytest.mark.parametrize("name", ["NVFP4", "NVFP4A16"])
def test_nvfp4_for_fp8_products_is_rounded_once(name: str) -> None:
    """Every code under every block scale, in either library's layout, and as the kernels round."""
    scales = torch.arange(0x7F, dtype=torch.uint8).view(FP8)[:, None]  # [127, 1]
    codes = torch.arange(16, dtype=torch.uint8).view(8, 2)
    packed = (codes[:, 0] | (codes[:, 1] << 4)).expand(127, 8).contiguous()
    values = torch.tensor([*E2M1, *(-value for value in E2M1)]).double()
    expected = nearest_e4m3(values * scales.double() / 8)
    expected[scales.flatten().float() < 0.25] = 0
    assert expected.max() == 320  # 6 * 448 / 8 = 336 lies between 320 and 352: the even code
    assert expected[expected > 0].min() == 2**-6  # 0.5 * 0.25 / 8, the least normal number
    scheme = as_multiplied(SCHEMES[name], "fp8")
    ours = {"weight_packed": packed, "weight_scale": scales}
    mine = scheme.dequantize(ours | {"weight_global_scale": torch.tensor([1024.0])})
    assert torch.equal(mine.double(), expected * 8 / 1024)
    theirs = {"weight": packed, "weight_scale": scales, "weight_scale_2": torch.tensor(2.0**-10)}
    assert torch.equal(scheme.dequantize(theirs), mine)
    stacked = {key: torch.stack([tensor] * 2) for key, tensor in ours.items()}
    twice = scheme.dequantize(stacked | {"weight_global_scale": torch.tensor([[1024.0], [2048.0]])})
    assert torch.equal(twice.double(), torch.stack([expected / 128, expected / 256]))
    kernels = formats.nvfp4_as_e4m3(packed, scales)
    assert kernels.dtype == FP8
    assert torch.equal(kernels.double(), expected)


def test_only_the_mode_fp8_changes_a_scheme_and_only_nvfp4() -> None:
    for scheme in SCHEMES.values():
        for mode in ("none", "per_expert", "per_layer"):
            assert as_multiplied(scheme, mode) is scheme
        changed = as_multiplied(scheme, "fp8")
        assert (changed is not scheme) == (scheme.kernel == "nvfp4")
        if changed is not scheme:
            x = activations(torch.float32)
            expected = round_activations(SCHEMES["FP8_DYNAMIC"])(x, None)
            assert torch.equal(round_activations(changed)(x, None), expected)
            assert not changed.calibrated


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "INT8_DYNAMIC"])
def test_activations_per_token_are_the_kernels_bit_for_bit(name: str, dtype: torch.dtype):
    scheme, x = SCHEMES[name], activations(dtype)
    codes, scale = formats.quantize_rows(x, formats.EIGHT_BIT[scheme.kernel])
    mine = round_activations(scheme)(x, None)
    assert_same_bits(mine, (codes.float() * scale[..., None]).to(dtype))
    assert not torch.equal(mine, x)


@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "INT8_DYNAMIC"])
def test_activations_per_token_are_vllms_but_for_ties(name: str):
    """In float32, as CUDA kernels of vLLM: x / scale to e4m3, and round(x * (127 / amax)) to int8.

    We multiply with 1 / scale: where the last bit of a quotient lies on a tie, one code differs.
    """
    x = random_weight(64, 2816, spread=1.0).float() * 40
    amax = x.abs().amax(-1, keepdim=True)
    if name == "FP8_DYNAMIC":
        scale = amax / 448
        theirs = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    else:
        theirs = (x * (127 / amax)).round() * (amax / 127)
    mine = round_activations(SCHEMES[name])(x, None)
    same = torch.isclose(mine, theirs, rtol=1e-6, atol=0)
    assert (~same).float().mean() < 1e-3
    step = (mine - theirs).abs() / amax
    assert step.max() <= (32 / 448 if name == "FP8_DYNAMIC" else 1 / 127) * 1.001


def test_a_token_that_is_not_finite_stays_so_and_alone():
    for name in ("FP8_DYNAMIC", "INT8_DYNAMIC"):
        x = activations(torch.float32)[0]
        x[2, 5] = torch.inf
        mine = round_activations(SCHEMES[name])(x, None)
        assert mine[2].isnan().all()
        assert mine[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("calibrated", [0.5, 1.0, 3.0])
def test_activations_in_groups_equal_compressed_tensors_in_float32(
    calibrated: float, dtype: torch.dtype
):
    x = activations(dtype)
    shared = 448 * 6 / (x.abs().max().item() * calibrated)  # too small, right, too large a range
    args = preset(NVFP4).input_activations
    tensor, wide = torch.tensor([shared]), x.float()
    scale, zero_point = compute_dynamic_scales_and_zp(wide, args, torch.nn.Identity(), tensor)
    theirs = fake_quantize(wide, scale, zero_point, args, global_scale=tensor).to(dtype)
    mine = round_activations(NVFP4)(x, shared)
    assert mine.dtype == theirs.dtype
    assert torch.equal(mine, theirs)


@every_scheme
def test_the_record_agrees_with_compressed_tensors(scheme: Scheme):
    """Its preset has the arguments by which config.json is read back, and its format packs so."""
    theirs = preset(scheme)
    weights, activations = theirs.weights, theirs.input_activations
    assert scheme.config_weights == (weights.type, weights.num_bits, weights.strategy)
    assert scheme.config_activations == (activations and activations.dynamic)
    assert scheme.codes.group == weights.group_size
    compressed = oracle(scheme, [random_weight(32, 64)])[0]
    on_disk = scheme.compressed.tensors(32, 64)
    calibrated = {"input_global_scale"} if scheme.calibrated else set()
    assert on_disk.keys() == (compressed.keys() - {"decompressed"}) | calibrated
    for suffix, (dtype, shape) in on_disk.items():
        if suffix not in calibrated:
            assert (DTYPES[dtype], shape) == (compressed[suffix].dtype, compressed[suffix].shape)
    assert scheme.name in SCHEMES
    assert list(mine := quantized(scheme, random_weight(32, 64))) == [
        suffix for suffix in on_disk if suffix in mine
    ]


@every_scheme
def test_a_config_group_is_read_back_as_its_scheme(scheme: Scheme):
    group = scheme.config_group(["Linear"], OBSERVERS[0])
    assert scheme_of_group(group) is scheme
    for key, other in (("type", "uint"), ("num_bits", 5), ("strategy", "block")):
        assert scheme_of_group(group | {"weights": group["weights"] | {key: other}}) is None
    for stated in ({"dynamic": False}, {"num_bits": 8}):  # without a word they are not dynamic
        assert scheme_of_group(group | {"input_activations": stated}) is None
    assert scheme_of_group(group | {"weights": None}) is None
    if scheme.codes.group:
        assert scheme_of_group(group | {"weights": group["weights"] | {"group_size": 64}}) is None


def test_modelopts_layout_of_a_matrix_of_48_by_80():
    """Written down from NVIDIA's published checkpoints (tests/checkpoints/test_modelopt.py)."""
    codes = {"weight": ("U8", (48, 40)), "weight_scale": ("F8_E4M3", (48, 5))}
    number = ("F32", ())
    found = {s.name: s.modelopt and s.modelopt.tensors(48, 80) for s in SCHEMES.values()}
    assert found == {
        "FP8_DYNAMIC": {
            "weight": ("F8_E4M3", (48, 80)), "weight_scale": number, "input_scale": number,
        },
        "NVFP4": codes | {"weight_scale_2": number, "input_scale": number},
        "NVFP4A16": codes | {"weight_scale_2": number},
        "MXFP4A16": None,
        "INT8_DYNAMIC": None,
    }  # fmt: skip


def test_every_e2m1_value_is_packed_and_unpacked():
    """The low nibble is the even input, bit 3 the sign, also of zero."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    packed = pack_e2m1(values)
    assert packed.tolist() == [2 * i | (2 * i + 1) << 4 for i in range(8)]
    assert_same_bits(unpack_e2m1(packed), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FP8])
def test_one_value_that_is_not_finite_is_found_wherever_it_stands(dtype: torch.dtype):
    largest = torch.finfo(dtype).max
    whole = torch.tensor([0.0, -0.0, largest, -largest, 1.5]).repeat(200_000).to(dtype)
    assert all_finite(whole)  # more than one block of them
    assert all_finite(whole[:0])
    for at in (0, 600_000, len(whole) - 1):
        for bad in (torch.nan, torch.inf, -torch.inf):
            broken = whole.clone()
            broken[at] = bad  # e4m3 has no infinity: it becomes NaN or the largest number
            assert all_finite(broken) == bool(broken.float().isfinite().all())
            assert not all_finite(broken) or dtype == FP8


@pytest.mark.parametrize(("dtype", "bad"), [(FP8, (0x7F, 0x80, 0xFF)), (torch.uint8, (0xFF,))])
def test_scales_that_no_layout_holds_are_found(dtype: torch.dtype, bad: tuple[int, ...]) -> None:
    """Of e4m3 its NaN and every negative number, of e8m0 its NaN."""
    for byte in (0, 1, 0x7E, *bad):
        scale = torch.tensor([[1, byte], [2, 3]], dtype=torch.uint8).view(dtype)
        assert sound_scales(scale) == (byte not in bad)


def test_whole_numbers_are_finite():
    assert all_finite(torch.tensor([-1, 127], dtype=torch.int8))
    assert all_finite(torch.empty(0, dtype=torch.uint8))
