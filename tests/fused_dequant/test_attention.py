"""The attention kernels against float64, on an NVIDIA GPU or in Triton's interpreter.

`test_every_kernel_in_the_interpreter` runs this file in a process of its own with the interpreter on.
"""

import fused_dequant as fd
import pytest
import torch
from fused_dequant import reference
from fused_dequant.formats import FOUR_BIT
from fused_dequant.reference import relative_error

from tests.support.kernels_support.device import DEVICE, HOPPER, INTERPRETED, MARKS, random

pytestmark = MARKS
QUANTIZED = ("fp8", "int8", FOUR_BIT)
TOLERANCE = 5e-3  # probabilities and results rounded to bf16

# q heads, key heads, head dim, capacity, prefix lengths of the batch, new tokens a sequence. Of the
# real ones one, two and four sequences; a chunk of 100 and one of 17, which fill no block of queries.
SMALL = [(4, 2, 16, 128, (5,), 16), (4, 1, 32, 256, (0, 140), 17), (2, 2, 16, 128, (200,), 16)]
REAL = [
    (16, 8, 256, 2048, (1024, 7, 3000, 0), 256), (16, 8, 256, 1280, (1024,), 256),
    (16, 8, 256, 2048, (2047, 63), 100), (16, 8, 256, 1280, (5000,), 17), (16, 4, 256, 384, (64,), 40),
    (16, 2, 512, 2048, (1024, 300), 256), (16, 2, 512, 2048, (64,), 17),
]  # fmt: skip
SHAPES = SMALL if INTERPRETED else SMALL + REAL


def visible(
    prefix: tuple[int, ...], n: int, kind: str, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last position that each row sees."""
    start = torch.tensor(prefix)[:, None]
    position = start + torch.arange(n)
    if kind == "canvas":
        first, last = (start - window + 1).clamp(min=0).expand(-1, n), (start + n - 1).expand(-1, n)
    else:
        first, last = (position - window + 1).clamp(min=0), position
    return tuple(t.flatten().int().to(DEVICE) for t in (first, last))


@pytest.mark.parametrize("kind", ["canvas", "causal"])
@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize(("q_heads", "kv_heads", "D", "capacity", "prefix", "n"), SHAPES)
def test_attend(q_heads, kv_heads, D, capacity, prefix, n, splits, kind, monkeypatch) -> None:
    """Rings that have wrapped, sequences of other lengths in other slots, split and whole.

    Whole, the plain kernel reads keys as boxes, where there are such; split, by pointers as on sm_80.
    What rounds the results does not know which keys a row saw: the interpreter rounds one case's alone.
    """
    from fused_dequant.attention import attend

    if splits:
        monkeypatch.setattr(attend, "has_boxes", lambda _: False)

    batch = len(prefix)
    slots = torch.arange(batch, dtype=torch.int32).flip(0).to(DEVICE)
    q = random(batch * n, q_heads, D) * 0.3
    keys, values = (random(batch + 1, capacity, kv_heads, D, seed=s) for s in (1, 2))
    first, last = visible(prefix, n, kind, window=min(1024, capacity - n))
    expected = reference.attend(q.double(), keys, values, slots, first, last)
    where = (keys, values, slots, first, last)
    shared = dict.fromkeys(("bf16", *QUANTIZED)) | {FOUR_BIT: torch.full((1,), 3e3, device=DEVICE)}
    rounded = QUANTIZED if (kind, prefix) == ("canvas", (200,)) or not INTERPRETED else ()
    if splits is None:
        found = {own: fd.attend(q, *where, own, shared[own]) for own in ("bf16", *rounded)}
    else:
        config = attend.configure(len(q), batch, q_heads, kv_heads, D, 1, hopper=HOPPER)
        parts = attend.attend_parts(q, *where, config | {"SPLITS": splits})
        assert parts.splits == splits
        found = {own: attend.combine(parts, own, shared[own]) for own in rounded}
        found["bf16"] = attend.combine(parts, "bf16", None)
    out, _ = found.pop("bf16")
    assert relative_error(out.cpu(), expected.flatten(1).cpu()) <= TOLERANCE
    for scheme, (codes, scale) in found.items():
        wanted, wanted_scale = fd.quantize_rows(out, scheme, shared[scheme])
        assert torch.equal(scale.view(torch.uint8), wanted_scale.view(torch.uint8))
        assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "D"), [(2, 1, 16)] + [(16, 8, 256), (16, 2, 512)] * (not INTERPRETED)
)
def test_stale_cells_and_blind_rows(q_heads, kv_heads, D, splits) -> None:
    """What lies outside first..last never shows, and a row that sees nothing is zero."""
    from fused_dequant.attention import attend

    q = random(4, q_heads, D)
    keys, values = (random(1, 128, kv_heads, D, seed=seed) for seed in (1, 2))
    first, last = (torch.tensor(v, dtype=torch.int32).to(DEVICE) for v in ([3] * 4, [9, 9, 9, 2]))
    slots = torch.zeros(1, dtype=torch.int32).to(DEVICE)
    config = attend.configure(4, 1, q_heads, kv_heads, D, 1, hopper=HOPPER) | {"SPLITS": splits}

    def attended() -> torch.Tensor:
        parts = attend.attend_parts(q, keys, values, slots, first, last, config)
        return attend.combine(parts, "bf16", None)[0].view_as(q)

    clean = attended()
    keys[:, 10:], values[:, 10:] = float("nan"), 1e30
    assert torch.equal(attended(), clean)
    assert clean[:3].abs().sum() > 0
    assert not clean[3].any()


def test_a_ragged_picture() -> None:
    """Runs that end and begin inside a block: a picture's tokens see all of it, others their own."""
    from fused_dequant.attention import attend

    n, heads, D = (40, 2, 16) if INTERPRETED else (40, 8, 256)
    q = random(n, 2 * heads, D) * 0.3
    keys, values = (random(1, 256, heads, D, seed=seed) for seed in (1, 2))
    slots = torch.zeros(1, dtype=torch.int32).to(DEVICE)
    last = 150 + torch.arange(n, dtype=torch.int32)
    first = (last - 63).contiguous()
    last[7:29] = last[28]
    first, last = first.to(DEVICE), last.to(DEVICE)
    expected = reference.attend(q.double(), keys, values, slots, first, last)
    for splits in (1, 4):
        config = attend.configure(n, 1, 2 * heads, heads, D, 1, hopper=HOPPER) | {"SPLITS": splits}
        parts = attend.attend_parts(q, keys, values, slots, first, last, config)
        error = relative_error(
            attend.combine(parts, "bf16", None)[0].cpu(), expected.cpu().flatten(1)
        )
        assert error <= TOLERANCE, splits


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads", "D", "capacity", "prefix", "n"), SHAPES)
def test_heads(q_heads, kv_heads, D, capacity, prefix, n, shared) -> None:
    """Norms, rope and the cells that keys and values go to; all other cells stay as they were."""
    batch = len(prefix)
    rows = batch * n
    qkv = random(rows, (q_heads + kv_heads * (1 if shared else 2)) * D) * 3
    q_weight, k_weight = random(D, seed=3), random(D, seed=4)
    position = (torch.tensor(prefix)[:, None] + torch.arange(n)).flatten().int().to(DEVICE)
    angle = position[:, None] * torch.logspace(0, -3, D // 2, device=DEVICE)
    cos, sin = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)
    slots = torch.arange(1, batch + 1, dtype=torch.int32).to(DEVICE)
    keys, values = (torch.full((batch + 2, capacity, kv_heads, D), 7.0) for _ in range(2))
    keys, values = keys.to(DEVICE, torch.bfloat16), values.to(DEVICE, torch.bfloat16)
    q = fd.attention_heads(
        qkv, q_weight, k_weight, cos, sin, slots, position, keys, values, q_heads, 1e-6
    )
    wanted = reference.attention_heads(
        qkv, q_weight, k_weight, cos, sin, q_heads, kv_heads, 1e-6, torch.float64
    )
    at = slots.repeat_interleave(n).long(), position.long() % capacity
    for name, actual, expected in zip("qkv", (q, keys[at], values[at]), wanted, strict=True):
        assert relative_error(actual.cpu(), expected.cpu()) <= TOLERANCE, name
    untouched = torch.ones(batch + 2, capacity, dtype=torch.bool, device=DEVICE)
    untouched[at] = False
    assert (keys[untouched] == 7).all()
    assert (values[untouched] == 7).all()
