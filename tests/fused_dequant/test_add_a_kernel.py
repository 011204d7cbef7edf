"""CONTRIBUTING.md's "Add a kernel", walked: a kernel for NVFP4 on sm_100 that is not there.

Its module, its record in KERNELS and its place in PREFERRED are all that is added. Its fourth file is
test_compile.py, which finds the launches of a kernel by itself, and fails for one without an operand.
"""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import fused_dequant as fd
import pytest
import torch
from fused_dequant import weights
from fused_dequant.launch import dispatch
from fused_dequant.tune import cases, selftest
from fused_dequant.tune.candidates import candidates, products
from fused_dequant.weights import weight as weight_module
from fused_dequant.weights.choose import PREFERRED, layout_for, plainer
from fused_dequant.weights.layouts import KERNELS

NEW, B200 = "nvfp4_swapped", (10, 0)  # the layout: the halves of each byte swapped


def swapped(codes: torch.Tensor) -> torch.Tensor:
    return codes >> 4 | codes << 4


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Add the kernel; return the configurations with which it is launched."""
    configurations: list[dict[str, int]] = []
    module = ModuleType("fused_dequant.products.nvfp4_swapped")

    def launch(
        weight: Any, x: torch.Tensor, _: object, config: dict[str, int], *rest: object
    ) -> Any:
        configurations.append(config)
        return (x.float() @ weights.dequantize(weight)[0].T).to(torch.bfloat16)

    module.launch = launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    plain = KERNELS["nvfp4"]
    record = replace(
        plain,
        module="nvfp4_swapped",
        least=B200,
        alone=True,
        decode=lambda data, scale, dtype: plain.decode(swapped(data), scale, dtype),
        rounded=None,
        lay_out=lambda data, blocks, factor: (swapped(data), blocks, factor.contiguous()),
    )
    monkeypatch.setitem(KERNELS, NEW, record)
    monkeypatch.setitem(PREFERRED, ("nvfp4", None), (NEW, *PREFERRED["nvfp4", None]))
    monkeypatch.setattr(dispatch, "distrusted", set())
    return configurations


def test_a_record_and_a_place_are_all_that_a_kernel_needs(
    launched: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert layout_for("nvfp4", None, B200) == NEW
    assert layout_for("nvfp4", None, (9, 0)) == "nvfp4_fragments"
    assert layout_for("nvfp4", None, None) == layout_for("nvfp4", None, (8, 0)) == "nvfp4"
    before = cases.random_weight("nvfp4", 1, 64, 128, "cpu")
    monkeypatch.setattr(weight_module, "target_of", lambda _: B200)
    weight = cases.random_weight(NEW, 1, 64, 128, "cpu")
    assert weight.scheme == NEW
    assert torch.equal(weights.dequantize(weight), weights.dequantize(before))
    assert selftest.fault("bf16", torch.device("cpu")) is None
    x = cases.random_tokens(16, 128, "cpu")
    y = fd.linear(x, weight)  # torch, on a CPU
    assert not launched
    monkeypatch.setattr(weight_module, "launches", lambda _: True)
    torch.testing.assert_close(fd.linear(x, weight), y)
    assert [set(config) for config in launched] == [set(weight.config("linear", 16))]


def test_it_is_tuned_and_gives_way_where_it_is_wrong(launched: list[dict[str, int]]) -> None:
    tuned = [product for product in products(B200) if product.scheme == NEW]
    assert {product.verb for product in tuned} == {"linear", "experts_up", "experts_down"}
    assert len(list(candidates(tuned[0], B200))) > 5
    assert not [product for product in products((9, 0)) if product.scheme == NEW]
    assert plainer(NEW)
    dispatch.distrusted.add(NEW)
    assert layout_for("nvfp4", None, B200) == "nvfp4"
    assert not launched
