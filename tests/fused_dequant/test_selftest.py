"""The self-test: right on a CPU and on the GPU at hand, and it finds what is broken on purpose."""

import time

import pytest
import torch
from fused_dequant import reference
from fused_dequant.formats import FOUR_BIT
from fused_dequant.launch.targets import fp4_units
from fused_dequant.tune import cases, selftest
from kernels_support.device import GPU, MARKS

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
    said = "do not run here: ZeroDivisionError: division by zero"
    assert selftest.fault(scheme, torch.device("cpu")) == said


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

    def test_a_broken_kernel_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from fused_dequant.products import matmul

        right = matmul.launch
        monkeypatch.setattr(matmul, "launch", lambda *parts: right(*parts).roll(1, 0))
        assert "a relative error of 1." in str(selftest.fault("fp8", torch.device("cuda")))
