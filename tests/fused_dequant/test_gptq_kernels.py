"""The kernels of GPTQ beside the torch functions they stand for: codes, scales, errors and losses.

In the interpreter both compute alike, so all but ties of sums in another order is equal. A GPU
contracts products and sums, so a few codes near a tie differ, and later ones with them; the loss
hardly does.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from fused_dequant.launch import dispatch
from fused_dequant.tune import cases, selftest
from torch import Tensor

from quantize.runtime.gpu import gptqtest
from quantize.schemes import gptq
from quantize.schemes.gptq import add_product, descend_span, round_block
from quantize.schemes.hessians import Hessians, whole
from quantize.schemes.records import SCHEMES
from quantize.schemes.rounding import (
    E2M1_GROUPS,
    E4M3_ROWS,
    INT8_ROWS,
    Codes,
    block_scale,
)
from quantize.stages.memory_needs import rounding_bytes
from tests.support.kernels_support.device import DEVICE, INTERPRETED, MARKS

GRIDS = {codes.name: codes for codes in (E2M1_GROUPS, E4M3_ROWS, INT8_ROWS)}
LAYERS = [(1, 24, 32)] if INTERPRETED else [(2, 96, 336), (8, 704, 2816), (1, 4224, 2112)]


def layer(experts: int, out: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Return BF16 weights [E, out, in] with a block of zeros, and Hessians of correlated inputs."""
    g = torch.Generator().manual_seed(out)
    weight = (torch.randn(experts, out, inputs, generator=g) * 0.05).bfloat16()
    weight[0, 1, :16] = 0
    mix = torch.eye(inputs) + torch.randn(inputs, inputs, generator=g) / inputs**0.5
    mix[:, :3] *= 8
    x = torch.randn(experts, 2 * inputs, inputs, generator=g) @ mix
    return weight, x.mT @ x / x.shape[1]


def block(grid: Codes, out: int) -> dict[str, Tensor]:
    """Return the arguments of a block's functions: 3 experts, one of them with tiny weights."""
    g = torch.Generator().manual_seed(out)
    weight = torch.randn(3, out, 16, generator=g) * torch.tensor([0.05, 1e-6, 3.0])[:, None, None]
    weight[2, 0] = 0
    x = torch.randn(3, 64, 16, generator=g)
    hessian = x.mT @ x / 64
    factor = torch.linalg.cholesky(hessian.inverse(), upper=True)
    shared = torch.tensor([7000.0, 9e5, 300.7]) if grid.neighbours else torch.ones(3)
    largest = weight.abs().amax(-1)
    usual = largest / {"e4m3": 448, "int8": 127.5}.get(grid.name, 6) + 1e-9
    if grid.neighbours:
        usual = block_scale(largest.bfloat16()[..., None], shared[:, None, None])[..., 0]
    return {"weight": weight, "factor": factor, "shared": shared, "scales": usual}


def within(part: Tensor, device: str) -> Tensor:
    """Return a copy of [..., n] that lies in the columns of a larger matrix, in the middle of it."""
    columns = part.shape[-1]
    wide = torch.full((*part.shape[:-1], columns + 24), torch.nan, device=device)
    wide[..., 12 : 12 + columns] = part.to(device)
    return wide[..., 12 : 12 + columns]


def run(grid: Codes, given: dict[str, Tensor], device: str) -> list[Tensor]:
    """Round a block: scales, codes, errors."""
    own = {name: tensor.to(device, copy=True) for name, tensor in given.items()}
    codes, errors = (within(torch.zeros_like(given["weight"]), device) for _ in range(2))
    weight, factor = (within(given[name], device) for name in ("weight", "factor"))
    round_block(weight, factor, own["shared"], own["scales"], codes, errors, grid)
    return [each.cpu() for each in (own["scales"], codes, errors)]


def span(grid: Codes, out: int) -> dict[str, Tensor]:
    """Return the arguments of a span's function: three blocks of 3 experts, rounded to the nearest."""
    given = block(grid, out)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(3, 96, 48, generator=g) @ (torch.eye(48) + torch.randn(48, 48, generator=g) / 7)
    hessian, weight = x.mT @ x / 96, given["weight"].repeat(1, 1, 3)
    scales, shared = given["scales"][..., None].repeat(1, 1, 3), given["shared"]
    step = (scales / shared[:, None, None]).repeat_interleave(16, -1)
    codes = grid.nearest(weight / step)
    slope = (weight - codes * step) @ hessian
    slope += torch.randn(slope.shape, generator=g) * slope.std((1, 2), keepdim=True)
    return {"slope": slope, "hessian": hessian, "shared": shared, "scales": scales, "codes": codes}


def descend(grid: Codes, given: dict[str, Tensor], device: str) -> list[Tensor]:
    """Move a span: scales, codes, moves."""
    shared, scales = (given[name].to(device, copy=True) for name in ("shared", "scales"))
    slope, hessian, codes = (within(given[name], device) for name in ("slope", "hessian", "codes"))
    moved = within(torch.full_like(given["codes"], torch.nan), device)
    descend_span(slope, hessian, shared, scales, codes, moved, grid)
    assert torch.equal(slope.cpu(), given["slope"])
    found = [each.cpu() for each in (scales, codes, moved)]
    stays = (found[0] == given["scales"]).repeat_interleave(16, -1) & (found[1] == given["codes"])
    assert (found[2][stays] == 0).all()
    assert 0.1 < stays.float().mean() < 0.9
    return found


def in_its_room(arguments: tuple[Any, ...], experts: int, out: int, inputs: int) -> gptq.Rounded:
    """Run GPTQ, which takes no more of a GPU's memory than `rounding_bytes` says."""
    if INTERPRETED:
        return gptq.gptq(*arguments)
    torch.cuda.current_blas_handle()  # takes a workspace, once in a process
    free = torch.cuda.memory_allocated() - sum(x.nbytes for x in arguments[1:3])
    torch.cuda.reset_peak_memory_stats()
    found = gptq.gptq(*arguments)
    if inputs > gptq.LEAF:  # else memory is too little to be counted
        taken = torch.cuda.max_memory_allocated() - free
        assert 0.5 < taken / rounding_bytes(experts, out, inputs) <= 1
    return found


class TestOnTheKernels:
    pytestmark = MARKS

    @pytest.mark.parametrize("kind", GRIDS)
    @pytest.mark.parametrize("moves", [False, True], ids=["a block is rounded", "a span is moved"])
    def test_codes_and_scales_are_those_of_torch(
        self, kind: str, moves: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        grid = GRIDS[kind]
        if INTERPRETED:  # the layers below try them all
            grid = replace(grid, neighbours=min(grid.neighbours, 1))
        work, given = (descend, span) if moves else (run, block)
        own = given(grid, out=70)  # more than a program's rows
        found = work(grid, own, DEVICE)
        monkeypatch.setattr(dispatch, "interpreted", False)
        for mine, theirs in zip(found, work(grid, own, "cpu"), strict=True):
            same = torch.isclose(mine, theirs, rtol=1e-4, atol=1e-6 * theirs.abs().max().item())
            assert same.float().mean() > (0.999 if INTERPRETED else 0.99)

    @pytest.mark.parametrize("scheme", ["NVFP4", "FP8_DYNAMIC", "INT8_DYNAMIC"])
    @pytest.mark.parametrize(("experts", "out", "inputs"), LAYERS)
    def test_a_layer_is_rounded_as_by_torch(
        self, scheme: str, experts: int, out: int, inputs: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gptq, "SWEEPS", 1 if INTERPRETED else gptq.SWEEPS)
        weight, hessian = layer(experts, out, inputs)
        given = [each.to(DEVICE, copy=True) for each in (weight, hessian)]
        arguments = (SCHEMES[scheme], *given)
        found = in_its_room(arguments, experts, out, inputs)
        for mine, before in zip(given, (weight, hessian), strict=True):
            assert torch.equal(mine.cpu(), before)
        again = found if INTERPRETED else gptq.gptq(*arguments)  # there programs run in one order
        monkeypatch.setattr(dispatch, "interpreted", False)
        few = slice(0, 1)  # torch takes long on a CPU
        expected = gptq.gptq(SCHEMES[scheme], weight[few], hessian[few])
        torch.testing.assert_close(found.nearest[few].cpu(), expected.nearest, rtol=1e-4, atol=0)
        limit = 1e-4 if INTERPRETED else 5e-3
        torch.testing.assert_close(found.loss[few].cpu(), expected.loss, rtol=limit, atol=0)
        for name, tensor in found.tensors.items():
            bits = tensor.view(torch.uint8)
            assert torch.equal(bits, again.tensors[name].view(torch.uint8)), name
            if INTERPRETED:
                same = bits[few] == expected.tensors[name].view(torch.uint8)
                assert same.float().mean() > 0.999, name

    def test_without_a_factor_an_expert_is_rounded_to_nearest(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Three Hessians are factored together. One has no factor, and the results of others stay."""
        monkeypatch.setattr(gptq, "SWEEPS", 1 if INTERPRETED else gptq.SWEEPS)
        weight, hessian = (x.to(DEVICE) for x in layer(3, 24, 32 if INTERPRETED else 800))
        scheme = SCHEMES["FP8_DYNAMIC"]
        whole = gptq.gptq(scheme, weight, hessian)
        hessian[1, -1, -2] = hessian[1, -2, -1] = 10 * hessian[1].diagonal().max()  # not definite
        found = gptq.gptq(scheme, weight, hessian)
        assert not whole.fell_back.any()
        assert found.fell_back.tolist() == [False, True, False]
        assert found.loss[1] == found.nearest[1]
        plain = scheme.quantize(weight, scheme.observe(weight, "memoryless_minmax"), None, None)
        mine, nearest = (x["weight"].view(torch.uint8) for x in (found.tensors, plain))
        assert torch.equal(mine[1], nearest[1])
        assert not torch.equal(mine[0], nearest[0])
        torch.testing.assert_close(found.loss[::2], whole.loss[::2], rtol=1e-3, atol=0)

    def test_the_self_test_finds_no_fault(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if INTERPRETED:  # the second side only, which stands for the GPU's
            sides, losses = itertools.count(), gptqtest._losses

            def on_its_side(*arguments: Any) -> tuple[Tensor, Tensor]:
                monkeypatch.setattr(dispatch, "interpreted", next(sides) == 1)
                return losses(*arguments)

            monkeypatch.setattr(gptqtest, "_losses", on_its_side)
            monkeypatch.setattr(gptqtest, "OUT", 8)
            monkeypatch.setattr(cases, "INNER", 32)
            monkeypatch.setattr(gptq, "SWEEPS", 1)
        error = gptqtest.relative_error(SCHEMES["FP8_DYNAMIC"], torch.device(DEVICE))
        assert 0 < error < selftest.LARGEST_ERROR / 2

    @pytest.mark.parametrize("transposed", [False, True])
    def test_products_are_as_exact_as_in_float32(self, transposed: bool) -> None:
        """Into columns of a larger matrix, more rows and columns than tiles have; K is 0, 48 or 300."""
        g = torch.Generator().manual_seed(0)
        wide = torch.randn(2, 150, 200, generator=g)
        for inputs in (0, 48, 300):
            left = torch.randn(2, 150, 320, generator=g)[..., 10 : 10 + inputs]
            right = torch.randn(2, inputs, 130, generator=g)
            found = wide.to(DEVICE, copy=True)
            moved = right.to(DEVICE)
            moved = moved.mT.contiguous().mT if transposed else moved
            add_product(found[..., 40:170], left.to(DEVICE), moved, -2)
            expected = wide.double()
            expected[..., 40:170] -= 2 * left.double() @ right.double()
            error = (found.cpu().double() - expected).abs()[..., 40:170]
            size = wide.abs()[..., 40:170] + 2 * left.abs() @ right.abs()
            assert (error / size).max() < 2.0**-21
            assert torch.equal(found.cpu()[..., :40], wide[..., :40])
            assert torch.equal(found.cpu()[..., 170:], wide[..., 170:])

    @pytest.mark.parametrize("topk", [None, 1, 3])
    def test_hessians_are_those_of_torch(
        self, topk: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rows of three blocks, the last of them not full; an expert without rows, two passes."""
        g = torch.Generator().manual_seed(3)
        rows = torch.randn(2, 150, 300, generator=g).bfloat16()
        ids = torch.rand(2, 150, 6, generator=g).topk(topk or 1).indices
        ids[ids == 4] = 5
        sums: list[Tensor] = []
        for device in (DEVICE, "cpu"):
            hessians = Hessians(["a"], 7)
            for x, own in zip(rows, ids, strict=True):
                hessians.see("a", x.to(device), own.to(device) if topk else None)
            sums.append(whole(hessians.sums("a"), hessians._inputs["a"]).cpu())
            counts = ids.flatten().bincount(minlength=7).tolist() if topk else [300]
            assert hessians.tokens("a").tolist() == counts
            monkeypatch.setattr(dispatch, "interpreted", False)
        torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-4)
        assert torch.equal(sums[0], sums[0].mT)
        x, chosen = rows.flatten(0, 1).double(), ids.flatten(0, 1)
        for expert, found in enumerate(sums[0]):
            weight = (chosen == expert).sum(-1).double() if topk else torch.ones(300).double()
            expected = (x * weight[:, None]).T @ x
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
