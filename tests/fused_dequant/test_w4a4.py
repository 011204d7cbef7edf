"""NVFP4 times NVFP4 on Blackwell's FP4 units, as far as it can be shown without them.

In Triton's interpreter both builds of the kernel run, one with a `dot_scaled` written from PTX's
definition; on an H200 the one that decodes. On a GPU with FP4 units this file runs the instruction.
"""

import importlib
import importlib.util
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType

import fused_dequant as fd
import pytest
import torch
from fused_dequant import formats, reference, simulated, weights
from fused_dequant.formats import FOUR_BIT
from fused_dequant.launch import targets
from fused_dequant.reference import relative_error
from fused_dequant.tune import cases
from fused_dequant.tune.cases import HIDDEN, INNER, LINEAR_SHAPES
from fused_dequant.weights import Weight, layouts, w4a4

from tests.support.kernels_support.device import DEVICE, GPU, INTERPRETED, MARKS, random

SCALE = 2688 / 6  # a global scale: rows of standard normal numbers reach 5
TOLERANCE = 2.5e-3  # a bf16 result alone costs 1.6e-3
EXPERTS_TOLERANCE = 2e-2  # where a bf16 rounding of hidden rows moved, a code of 2 bits moves


def test_tiles_hold_every_scale_where_the_instruction_reads_it() -> None:
    """Odd shapes too; byte 16 (r % 32) + 4 (r // 32) + c, and zeros where there is no row or column."""
    scale = torch.randint(1, 127, (2, 200, 11), dtype=torch.uint8).view(torch.float8_e4m3fn)
    tiles = w4a4.to_tiles(scale)
    assert tiles.shape == (2, 2, 3, 512)
    assert torch.equal(w4a4.from_tiles(tiles, 200, 176).float(), scale.float())
    for row, column in ((0, 0), (31, 3), (32, 4), (127, 10), (128, 5), (199, 10)):
        r, c = row % 128, column % 4
        found = tiles[1, row // 128, column // 4, 16 * (r % 32) + 4 * (r // 32) + c]
        assert found.float() == scale[1, row, column].float()
    assert int((tiles.float() != 0).sum()) == scale.numel()


def test_one_weight_on_a_cpu() -> None:
    """The layout decodes to the weight on disk, and products in torch are the simulated ones."""
    plain, own = (random_weight(1, 48, 80, device="cpu", simulate=each) for each in (True, False))
    shared = torch.tensor([SCALE])
    torch.testing.assert_close(weights.dequantize(own.weight), weights.dequantize(plain.weight))
    x = cases.random_tokens(7, 80, "cpu")
    expected = fd.linear(simulated.round_nvfp4(x, shared), simulated.scaled(plain.weight, shared))
    torch.testing.assert_close(fd.linear(x, own.weight), expected)
    with pytest.raises(ValueError, match="K = 80"):
        fd.linear(x[:, :48], own.weight)


@dataclass(frozen=True)
class Made:
    """A weight as the kernel reads it, and its values f64 [E, N, K] as on disk."""

    weight: Weight
    values: torch.Tensor


def random_weight(
    E: int, N: int, K: int, seed: int = 0, device: str = DEVICE, *, simulate: bool = False
) -> Made:
    """Make a weight for FP4 units or, to `simulate` them, as it is on disk."""
    generator = torch.Generator(device).manual_seed(seed)
    w = torch.randn(E, N, K, generator=generator, device=device) * K**-0.5
    shared = 2688 / w.abs().amax((1, 2))
    each = [formats.quantize_nvfp4(*own) for own in zip(w, shared, strict=True)]
    packed, scale = (torch.stack(parts) for parts in zip(*each, strict=True))
    values = formats.dequantize_nvfp4(packed, scale, shared[:, None, None], torch.float64)
    if E == 1:
        packed, scale = packed[0], scale[0]
    inputs = None if simulate else torch.full((1,), SCALE, device=device)
    return Made(weights.build("nvfp4", packed, scale, 128 / shared, shared=inputs), values)


def rounded(x: torch.Tensor, scale: float = SCALE) -> torch.Tensor:
    """The float64 values of rows as W4A4 serves them."""
    found = simulated.round_in_torch(x.cpu(), torch.tensor([scale])).double() / scale
    return found.to(x.device)


@pytest.fixture(params=["instruction", "decoded"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each build of the kernel that can run here, on any GPU."""
    native = request.param == "instruction"
    there = INTERPRETED or (GPU and targets.fp4_units(torch.device(DEVICE)))
    if native and not there:
        pytest.skip("no FP4 units")
    from fused_dequant.products import nvfp4_blackwell

    monkeypatch.setattr(nvfp4_blackwell, "fp4_units", lambda _: native)
    anywhere = replace(layouts.KERNELS[FOUR_BIT], least=(9, 0), fp4=False)
    monkeypatch.setitem(layouts.KERNELS, FOUR_BIT, anywhere)
    return request.param


SHAPES = [(1, 16, 16), (17, 144, 208), (64, 256, 192)]
REAL = [(256, N, K) for N, K in LINEAR_SHAPES] + [(1024, 2816, 2112), (7, 1408, 2816)]
# hidden, inner, experts, topk, tokens
ROUTED = [(64, 48, 8, 3, 1), (64, 48, 8, 3, 40), (80, 80, 4, 2, 9)]
REAL_ROUTED = [(HIDDEN, INNER, 128, 8, tokens) for tokens in (1, 64, 256, 1024)]


@cache
def experts_of(hidden: int, inner: int, experts: int) -> tuple[Made, Made]:
    """Gate and up, and down; made once."""
    return random_weight(experts, 2 * inner, hidden), random_weight(experts, hidden, inner, seed=5)


def experts_error(tokens: int, topk: int, up: Made, down: Made) -> float:
    """Error of routed experts, a quarter of them without tokens, one id out of range, to float64."""
    experts, _, hidden = up.weight.shape
    x = cases.random_tokens(tokens, hidden, DEVICE)
    used = max(topk, experts * 3 // 4)
    ids, share = cases.random_routing(tokens, experts, topk, DEVICE, used=used)
    ids[0, 0] = experts
    y = fd.routed_experts(x, None, ids, share, up.weight, down.weight)
    y = torch.where((ids < experts)[..., None], y, 0).double().sum(1)
    expected = reference.experts(
        x.double(), up.values, down.values, ids, share, torch.float64,
        activation=lambda rows: rounded(rows.to(torch.bfloat16)),
    )  # fmt: skip
    return relative_error(y, expected)


def linear_error(M: int, made: Made) -> float:
    x = cases.random_tokens(M, made.values.shape[2], DEVICE)
    return relative_error(fd.linear(x, made.weight), rounded(x) @ made.values[0].T)


def rows(count: int, width: int) -> torch.Tensor:
    """Rows of very different sizes, zeros of both signs, and values at and beside every tie."""
    x = cases.random_tokens(count, width, "cpu").float() * torch.logspace(-4, 3, count)[:, None]
    x[1] = 0
    x[1, ::3] = -0.0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[2, :8], x[2, 8:16] = ties, -ties
    return x.to(torch.bfloat16).to(DEVICE)


def same(found: fd.Activation, expected: fd.Activation) -> bool:
    """Whether all bits of codes and scales are equal."""
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8)) for a, b in pairs)


class TestOnTheQuantizer:
    pytestmark = MARKS

    @pytest.mark.parametrize("scale", [1.0, 300.7, 1e-3, 1e5])
    def test_codes_are_those_of_the_simulation(self, scale: float) -> None:
        x, shared = rows(40, 208), torch.tensor([scale])
        found = fd.quantize_rows(x, FOUR_BIT, shared.to(DEVICE))
        assert same(found, formats.quantize_nvfp4(x.cpu(), shared))
        values = formats.dequantize_nvfp4(found[0].cpu(), found[1].cpu(), torch.ones(1))
        simulation = simulated.round_nvfp4(x, shared.to(DEVICE))
        assert torch.equal(values, simulation.float().cpu())

    def test_a_block_with_nan_is_nan_alone(self) -> None:
        x, shared = rows(4, 64), torch.full((1,), SCALE, device=DEVICE)
        x[3, 20] = float("nan")
        _, scale = fd.quantize_rows(x, FOUR_BIT, shared)
        assert scale.float().isnan().nonzero().tolist() == [[3, 1]]

    def test_behind_the_activation_function(self) -> None:
        x, shared = rows(33, 2 * 80), torch.full((1,), SCALE, device=DEVICE)
        found = fd.quantize_rows(x, FOUR_BIT, shared, gelu_mul=True)
        assert same(found, fd.quantize_rows(fd.gelu_mul(x), FOUR_BIT, shared))

    @pytest.mark.parametrize(("M", "H"), [(3, 80), (5, 704)] if INTERPRETED else [(256, HIDDEN)])
    def test_behind_the_norms(self, M: int, H: int) -> None:
        """The codes of what the same kernels store in bf16; both branches under scales of their own."""
        one, other = (torch.full((1,), scale, device=DEVICE) for scale in (SCALE, 37.5))
        h, o, routed = random(M, H), random(M, H, seed=1), random(M, 2, H, seed=2)
        norms = tuple(random(H, seed=s) for s in range(3, 7))

        def after(*schemes: str) -> list[fd.Activation]:
            attended = fd.after_attention(h, o, norms, schemes[:2], shared=(one, other))
            scalars = random(1, seed=8), random(1, seed=9)
            joined = fd.after_experts(h, o, routed, norms, scalars, 2, schemes[2], shared=one)
            tokens = torch.arange(M, device=DEVICE)
            begun = fd.begin(tokens, h, 3.0, None, norms[0], 2, schemes[2], shared=other)
            return [attended[1], attended[2], joined[1], begun[1]]

        plain = [x for x, _ in after("bf16", "bf16", "bf16")]
        found = after(FOUR_BIT, FOUR_BIT, FOUR_BIT)
        for x, own, shared in zip(plain, found, (one, other, one, other), strict=True):
            assert same(own, fd.quantize_rows(x, FOUR_BIT, shared))


class TestOnTheKernel:
    pytestmark = MARKS

    @pytest.mark.parametrize(("M", "N", "K"), SHAPES if INTERPRETED else [*SHAPES, *REAL])
    def test_linear(self, build: str, M: int, N: int, K: int) -> None:
        error = linear_error(M, random_weight(1, N, K))
        print(f"w4a4 {build} linear {M}x{N}x{K}: {error:.2e}")
        assert error <= TOLERANCE

    @pytest.mark.parametrize(
        ("hidden", "inner", "experts", "topk", "tokens"),
        ROUTED if INTERPRETED else [*ROUTED, *REAL_ROUTED],
    )
    def test_experts(
        self, build: str, hidden: int, inner: int, experts: int, topk: int, tokens: int
    ) -> None:
        error = experts_error(tokens, topk, *experts_of(hidden, inner, experts))
        print(f"w4a4 {build} experts {hidden} {inner} {experts} {topk} {tokens}: {error:.2e}")
        assert error <= EXPERTS_TOLERANCE

    def test_one_expert_times_rows_that_are_quantized_already(self, build: str) -> None:
        """As a norm's kernel hands them out: the same bits as of bf16 rows."""
        up, down = (made.weight for made in experts_of(64, 48, 4))
        x = cases.random_tokens(40, 64, DEVICE)
        ids = torch.full((40, 1), 2, dtype=torch.int32, device=DEVICE)
        one = torch.ones(40, 1, device=DEVICE)
        quantized = fd.quantize_rows(x, FOUR_BIT, up.shared)
        y = fd.routed_experts(*quantized, ids, one, up, down)
        assert torch.equal(y, fd.routed_experts(x, None, ids, one, up, down))

    def test_a_damaged_token_damages_itself_alone(self, build: str) -> None:
        x = cases.random_tokens(17, 64, DEVICE)
        weight = random_weight(1, 64, 64).weight
        clean = fd.linear(x, weight)
        x[5, 7] = float("nan")
        damaged = fd.linear(x, weight)
        others = [i for i in range(17) if i != 5]
        assert damaged[5].isnan().all()
        assert torch.equal(damaged[others], clean[others])


MUTATIONS = {
    "a scale of the next row": (
        "weights.w4a4",
        "permute(0, 1, 4, 3, 2, 5)\n    return placed",
        "permute(0, 1, 4, 3, 2, 5).roll(1, 3)\n    return placed",
    ),
    "halves of a byte swapped": ("inputs.quantize", "low | high << 4", "high | low << 4"),
    "a scale of the next block": (
        "products.nvfp4_blackwell",
        "(K // 16) + group[None, :]",
        "(K // 16) + (group ^ 1)[None, :]",
    ),
    "no global scale": ("weights.weight", "factor / 128 / shared", "factor / 128"),
    "another expert": (
        "products.nvfp4_blackwell",
        "tl.load(block_expert + block)",
        "(tl.load(block_expert + block) ^ 1)",
    ),
}


def mutated(name: str, old: str, new: str, folder: Path) -> ModuleType:
    """Import a module of the kernels in which one piece of text is another."""
    original = Path(str(fd.__file__)).parent.joinpath(*name.split(".")).with_suffix(".py")
    source = original.read_text()
    assert source.count(old) == 1, f"{original} holds {old!r} {source.count(old)} times"
    path = folder / f"{name}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"mutated_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not INTERPRETED, reason="in the interpreter")
class TestMutations:
    pytestmark = MARKS

    @pytest.mark.parametrize("fault", MUTATIONS)
    def test_is_found(
        self, fault: str, build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What `test_linear` or `test_experts` measures is beyond its tolerance."""
        module = mutated(*MUTATIONS[fault], tmp_path)
        if hasattr(module, "fp4_units"):
            monkeypatch.setattr(module, "fp4_units", lambda _: build == "instruction")
        name = MUTATIONS[fault][0]
        original = importlib.import_module(f"fused_dequant.{name}")
        for function in ("to_tiles", "launch", "quantize_rows", "build"):
            if hasattr(module, function):
                monkeypatch.setattr(original, function, getattr(module, function))
                if hasattr(weights, function):  # the wing's face
                    monkeypatch.setattr(weights, function, getattr(module, function))
        if linear_error(17, random_weight(1, 144, 208)) <= 5 * TOLERANCE:
            error = experts_error(9, 2, *experts_of.__wrapped__(80, 80, 4))
            assert not error <= 5 * EXPERTS_TOLERANCE
