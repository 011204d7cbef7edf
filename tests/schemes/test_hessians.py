"""Hessians of what observers see: sums and tokens of every expert, and rows that wait for a kernel."""

from typing import Any

import pytest
import torch
from fused_dequant.gptq import gram
from torch import Tensor

from quantize.schemes import hessians as module
from quantize.schemes.hessians import PASSES, TILE, Hessians, tiles_of, whole


@pytest.mark.parametrize(("inputs", "experts"), [(96, None), (300, None), (300, 4), (8, 300)])
def test_sums_and_tokens_are_those_of_each_experts_rows(inputs: int, experts: int | None) -> None:
    """Three passes; an expert's two inputs share their choices, and another input has its own."""
    g = torch.Generator().manual_seed(0)
    found = Hessians(["up", "down", "other"], experts or 0)
    rows: dict[str, list[Tensor]] = {"up": [], "down": [], "other": []}
    ids: dict[str, list[Tensor]] = {"up": [], "down": [], "other": []}
    for _ in range(3):
        one, two = (torch.rand(7, experts or 1, generator=g).argsort(1)[:, :2] for _ in range(2))
        for name, chosen in (("up", one), ("down", one), ("other", two)):
            rows[name].append(torch.randn(7, inputs, generator=g))
            ids[name].append(chosen)
            found.see(name, rows[name][-1], chosen if experts else None)
    found.see("unasked", rows["up"][0], None)
    for name, own in rows.items():
        x, chosen = torch.cat(own), torch.cat(ids[name])
        each = [x[(chosen == e).any(1)] for e in range(experts or 1)]
        assert found.tokens(name).tolist() == [len(x) for x in each]
        assert found.sums(name).shape == (len(each), tiles_of(inputs), TILE, TILE)
        wanted = torch.stack([x.T.double() @ x.double() for x in each])
        # float32 sums of at most 21 products, each below 20
        torch.testing.assert_close(
            whole(found.sums(name), found._inputs[name]).double(),
            wanted,
            rtol=0,
            atol=21 * 20 * 2**-24,
        )


def test_rows_wait_for_a_kernel_until_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight passes, or as many bytes as are allowed; what is asked for does not wait."""
    added: list[Any] = []
    monkeypatch.setattr(module, "_in_kernels", lambda _: True)
    monkeypatch.setattr(
        gram, "add", lambda tiles, x, order, starts, topk: added.append((*tiles.shape, *x.shape))
    )
    found, x = Hessians(["a"], 1), torch.ones(4, 8)
    for _ in range(PASSES + 1):
        found.see("a", x, None)
    assert added == [(1, 1, TILE, TILE, 4 * PASSES, 8)]
    assert found.tokens("a").tolist() == [4 * (PASSES + 1)]
    monkeypatch.setattr(module, "PASSES_BYTES", 2 * x.nbytes)
    for _ in range(3):
        found.see("a", x, None)
    assert [rows for *_, rows, _ in added[1:]] == [4, 8]


def test_rows_that_no_kernel_adds_do_not_wait() -> None:
    found = Hessians(["a"], 1)
    found.see("a", torch.ones(4, 8), None)
    assert not found._waiting


@pytest.mark.parametrize("inputs", [128, 300])
def test_a_hessian_is_symmetric_though_its_tiles_are_not(inputs: int) -> None:
    """Some BLAS kernels sum a product and its mirror image differently: the upper half counts."""
    tiles = torch.rand(2, tiles_of(inputs), TILE, TILE)
    found = whole(tiles, inputs)
    assert torch.equal(found, found.mT)
    assert torch.equal(found[:, :128, :128].triu(), tiles[:, 0].triu())
    if inputs > 256:
        assert torch.equal(found[:, :128, 256:], tiles[:, 3, :, : inputs - 256])  # as they were
