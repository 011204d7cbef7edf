"""Inputs rounded as W4A4 serves them: the numbers of the scheme's own record, bit for bit."""

from dataclasses import replace

import pytest
import torch
from fused_dequant import reference, simulated, weights
from fused_dequant.launch import dispatch
from fused_dequant.tune import cases

from tests.support.activations import round_groups
from tests.support.kernels_support.device import DEVICE, INTERPRETED, MARKS


def rows(count: int, width: int) -> torch.Tensor:
    """Rows of very different sizes, a row of zeros, and values at and beside every tie."""
    x = cases.random_tokens(count, width, "cpu").float() * torch.logspace(-4, 3, count)[:, None]
    x[1] = 0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[2, :8], x[2, 8:16] = ties, -ties
    return x.to(torch.bfloat16)


@pytest.mark.parametrize("scale", [1.0, 448.0, 300.7, 1e-3, 1e5])
def test_rows_are_those_of_the_scheme(scale: float) -> None:
    x = rows(40, 208)
    found = simulated.round_nvfp4(x, torch.tensor([scale]))
    codes = found.float().unflatten(-1, (-1, 16))
    expected = round_groups(x.float(), scale).unflatten(-1, (-1, 16))
    # What is stored lacks the division by the global scale: the scheme rounds that once more.
    torch.testing.assert_close(codes / scale, expected, rtol=2e-7, atol=0)
    assert torch.equal(codes == 0, expected == 0)


def test_every_expert_has_its_own_scale() -> None:
    x, scales = rows(6, 64), torch.tensor([3.0, 700.0, 40.0])
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [2, 1], [1, 0]], dtype=torch.int32)
    found = simulated.round_nvfp4(x, scales, ids).view(6, 2, 64)
    for token in range(6):
        for choice in range(2):
            alone = simulated.round_nvfp4(x[token, None], scales[ids[token, choice], None])
            assert torch.equal(found[token, choice], alone[0])


def test_a_nan_stays_one() -> None:
    x = rows(4, 32)
    x[0, 3] = float("nan")
    assert simulated.round_nvfp4(x, torch.ones(1))[0, 3].isnan()


def weight(E: int, N: int, K: int, scheme: str = "nvfp4") -> weights.Weight:
    return cases.random_weight(scheme, E, N, K, "cpu")


@pytest.mark.parametrize("shared", [False, True])
def test_experts_multiply_rounded_inputs(shared: bool) -> None:
    """Against one expert after the other in float64, with the scheme's own rounding."""
    M, H, inner, E = 24, 64, 48, 4
    x, up, down = cases.random_tokens(M, H, "cpu"), weight(E, 2 * inner, H), weight(E, H, inner)
    ids = torch.stack([torch.randperm(E)[:2] for _ in range(M)]).int()
    routing = torch.rand(M, 2)
    scales = (torch.tensor([500.0, 90.0, 1200.0, 33.0]), torch.tensor([60.0, 40.0, 11.0, 300.0]))
    if shared:
        scales = (scales[0][:1], scales[1][:1])
    shown: list[torch.Tensor] = []
    found = simulated.experts(x, ids, routing, up, down, scales, shown.append)
    expected = torch.zeros(M, H, dtype=torch.float64)
    ups, downs = weights.dequantize(up, torch.float64), weights.dequantize(down, torch.float64)
    hidden = torch.zeros(M, 2, inner)
    for token in range(M):
        for choice, expert in enumerate(ids[token].tolist()):
            a, b = (scale[0 if shared else expert].item() for scale in scales)
            runs = (round_groups(x[token].float(), a).double() @ ups[expert].T).unflatten(
                -1, (-1, 2, 8)
            )
            active = reference.gelu_mul(*runs.unbind(-2)).flatten(-2)
            hidden[token, choice] = active.to(torch.bfloat16)  # as the kernels store it
            y = round_groups(hidden[token, choice], b).double() @ downs[expert].T
            expected[token] += y * routing[token, choice]
    assert reference.relative_error(found.sum(1), expected) < 4e-3
    torch.testing.assert_close(shown[0].view(M, 2, inner).float(), hidden, rtol=2**-7, atol=1e-5)
    assert (shown[0].view(M, 2, inner).float() == hidden).float().mean() > 0.99


@pytest.mark.parametrize("experts", [1, simulated.EXPERTS_AT_ONCE + 3])
def test_a_weight_of_8_bits_becomes_bf16(experts: int) -> None:
    eight = weight(experts, 32, 64, "fp8")
    found = simulated.plain(eight)
    assert found.scheme == "bf16"
    expected = weights.dequantize(eight, torch.float32).to(torch.bfloat16)
    assert torch.equal(found.data, expected)


class TestOnTheKernels:
    pytestmark = MARKS

    @pytest.mark.parametrize("scale", [1.0, 300.7, 1e-3, 1e5])
    def test_rows_are_those_of_torch(self, scale: float) -> None:
        x, one = rows(12, 208), torch.tensor([scale])
        found = simulated.round_nvfp4(x.to(DEVICE), one.to(DEVICE))
        assert torch.equal(found.cpu(), simulated.round_in_torch(x, one))
        scales, ids = torch.tensor([3.0, scale]), torch.tensor([[0, 1]] * 12, dtype=torch.int32)
        found = simulated.round_nvfp4(x.to(DEVICE), scales.to(DEVICE), ids.to(DEVICE))
        assert torch.equal(found.cpu(), simulated.round_in_torch(x, scales, ids))

    @pytest.mark.parametrize("shared", [False, True])
    def test_experts_are_those_of_torch(
        self, shared: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        M, H, inner, E, topk = (24, 64, 48, 4, 2) if INTERPRETED else (256, 2816, 704, 16, 8)
        x, shapes = cases.random_tokens(M, H, "cpu"), ((2 * inner, H), (H, inner))
        up, down = (cases.random_weight("nvfp4", E, *shape, DEVICE) for shape in shapes)
        ids = torch.stack([torch.randperm(E)[:topk] for _ in range(M)]).int()
        routing = torch.rand(M, topk)
        own = 1 if shared else E
        scales = (torch.full((own,), 600.0), torch.full((own,), 200.0))
        found = simulated.experts(
            x.to(DEVICE), ids.to(DEVICE), routing.to(DEVICE), up, down,
            (scales[0].to(DEVICE), scales[1].to(DEVICE)),
        )  # fmt: skip
        monkeypatch.setattr(dispatch, "interpreted", False)
        up, down = (
            replace(own, **{name: getattr(own, name).cpu() for name in ("data", "scale", "factor")})
            for own in (up, down)
        )
        expected = simulated.experts(x, ids, routing, up, down, scales)
        assert reference.relative_error(found.cpu(), expected) < 1e-2
