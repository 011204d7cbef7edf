"""Norms, residual sums and routing against the references, on a GPU or in Triton's interpreter."""

import fused_dequant as fd
import pytest
import torch
from fused_dequant import formats, reference
from fused_dequant.layer import router
from fused_dequant.reference import relative_error

from tests.support.kernels_support.device import DEVICE, INTERPRETED, MARKS, random

pytestmark = MARKS
SHAPES = [(3, 80), (5, 704)] if INTERPRETED else [(3, 80), (256, 2816), (1024, 2816)]
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
EPS = 1e-6
TOLERANCE = (
    1e-3  # both round to bf16 at the same places; sums in another order move a few roundings
)


def assert_activation(codes, scale, expected: torch.Tensor, scheme: str) -> None:
    if scheme == "bf16":
        assert relative_error(codes, expected) <= TOLERANCE
        return
    wanted, wanted_scale = formats.quantize_rows(expected, DTYPES[scheme])
    assert relative_error(scale, wanted_scale) <= 4e-3
    error = relative_error(codes.float() * scale[:, None], wanted.float() * wanted_scale[:, None])
    assert error <= 8e-3  # where a bf16 rounding moved, a code moves too


@pytest.mark.parametrize("schemes", [("bf16", "int8"), ("fp8", "fp8"), ("int8", "bf16")])
@pytest.mark.parametrize(("M", "H"), SHAPES)
def test_after_attention(M: int, H: int, schemes: tuple[str, str]) -> None:
    h, o = random(M, H) * 2, random(M, H, seed=1)
    norms = tuple(random(H, seed=s) for s in range(2, 6))
    wanted_h, dense, experts, router = reference.after_attention(h, o, norms, EPS)
    out, x_dense, x_experts, x_router = fd.after_attention(h, o, norms, schemes, EPS)
    assert_activation(*x_dense, dense, schemes[0])
    assert_activation(*x_experts, experts, schemes[1])
    assert relative_error(out, wanted_h) <= TOLERANCE
    assert relative_error(x_router, router) <= TOLERANCE


@pytest.mark.parametrize(("scheme", "choices"), [("bf16", 1), ("fp8", 8), ("int8", 3)])
@pytest.mark.parametrize(("M", "H"), SHAPES)
def test_after_experts(M: int, H: int, scheme: str, choices: int) -> None:
    h, dense, routed = random(M, H) * 2, random(M, H, seed=1), random(M, choices, H, seed=2) * 9
    norms = tuple(random(H, seed=s) for s in range(3, 7))
    scalars = torch.tensor([[0.2041], [0.7]], dtype=torch.bfloat16, device=DEVICE).unbind()
    for decoded in (0, M // 2, M):  # rows of the decoder, which come first
        args = (h, dense, routed, norms, scalars, decoded)
        wanted, x_wanted = reference.after_experts(*args, EPS)
        out, x = fd.after_experts(*args, scheme, EPS)
        assert relative_error(out, wanted) <= TOLERANCE
        assert_activation(*x, x_wanted, scheme)


@pytest.mark.parametrize("scheme", DTYPES)
@pytest.mark.parametrize(("updated", "decoded"), [(False, 0), (False, 5), (True, 5), (True, 3)])
def test_begin(scheme: str, updated: bool, decoded: int) -> None:
    embedding, w_next = random(50, 704), random(704, seed=1)
    tokens = torch.tensor([3, 49, 0, 3, 7], device=DEVICE)
    update = random(decoded, 704, seed=2) * 30 if updated else None
    wanted, x_wanted = reference.begin(tokens, embedding, 26.5, update, w_next, decoded, EPS)
    h, x = fd.begin(tokens, embedding, 26.5, update, w_next, decoded, scheme, EPS)
    assert relative_error(h, wanted) <= TOLERANCE
    assert_activation(*x, x_wanted, scheme)


@pytest.mark.parametrize(("M", "H"), SHAPES)
def test_norm_and_activation(M: int, H: int) -> None:
    x, weight = random(M, 2 * H) * 3, random(2 * H, seed=1)
    wanted = reference.rms_norm((x * 0.3).float(), weight, EPS).to(x.dtype)
    assert relative_error(fd.scaled_norm(x, 0.3, weight, EPS), wanted) <= TOLERANCE
    wanted = reference.gelu_mul(*x.chunk(2, -1))
    assert relative_error(fd.gelu_mul(x), wanted) <= TOLERANCE


ROUTERS = [(5, 8, 2, 160), (4, 128, 8, 300), (70, 5, 5, 128)]


MANY_ROWS = [(70, 5, 1, 1200)] if INTERPRETED else [(520, 5, 1, 1200), (1024, 128, 8, 2816)]


@pytest.mark.parametrize(("M", "experts", "topk", "H"), [*ROUTERS, *MANY_ROWS])
def test_choose_experts(
    M: int, experts: int, topk: int, H: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteenths, whose sums are exact in any order; of equal scores the lowest indices win."""
    if (M, experts, topk, H) in MANY_ROWS and INTERPRETED:  # two tiles, as those of more rows are
        monkeypatch.setattr(router, "launched_as", lambda _: 520)
    x, w = random(M, H).round(), (random(experts, H, seed=1) * 2).round() / 16
    w[3] = w[1]
    scale = random(experts, seed=2).abs()
    scores = (x.double() @ w.double().T).to(torch.bfloat16).float()
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :topk].sort(-1).values
    ids, weights = fd.choose_experts(x, w, scale, topk)
    assert torch.equal(ids.long(), best)
    p = scores.softmax(-1).gather(1, best)
    expected = p / p.sum(-1, keepdim=True) * scale.float()[best]
    assert relative_error(weights, expected) <= 1e-6
    even = torch.ones_like(scale)  # the reference may choose another of two equal scores
    wanted = reference.choose_experts(x, w, even, topk)[1].sort(-1).values
    assert relative_error(fd.choose_experts(x, w, even, topk)[1].sort(-1).values, wanted) <= 1e-6


def test_a_row_of_nan_has_different_experts() -> None:
    """Its slots are laid out like others; scores of both signs, and a negative NaN."""
    x, w = random(3, 160), random(24, 160, seed=1)
    x[1] = torch.full((160,), -torch.nan)
    ids, weights = fd.choose_experts(x, w, torch.ones(24, device=DEVICE), 8)
    assert all(len(set(row)) == 8 and set(row) <= set(range(24)) for row in ids.tolist())
    assert weights.isnan().all(1).tolist() == [False, True, False]
