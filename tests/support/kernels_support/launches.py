"""Every launch that the runtime makes on a GPU which is not there: kernels, types, constants, options.

The operations run on tensors without storage while launches are noted in place of being made. So the
tiles, numbers of splits and types are those that the runtime would choose on that target.
"""

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import fused_dequant as fd
import torch
from fused_dequant import simulated
from fused_dequant.formats import EIGHT_BIT, FOUR_BIT
from fused_dequant.gptq import blockwise, gram
from fused_dequant.launch import targets
from fused_dequant.launch.targets import Capability
from fused_dequant.tune import cases
from fused_dequant.tune.cases import EXPERTS, HIDDEN, INNER, LINEAR_SHAPES, TOPK, VOCABULARY
from fused_dequant.weights import Weight, fragments
from fused_dequant.weights.choose import layout_for, made_of
from fused_dequant.weights.layouts import KERNELS
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

# Canvases of one to 64 sequences; a piece of a prompt with a picture may have any length.
TOKENS = (256, 512, 1024, 2048, 8192, 5)
HEADS = ((256, 8, 1408), (512, 2, 8192))  # head dim, key heads, capacity: sliding and full layers
SHAPES = (*LINEAR_SHAPES, (9216, HIDDEN))


@dataclass(frozen=True)
class Launch:
    """One kernel as it would be compiled.

    Attributes:
        kernel: its name.
        source: what Triton compiles.
        options: of the compiler.
        target: what it is compiled for.
    """

    kernel: str
    source: Any
    options: Any
    target: GPUTarget

    @property
    def key(self) -> str:
        """Equal launches have equal keys."""
        return f"{self.source.hash()} {self.options.hash()} {self.target.arch}"

    @property
    def shape(self) -> tuple[str, ...]:
        """Equal but for what a number of rows is divisible by, which changes no tile and no layout."""
        source = self.source
        return (self.kernel, str(source.signature), str(source.constants), self.options.hash())

    @property
    def code(self) -> tuple[str, ...]:
        """Equal but for the target, and for TOPK, which divides numbers of slots and no tile."""
        names = self.source.fn.arg_names
        own = {names[i]: value for (i, *_), value in self.source.constants.items()}
        own.pop("TOPK", None)
        options = self.options.num_warps, self.options.num_stages
        return (self.kernel, str(self.source.signature), str(own), str(options))

    def constant(self, name: str) -> Any:
        """Return the value of a constexpr parameter."""
        return self.source.constants[(self.source.fn.arg_names.index(name),)]

    def type(self, name: str) -> str:
        """Return the type of a parameter, such as *bf16."""
        return self.source.signature[name]


class _Driver:
    """Stands for the driver of a GPU that is not there."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def forced(capability: Capability) -> Generator[GPUTarget]:
    """Choose launches as on a GPU of this capability."""
    name = f"sm_{capability[0]}{capability[1]}"
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    with (
        patch.dict(os.environ, {targets.FORCE: name}),
        patch.object(driver, "_active", _Driver(target)),
    ):
        yield target


@contextmanager
def noted_on(capability: Capability) -> Generator[dict[tuple[str, ...], Launch]]:
    """Note what is launched on a GPU of this capability in place of launching it, by its shape."""
    found: dict[tuple[str, ...], Launch] = {}
    binders: dict[int, Any] = {}  # by the id of a kernel: one takes longer to make than a launch

    def noted(kernel: Any, _: object) -> Any:
        def note(*arguments: Any, **options: Any) -> None:
            options["debug"] = False
            if id(kernel) not in binders:
                binders[id(kernel)] = kernel.create_binder()
            *_, backend, binder = binders[id(kernel)]
            bound, specialization, own = binder(*arguments, **options)
            own, signature, constants, attributes = kernel._pack_args(
                backend, options, bound, specialization, own
            )
            source = kernel.ASTSource(kernel, signature, constants, attributes)
            launch = Launch(kernel.__name__, source, own, target)
            found.setdefault(launch.shape, launch)

        return note

    with forced(capability) as target, patch.object(KernelInterface, "__getitem__", noted):
        yield found


@cache
def launches(capability: Capability) -> list[Launch]:
    """Return the distinct launches of the whole runtime on a target."""
    with noted_on(capability) as found:
        for M in TOKENS:
            for scheme in _schemes(capability):
                launch_scheme(scheme, M)
            _vocabulary(M)
        for B in (1, 4):
            _sampler(B)
            if fd.look_runs(torch.device("meta"), 30.0, 0.4):
                _looks(B)
        for codes, neighbours in (("e2m1", 6), ("e4m3", 0), ("int8", 0)):
            _rounding(codes, neighbours)
        for experts, topk, inputs in ((EXPERTS, TOPK, HIDDEN), (EXPERTS, 1, INNER), (1, 1, 2112)):
            _hessians(experts, topk, inputs)
    return list(found.values())


def _schemes(capability: Capability) -> Iterator[str]:
    """Yield the layouts that weights may get on the target."""
    for layout, kernel in KERNELS.items():
        scheme, mode = made_of(layout)
        if kernel.runs_on(capability) and layout_for(scheme, mode, capability, ()) == layout:
            yield layout


def launch_scheme(scheme: str, M: int) -> None:
    """Launch what a pass of M rows does with weights of a scheme."""
    _experts(scheme, M)
    if scheme != "nvfp4_e4m3":  # experts alone
        _products(scheme, M)
        launch_layer(scheme, M)


def blank(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def integers(*shape: int) -> Tensor:
    return blank(*shape, dtype=torch.int32)


def _weight(scheme: str, experts: int, N: int, K: int) -> Weight:
    return cases.blank_weight(scheme, experts, N, K, "meta")


def _experts(scheme: str, M: int) -> None:
    dense = "fp8" if scheme == "nvfp4_e4m3" else scheme
    h, both = blank(M, HIDDEN), (_shared(dense), _shared(scheme))
    fd.after_attention(h, h, (blank(HIDDEN),) * 4, (dense, scheme), shared=both)
    up, down = _weight(scheme, EXPERTS, 2 * INNER, HIDDEN), _weight(scheme, EXPERTS, HIDDEN, INNER)
    ids, share = integers(M, TOPK), blank(M, TOPK, dtype=torch.float32)
    fd.routed_experts(h, None, ids, share, up, down)
    if scheme in ("nvfp4", "nvfp4_fragments"):
        for own in (1, EXPERTS):
            scales = (blank(own, dtype=torch.float32), blank(own, dtype=torch.float32))
            simulated.experts(h, ids, share, up, down, scales)


def _products(scheme: str, M: int) -> None:
    for N, K in SHAPES:
        fd.linear(blank(M, K), _weight(scheme, 1, N, K))
    if scheme == "nvfp4_fragments":
        packed, scale = (blank(1, 64, 64 // each, dtype=torch.uint8) for each in (2, 16))
        fragments.to_fragments(packed, scale)
    if scheme in EIGHT_BIT or scheme == FOUR_BIT:
        fd.quantize_rows(blank(M, 2 * 2112), scheme, _shared(scheme), gelu_mul=True)


def _shared(scheme: str) -> Tensor | None:
    """The global scale of a scheme's rows."""
    return blank(1, dtype=torch.float32) if scheme == FOUR_BIT else None


def launch_layer(scheme: str, M: int) -> None:
    """What stands between the products, of activations in the scheme's type."""
    shared = _shared(scheme)
    h, norm, numbers = blank(M, HIDDEN), blank(HIDDEN), integers(M)
    norms = (norm, norm, norm, norm)
    tokens, embedding = blank(M, dtype=torch.int64), blank(VOCABULARY, HIDDEN)
    for update in (None, h):
        fd.begin(tokens, embedding, 53.0, update, norm, M, scheme, shared=shared)
    for D, kv, capacity in HEADS:
        slots = integers(max(1, M // 256))
        keys, values = (blank(8, capacity, kv, D) for _ in range(2))
        width = (16 + kv * (2 if D == 256 else 1)) * D
        angles = (blank(M, D // 2), blank(M, D // 2))
        q = fd.attention_heads(
            blank(M, width), blank(D), blank(D), *angles, slots, numbers, keys, values, 16
        )
        fd.attend(q, keys, values, slots, numbers, numbers, scheme, shared)
    for schemes, own in ((("bf16", scheme), (None, shared)), ((scheme, "bf16"), (shared, None))):
        fd.after_attention(h, h, norms, schemes, shared=own)
    scalars = blank(1), blank(1)
    fd.after_experts(h, h, blank(M, TOPK, HIDDEN), norms, scalars, M, scheme, shared=shared)
    fd.choose_experts(h, blank(EXPERTS, HIDDEN), blank(EXPERTS), TOPK)
    fd.scaled_norm(h, 53.0, norm)
    fd.gelu_mul(blank(M, 2 * 2112))


def _vocabulary(M: int) -> None:
    embedding = blank(VOCABULARY, HIDDEN)
    logits = fd.lm_head(blank(M, HIDDEN), embedding, 30.0)
    sharpness = blank(M, dtype=torch.float32)
    fd.soft_embedding(logits, embedding, sharpness)


def _looks(B: int) -> None:
    M, embedding = B * 256, blank(VOCABULARY, HIDDEN)
    logits, (state, schedule) = blank(M, VOCABULARY), _canvases(B)
    probabilities = fd.Probabilities.room(logits)
    fd.look(blank(M, HIDDEN), embedding, 30.0, state, schedule, logits, probabilities)
    fd.soft_embedding_of(probabilities, embedding)


def _canvases(B: int) -> tuple[fd.CanvasState, Tensor]:
    canvas, seeds = blank(B, 256, dtype=torch.int64), blank(B, dtype=torch.int64)
    return fd.CanvasState.begin(canvas, seeds, 1), blank(48, dtype=torch.float32)


def _sampler(B: int) -> None:
    state, schedule = _canvases(B)
    draw = fd.sample(blank(B, 256, VOCABULARY), state, schedule)
    fd.accept(draw, state, schedule, fd.Rules(0.1, 0.005))


def _rounding(codes: str, neighbours: int) -> None:
    """A block of GPTQ, a span of descent, products: with rows of a Hessian, with those of a factor."""
    rows, matrix = (blank(EXPERTS, n, 16, dtype=torch.float32) for n in (2 * INNER, 16))
    shared, scales = (blank(*shape, dtype=torch.float32) for shape in ((EXPERTS,), rows.shape[:2]))
    blockwise.round_block(rows, matrix, shared, scales, rows, rows, codes, neighbours)
    wide, square = (blank(EXPERTS, n, 128, dtype=torch.float32) for n in (2 * INNER, 128))
    steps = blank(EXPERTS, 2 * INNER, 8, dtype=torch.float32)
    blockwise.descend_span(wide, square, shared, steps, wide, wide, codes, scaled=neighbours > 0)
    total, right = (blank(EXPERTS, n, HIDDEN, dtype=torch.float32) for n in (2 * INNER, HIDDEN))
    blockwise.add_product(total, wide, right[..., :128].mT, -1)
    blockwise.add_product(total, wide, right[:, :128], -1)


def _hessians(experts: int, topk: int, inputs: int) -> None:
    order, starts = (blank(n, dtype=torch.int64) for n in (1024 * topk, experts + 1))
    tiles = blank(experts, 1, gram.TILE, gram.TILE, dtype=torch.float32)
    gram.add(tiles, blank(1024, inputs), order, starts, topk)
