"""The self-test: right on a CPU and on the GPU at hand, and it finds what is broken on purpose."""

import itertools
import time
from typing import Any

import pytest
import torch
import triton
from fused_dequant import operations, reference
from fused_dequant.formats import FOUR_BIT
from fused_dequant.launch import dispatch
from fused_dequant.launch.targets import fp4_units
from fused_dequant.tune import cases, selftest, steptest

from tests.support.kernels_support.device import DEVICE, GPU, INTERPRETED, MARKS

SCHEMES = ["bf16", "fp8", "int8", "nvfp4", "mxfp4", "nvfp4_e4m3", FOUR_BIT]


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "HIDDEN", 128)
    monkeypatch.setattr(cases, "INNER", 64)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_in_torch_are_right(scheme: str) -> None:
    assert selftest.fault(scheme, torch.device("cpu")) is None


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("scheme", ["fp8", FOUR_BIT])
def test_a_fault_is_named(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "matmul_each", lambda x, w, rows: x @ w.T.roll(1, 1))
    assert "a relative error of 1." in str(selftest.fault(scheme, torch.device("cpu")))
    monkeypatch.setattr(selftest, "linear", lambda *_: torch.full((256, 4096), float("nan")))
    assert selftest.fault(scheme, torch.device("cpu")) == "are wrong: a relative error of nan"
    monkeypatch.setattr(selftest, "linear", lambda *_: 1 / 0)
    said = f"do not run with triton {triton.__version__}: ZeroDivisionError: division by zero"
    assert selftest.fault(scheme, torch.device("cpu")) == said


class TestBetweenProducts:
    pytestmark = MARKS

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if INTERPRETED:
            sizes = {"HIDDEN": 64, "INNER": 32, "EXPERTS": 8, "TOPK": 2}
            for module, numbers in {
                cases: sizes,
                steptest: {
                    "ROWS": 4,
                    "VOCABULARY": 256,
                    "CAPACITY": 128,
                    "HEADS": ((16, 1, 2),) * 2,
                },
            }.items():
                for name, number in numbers.items():
                    monkeypatch.setattr(module, name, number)

    @pytest.mark.parametrize("check", steptest.CHECKS)
    def test_kernels_compute_what_torch_computes(
        self, check: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        computed = list(steptest.CHECKS[check](steptest._Inputs(torch.device(DEVICE))))
        monkeypatch.setattr(dispatch, "interpreted", False)
        expected = list(steptest.CHECKS[check](steptest._Inputs(steptest.CPU)))
        for actual, right in zip(computed, expected, strict=True):
            error = reference.relative_error(actual.cpu(), right)
            assert error <= selftest.LARGEST_ERROR / 2


@pytest.mark.usefixtures("_small")
def test_a_fault_between_products_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU torch computes both sides: every second call, the expected one, is left alone."""
    for name, number in {"ROWS": 4, "VOCABULARY": 64, "CAPACITY": 128}.items():
        monkeypatch.setattr(steptest, name, number)
    assert steptest.fault(torch.device("cpu")) is None
    right, calls = operations.attend, itertools.count()

    def wrong(*arguments: Any) -> Any:
        rows, scale = right(*arguments)
        return (rows if next(calls) % 2 else rows.roll(1, 0)), scale

    monkeypatch.setattr(operations, "attend", wrong)
    said = str(steptest.fault(torch.device("cpu")))
    assert said.startswith("rows of attention in sliding layers are wrong: a relative error of ")
    monkeypatch.setattr(operations, "attend", lambda *_: 1 / 0)
    said = str(steptest.fault(torch.device("cpu")))
    assert f"sliding layers do not run with triton {triton.__version__}: ZeroDivision" in said


@pytest.mark.skipif(not GPU, reason="needs a GPU")
class TestOnTheGpu:
    pytestmark = MARKS

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_products_are_right_in_seconds(self, scheme: str) -> None:
        device = torch.device("cuda")
        if scheme == FOUR_BIT and not fp4_units(device):
            pytest.skip("no FP4 units")
        began = time.monotonic()
        error = selftest.relative_error(scheme, device)
        print(f"self-test {scheme}: {error:.1e}, {time.monotonic() - began:.1f} s")
        assert error <= selftest.LARGEST_ERROR / 2
        assert time.monotonic() - began < 60

    def test_all_between_products_is_right_in_seconds(self) -> None:
        began = time.monotonic()
        assert steptest.fault(torch.device("cuda")) is None
        print(f"between products: {time.monotonic() - began:.1f} s")
        assert time.monotonic() - began < 120

    def test_a_broken_kernel_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from fused_dequant.products import matmul

        right = matmul.launch
        monkeypatch.setattr(matmul, "launch", lambda *parts: right(*parts).roll(1, 0))
        assert "a relative error of 1." in str(selftest.fault("fp8", torch.device("cuda")))
