"""Checks what this GPU computes between products: norms, router, attention, vocabulary and sampler.

Each check runs operations on the GPU and in torch on the CPU, with equal inputs in the real model's
shapes, but for a smaller vocabulary. The first launch compiles a kernel: an installation whose Triton
cannot compile one for this GPU is found before weights are read.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fused_dequant import operations
from fused_dequant.reference import relative_error
from fused_dequant.sampler.canvas import CanvasState, Probabilities, Rules
from fused_dequant.tune import cases
from fused_dequant.tune.selftest import describe

ROWS, VOCABULARY, SOFTCAP, COLDEST = 256, 8192, 30.0, 0.4
HEADS = ((256, 8, 16), (512, 2, 16))  # head dim, key heads, query heads: sliding and full layers
CAPACITY = 1024  # cached positions of a sequence
CPU = torch.device("cpu")


class _Inputs:
    """Normal tensors, the same for every device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._generator = device, torch.Generator().manual_seed(7)

    def __call__(self, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=self._generator).to(torch.bfloat16)
        return drawn.to(self.device)

    def positions(self, first: int = 0) -> Tensor:
        """Return ROWS int32 positions from `first` on."""
        return torch.arange(first, first + ROWS, dtype=torch.int32, device=self.device)


def _layer(draw: _Inputs) -> Iterator[Tensor]:
    H = cases.HIDDEN
    tokens = draw.positions().long() * 7 % VOCABULARY
    norms = (draw(H), draw(H), draw(H), draw(H))
    h, x = operations.begin(
        tokens, draw(VOCABULARY, H), 53.0, draw(ROWS // 2, H), norms[0], ROWS // 2, "bf16"
    )
    yield from (h, x[0])
    h, x, experts, routed = operations.after_attention(h, draw(ROWS, H), norms, ("bf16", "bf16"))
    yield from (h, x[0], experts[0], routed)
    outputs, scalars = draw(ROWS, cases.TOPK, H), (draw(1), draw(1))
    h, x = operations.after_experts(h, draw(ROWS, H), outputs, norms, scalars, ROWS // 2, "bf16")
    yield from (h, x[0], operations.scaled_norm(h, 53.0, norms[1]))
    yield operations.gelu_mul(draw(ROWS, 2 * cases.INNER))


def _router(draw: _Inputs) -> Iterator[Tensor]:
    """Sums of weights: which of two experts with nearly equal logits is chosen hangs on a bit."""
    x, router = draw(ROWS, cases.HIDDEN), draw(cases.EXPERTS, cases.HIDDEN)
    _, share = operations.choose_experts(x, router, draw(cases.EXPERTS).abs() + 1, cases.TOPK)
    yield share.sum(-1)


def _attention(D: int, kv: int, heads: int, draw: _Inputs) -> Iterator[Tensor]:
    slots = torch.zeros(1, dtype=torch.int32, device=draw.device)
    keys, values = draw(1, CAPACITY, kv, D), draw(1, CAPACITY, kv, D)
    angle = draw(ROWS, D // 2).float()
    cos, sin = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)
    qkv = draw(ROWS, (heads + 2 * kv) * D)
    at = draw.positions(CAPACITY // 2)
    q = operations.attention_heads(
        qkv, draw(D) / 8, draw(D), cos, sin, slots, at, keys, values, heads
    )
    yield from (q, keys, values)
    yield operations.attend(q, keys, values, slots, draw.positions(), at, "bf16")[0]


def _vocabulary(draw: _Inputs) -> Iterator[Tensor]:
    """Logits, the soft embedding, and a step of the sampler; `look` makes the logits where it can."""
    x, embedding = draw(ROWS, cases.HIDDEN), draw(VOCABULARY, cases.HIDDEN) / 16
    canvas = torch.zeros(1, ROWS, dtype=torch.int64, device=draw.device)
    state = CanvasState.begin(canvas, canvas[:, 0], 1)
    schedule = torch.linspace(0.8, COLDEST, 48, device=draw.device)
    sharpness = torch.full((ROWS,), 1.25, device=draw.device)
    logits = operations.lm_head(x, embedding, SOFTCAP)
    yield logits
    yield operations.soft_embedding(logits, embedding, sharpness)
    drawn = operations.sample(logits[None], state, schedule)
    yield drawn.entropy
    if operations.look_runs(draw.device, SOFTCAP, COLDEST):
        room = Probabilities.room(logits)
        drawn = operations.look(x, embedding, SOFTCAP, state, schedule, logits, room)
    yield from (logits, drawn.entropy)
    operations.accept(drawn, state, schedule, Rules(0.1, 0.005))
    yield state.inverse_temperature


CHECKS: dict[str, Callable[[_Inputs], Iterator[Tensor]]] = {
    "norms and residual sums": _layer,
    "weights of the router": _router,
    "rows of attention in sliding layers": lambda draw: _attention(*HEADS[0], draw),
    "rows of attention in full layers": lambda draw: _attention(*HEADS[1], draw),
    "logits and draws": _vocabulary,
}


def fault(device: torch.device) -> str | None:
    """Return what is wrong between products on a GPU: a part and its fault; None if nothing is."""
    for name, check in CHECKS.items():

        def error(check: Callable[[_Inputs], Iterator[Tensor]] = check) -> float:
            pairs = zip(check(_Inputs(device)), check(_Inputs(CPU)), strict=True)
            errors = [relative_error(actual.cpu(), expected) for actual, expected in pairs]
            return max(errors, key=lambda error: float("inf") if error != error else error)

        if why := describe(error):
            return f"{name} {why}"
    return None
