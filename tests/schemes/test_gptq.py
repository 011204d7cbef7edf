"""GPTQ on made-up layers: the loss it promises, the bytes it leaves, and llm-compressor's beside it."""

from dataclasses import replace

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from fused_dequant.formats import block_scale, unpack_e2m1
from torch import Tensor

from quantize.errors import QuantizeError
from quantize.schemes import gptq as module
from quantize.schemes.gptq import Rounded, energy, gptq, shrunk
from quantize.schemes.records import SCHEMES
from quantize.schemes.rounding import E2M1_GROUPS, Codes, global_scale
from tests.support.llm_compressor_oracle import llm_compressor

EXPERTS, OUT, IN = 3, 32, 96


def layer(seed: int = 0, inputs: int = IN) -> tuple[Tensor, Tensor]:
    """Return BF16 weights [E, out, in] and Hessians of correlated inputs, a few of them large."""
    g = torch.Generator().manual_seed(seed)
    weight = (torch.randn(EXPERTS, OUT, inputs, generator=g) * 0.05).bfloat16()
    mix = torch.eye(inputs) + torch.randn(inputs, inputs, generator=g) / inputs**0.5
    mix[:, :3] *= 8
    x = torch.randn(EXPERTS, 4 * inputs, inputs, generator=g) @ mix
    return weight, x.mT @ x / x.shape[1]


def rounded_nvfp4(weight: Tensor, hessian: Tensor) -> Rounded:
    return gptq(SCHEMES["NVFP4"], weight, hessian)


def in_float32(tensors: dict[str, Tensor]) -> Tensor:
    """Return codes times scales, not rounded to BF16 as a loader would."""
    scale = tensors["weight_scale"].float()
    if "weight" in tensors:
        return tensors["weight"].float() * scale
    scale = scale / tensors["weight_global_scale"][..., None]
    return unpack_e2m1(tensors["weight_packed"]) * scale.repeat_interleave(16, -1)


def oracle(scheme: str, weight: Tensor, hessian: Tensor) -> Tensor:
    """Return llm-compressor's GPTQ, dequantized, of the first expert."""
    quantize_weight = llm_compressor("modifiers.gptq.gptq_quantize").quantize_weight
    args = preset_name_to_scheme(scheme, ["Linear"]).weights
    assert args is not None
    ranges = SCHEMES[scheme].observe(weight[:1], "memoryless_minmax")
    shared = global_scale([ranges]) if scheme == "NVFP4" else None
    tensors = SCHEMES[scheme].quantize(weight[:1], ranges, shared, None)
    scale = tensors["weight_scale"].float()
    zero = torch.zeros_like(scale)
    done, _, fell_back = quantize_weight(
        weight[:1].float(), hessian[:1].clone(), scale, zero, shared, args
    )
    assert not fell_back.any()
    return done


@pytest.mark.parametrize("scheme", ["NVFP4", "FP8_DYNAMIC"])
def test_the_loss_is_not_above_llm_compressors(scheme: str) -> None:
    weight, hessian = layer()
    rounded = gptq(SCHEMES[scheme], weight, hessian)
    own = weight[:1].float()
    theirs = energy(own - oracle(scheme, weight, hessian), hessian[:1]) / energy(own, hessian[:1])
    assert theirs < rounded.nearest[0]  # the oracle is GPTQ, not rounding to nearest
    assert rounded.loss[0] <= theirs


def test_gptq_halves_the_loss_of_rounding_to_nearest() -> None:
    weight, hessian = layer()
    found = rounded_nvfp4(weight, hessian)
    assert (found.loss < found.nearest / 2).all()
    assert not found.fell_back.any()


@pytest.mark.parametrize("scheme", ["NVFP4", "FP8_DYNAMIC", "INT8_DYNAMIC"])
def test_the_reported_losses_are_those_of_the_bytes(scheme: str) -> None:
    """What a loader dequantizes has the loss that is reported, and nearest is the plain path's.

    592 inputs are two groups of columns for `energy`, and five spans for the slope that is left.
    """
    weight, hessian = layer(inputs=592)
    ranges = SCHEMES[scheme].observe(weight, "memoryless_minmax")
    rounded = gptq(SCHEMES[scheme], weight, hessian)
    plain = SCHEMES[scheme].quantize(weight, ranges, None, None)
    for tensors, loss in ((rounded.tensors, rounded.loss), (plain, rounded.nearest)):
        lost, whole = (
            torch.einsum("eoi,eij,eoj->e", x, hessian.double(), x)
            for x in (weight.double() - in_float32(tensors).double(), weight.double())
        )
        torch.testing.assert_close((lost / whole).float(), loss, rtol=1e-5, atol=0)


def test_coordinate_descent_never_raises_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = layer(1)
    losses = []
    for sweeps in (0, 1, 4):
        monkeypatch.setattr(module, "SWEEPS", sweeps)
        losses.append(rounded_nvfp4(weight, hessian).loss)
    assert (losses[1] < losses[0]).all()
    assert (losses[2] <= losses[1]).all()


@pytest.mark.parametrize("span", [16, 512])
def test_how_many_inputs_are_spread_together_changes_no_code(
    span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """320 inputs are three spans: errors and slopes reach the inputs of all of them."""
    weight, hessian = layer(inputs=320)
    expected = rounded_nvfp4(weight, hessian.clone()).tensors["weight_packed"]
    monkeypatch.setattr(module, "SPAN", span)
    assert torch.equal(rounded_nvfp4(weight, hessian).tensors["weight_packed"], expected)


def blocks(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights [1, rows, 16], the Hessian of their inputs [1, 16, 16], and a global scale [1]."""
    g = torch.Generator().manual_seed(0)
    weight, x = torch.randn(1, rows, 16, generator=g), torch.randn(1, 64, 16, generator=g)
    return weight, x.mT @ x / 64, torch.tensor([300.7])


def test_a_block_takes_the_scale_of_least_squared_error() -> None:
    """Of the neighbours of its usual scale, each tried alone: the sum of (error / U_ii)^2 decides."""
    weight, hessian, shared = blocks(rows=200)
    factor = torch.linalg.cholesky(hessian.inverse(), upper=True)

    def losses(grid: Codes, scales: Tensor) -> Tensor:
        codes, errors = torch.empty_like(weight), torch.empty_like(weight)
        module.round_block(weight, factor, shared, scales, codes, errors, grid)
        return errors.square().sum(-1)

    chosen = torch.empty(1, 200)
    found = losses(E2M1_GROUPS, chosen)
    usual = block_scale(weight.abs().amax(-1, keepdim=True).bfloat16(), shared[:, None, None])
    tried = module._near(usual[..., 0], E2M1_GROUPS.neighbours)
    alone = replace(E2M1_GROUPS, neighbours=0)
    each = torch.stack([losses(alone, scales) for scales in tried.unbind(-1)])
    torch.testing.assert_close(found, each.amin(0))
    assert len(chosen.div(usual[..., 0]).unique()) > 3


@pytest.mark.parametrize(("steps", "unit"), [(1, 1.0), (3, 2.0**-40)])
def test_descent_moves_a_scale_to_its_optimum(steps: int, unit: float) -> None:
    """Weights are codes times an e4m3 number, some steps above their block's scale, in any unit."""
    codes, hessian, shared = blocks(rows=50)
    hessian *= unit
    codes = E2M1_GROUPS.nearest(3 * codes)
    right = torch.tensor([1.0, 2.0, 9.0, 120.0, 256.0]).repeat(1, 10)
    scales = module._near(right, steps)[..., 0]
    values = [codes * (each / shared[:, None])[..., None] for each in (right, scales)]
    difference = values[0] - values[1]
    kept, moved = codes.clone(), torch.empty_like(codes)
    slope = difference @ hessian
    module.descend_block(slope, hessian, shared, scales, codes, moved, E2M1_GROUPS)
    assert torch.equal(scales, right)
    assert torch.equal(codes, kept)
    torch.testing.assert_close(moved, difference)


def test_a_diagonal_hessian_leaves_codes_at_the_nearest() -> None:
    """Nothing can be gained from other inputs' errors, so FP8 codes are those of plain rounding."""
    weight, _ = layer()
    hessian = torch.eye(IN).expand(EXPERTS, IN, IN)
    found = gptq(SCHEMES["FP8_DYNAMIC"], weight, hessian).tensors
    nearest = (weight.float() / found["weight_scale"].float()).to(torch.float8_e4m3fn)
    assert torch.equal(found["weight"].float(), nearest.float())


def test_experts_do_not_depend_on_each_other() -> None:
    weight, hessian = layer()
    together = rounded_nvfp4(weight, hessian).tensors
    alone = rounded_nvfp4(weight[1:2], hessian[1:2]).tensors
    for name, tensor in alone.items():
        assert torch.equal(tensor[0].view(torch.uint8), together[name][1].view(torch.uint8)), name


def test_a_hessian_without_a_factor_falls_back_to_the_nearest() -> None:
    weight, hessian = layer()
    hessian = hessian.clone()
    hessian[1] = -hessian[1]  # no positive definite matrix
    found = rounded_nvfp4(weight, hessian)
    assert found.fell_back.tolist() == [False, True, False]
    assert found.loss[1] == found.nearest[1]
    ranges = SCHEMES["NVFP4"].observe(weight, "memoryless_minmax")
    plain = SCHEMES["NVFP4"].quantize(weight, ranges, None, None)
    for name, tensor in found.tensors.items():
        assert torch.equal(tensor[1].view(torch.uint8), plain[name][1].view(torch.uint8)), name


def test_a_block_of_zeros_stays_zero() -> None:
    weight, hessian = layer()
    weight[0, :, :16] = 0
    values = SCHEMES["NVFP4"].dequantize(rounded_nvfp4(weight, hessian).tensors)
    assert values.isfinite().all()
    assert values[0].abs().sum() > 0


def test_few_tokens_lean_on_the_layers_mean() -> None:
    """Experts of 0, 1, 15 and many tokens: weight n / (n + in) stays with the own Hessian."""
    tokens = torch.tensor([0, 1, 15, 10_000])
    sums = torch.stack(
        [torch.eye(IN) * k * n for k, n in zip((0.0, 2.0, 3.0, 4.0), tokens, strict=True)]
    )
    mean = (2 * 1 + 3 * 15 + 4 * 10_000) / tokens.sum()
    found = shrunk(sums, tokens).diagonal(dim1=1, dim2=2)[:, 0]
    weight = tokens / (tokens + IN)
    expected = weight * torch.tensor([0.0, 2.0, 3.0, 4.0]) + (1 - weight) * mean
    torch.testing.assert_close(found, expected)
    for at in (slice(0, 2), slice(2, 4)):  # some experts of a layer, drawn to the mean of all
        assert torch.equal(shrunk(sums, tokens, at), shrunk(sums, tokens)[at])


def test_the_factor_is_that_of_the_inverse() -> None:
    """U is upper, U^T U the inverse of the damped Hessian, and that is left in its place."""
    _, hessian = layer()
    damped = hessian.clone()
    factor, singular = module._factored(damped)
    mean = hessian.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
    torch.testing.assert_close(damped, hessian + module.DAMPING * mean * torch.eye(IN))
    assert torch.equal(factor, factor.triu())
    assert not singular.any()
    found = damped.double() @ (factor.mT.double() @ factor.double())
    torch.testing.assert_close(found, torch.eye(IN).double().expand_as(found), atol=1e-5, rtol=0)


def test_a_factor_is_inverted_block_by_block() -> None:
    """90 inputs are blocks of 22 and 23. Matrices without a factor show it in any of their blocks."""
    _, hessian = layer(inputs=90)
    good = hessian + torch.eye(90)
    bad = good[:1].repeat(5, 1, 1)
    for matrix, at in zip(bad[:4], (0, 30, 50, 89), strict=True):
        matrix[at, at] = -1
    bad[4] = torch.nan
    found, failed = module._upper(torch.cat([good[:1], bad, good[1:]]), leaf=25)
    assert failed.tolist() == [False, *[True] * 5, False, False]
    assert torch.equal(found[1:6], torch.eye(90).double().expand(5, -1, -1))
    whole = module._upper(good, leaf=90)[0]
    torch.testing.assert_close(found[[0, 6, 7]], whole, rtol=1e-9, atol=1e-12)


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are in one order, and the factorisation, whose order threads change, has one thread."""
    before, threads, losses = torch.get_num_threads(), [], []
    real = torch.linalg.cholesky_ex
    monkeypatch.setattr(
        torch.linalg, "cholesky_ex", lambda x: (threads.append(torch.get_num_threads()), real(x))[1]
    )
    x, hessian = torch.rand(1, 300, 640), torch.rand(1, 640, 640)
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        losses.append(energy(x - 0.9 * x.round(decimals=1), hessian).item())
        module._factored(torch.eye(32)[None])
        assert torch.get_num_threads() == count
    torch.set_num_threads(before)
    assert threads == [1, 1, 1]
    assert losses == losses[:1] * 3


def test_the_hessian_is_left_as_it_was() -> None:
    weight, hessian = layer()
    before = hessian.clone()
    rounded_nvfp4(weight, hessian)
    assert torch.equal(hessian, before)


def test_unseen_and_broken_hessians_are_named() -> None:
    hessians = torch.eye(IN).repeat(4, 1, 1)
    with pytest.raises(QuantizeError, match="no token was seen"):
        shrunk(hessians, torch.zeros(3))
    hessians[2:, 0, 0] = float("nan")  # the first is named
    for at in (slice(None), slice(1, 4)):
        with pytest.raises(QuantizeError, match="expert 2 is not finite"):
            shrunk(hessians, torch.ones(4), at)
