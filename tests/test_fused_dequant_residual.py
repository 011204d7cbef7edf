"""Norms, residual sums and routing against the references, on a GPU or in Triton's interpreter."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from tests.kernels_support import interpreter

    interpreter.install()

from fused_dequant import formats, reference  # noqa: E402
from fused_dequant.reference import relative_error  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="no GPU, not interpreting"
    ),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
SHAPES = [(3, 80), (5, 704)] if INTERPRETED else [(3, 80), (256, 2816), (1024, 2816)]
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
EPS = 1e-6
TOLERANCE = (
    1e-3  # both round to bf16 at the same places; sums in another order move a few roundings
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(DEVICE)


def assert_activation(codes, scale, expected: torch.Tensor, scheme: str) -> None:
    if scheme == "bf16":
        assert relative_error(codes, expected) <= TOLERANCE
        return
    wanted, wanted_scale = formats.quantize_rows(expected, DTYPES[scheme])
    assert relative_error(scale, wanted_scale) <= 4e-3
    error = relative_error(codes.float() * scale[:, None], wanted.float() * wanted_scale[:, None])
    assert error <= 8e-3  # where a bf16 rounding moved, a code moves too


@pytest.mark.parametrize("scheme", DTYPES)
@pytest.mark.parametrize(("M", "H"), SHAPES)
def test_after_attention(M: int, H: int, scheme: str) -> None:
    from fused_dequant import residual

    h, o = random(M, H) * 2, random(M, H, seed=1)
    norms = tuple(random(H, seed=s) for s in range(2, 6))
    wanted_h, dense, experts, router = reference.after_attention(h, o, norms, EPS)
    out, x, scale, x_experts, x_router = residual.after_attention(h, o, norms, DTYPES[scheme], EPS)
    assert_activation(x, scale, dense, scheme)
    for name, actual, expected in (
        ("h", out, wanted_h), ("experts", x_experts, experts), ("router", x_router, router),
    ):  # fmt: skip
        assert relative_error(actual, expected) <= TOLERANCE, name


@pytest.mark.parametrize("scheme", DTYPES)
@pytest.mark.parametrize(("M", "H"), SHAPES)
def test_after_experts(M: int, H: int, scheme: str) -> None:
    from fused_dequant import residual

    h, dense, experts = random(M, H) * 2, random(M, H, seed=1), random(M, H, seed=2) * 9
    norms = tuple(random(H, seed=s) for s in range(3, 7))
    scalar = torch.tensor([0.2041], dtype=torch.bfloat16, device=DEVICE)
    wanted, x_wanted = reference.after_experts(h, dense, experts, norms, scalar, EPS)
    out, x, scale = residual.after_experts(h, dense, experts, norms, scalar, DTYPES[scheme], EPS)
    assert relative_error(out, wanted) <= TOLERANCE
    assert_activation(x, scale, x_wanted, scheme)


@pytest.mark.parametrize(("M", "experts", "topk"), [(5, 8, 2), (4, 128, 8), (3, 5, 5)])
def test_choose(M: int, experts: int, topk: int) -> None:
    from fused_dequant import residual

    logits, scale = random(M, experts) * 3, random(experts, seed=1).abs()
    logits[0, 1] = logits[0, 3] = logits[0].max() + 1  # a tie inside the choice
    ids, weights = residual.choose(logits, scale, topk)
    wanted_ids, wanted = reference.choose_experts(logits, scale, topk)
    assert torch.equal(ids, wanted_ids)
    assert relative_error(weights, wanted) <= 1e-6
