"""Every kernel that the runtime launches, compiled for every target on a machine without a GPU.

`launches` notes what the runtime would launch on a target, with the real shapes and the tiles chosen
there. What another target of its family (ELDER) launches too is compiled for that one, within the
least shared memory of both, and here once a kernel and format; slow tests compile all of it. Each is
checked: shared memory within a block's limit, no spill above SPILLED, the target's tensor cores in the
number format it was chosen for. Where the instruction budget decides the speed, instructions a weight
are counted too.

What machine code takes is read from tests/data/compiled.json where nothing changed (`compile_check`):

    QUANTIZE_TEST_COMPILE=1 python -m pytest tests/fused_dequant/test_compile.py

compiles all of it, as CI does, and QUANTIZE_TEST_COMPILE=record also records it.
"""

import importlib
import json
import os
import pkgutil
import random
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import fused_dequant
import pytest
import triton
from fused_dequant.attention import attend
from fused_dequant.launch.dispatch import launched_as_one_of
from fused_dequant.launch.hopper import BEFORE_3_8
from fused_dequant.launch.targets import TARGETS, Capability, name_of
from fused_dequant.products import matmul, nvfp4_hopper
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.runtime.jit import KernelInterface

from tests.support.kernels_support.compile_check import (
    COMPILE,
    RECORD,
    Size,
    asked,
    assembles,
    compile_for,
    size,
    write_record,
)
from tests.support.kernels_support.launches import (
    HEADS,
    TOKENS,
    Launch,
    launch_layer,
    launch_scheme,
    launches,
    noted_on,
)

SPILLED = 8  # most bytes of stack of a thread: two registers
# Without a product a kernel's code depends on the target's number alone where it may be chained (sm_90
# and newer) or converts to FP8: these three stand for the others, which are slow tests.
ALL_KERNELS = ((8, 0), (9, 0), (12, 0))
# Targets whose launches are, but for few, those of another: of kernels with products, and of others.
ELDER: dict[bool, dict[Capability, Capability]] = {
    True: {(8, 6): (8, 0), (8, 9): (8, 0), (10, 3): (10, 0), (11, 0): (10, 0), (12, 1): (12, 0)},
    False: {(12, 0): (9, 0)},
}
FORMATS = {"bf16": ("bf16.bf16", "kind::f16"), "fp8e4nv": ("e4m3.e4m3", "kind::f8f6f4")}
NVFP4_KIND = "kind::mxf4nvf4.block_scale"
# NVFP4 on both sides: a scale of e4m3 for 16 of the 64 columns that an instruction takes.
FORMATS |= {
    "fp32": ("tf32.tf32", "kind::tf32"),
    "i8": ("s8.s8", "kind::i8"),
    "u8": (f"{NVFP4_KIND}.scale_vec::4X", f"{NVFP4_KIND}.block16"),  # two names of one thing
}
OPERAND = {  # of each kernel that multiplies, the parameter whose type its products have
    "matmul_kernel": "x", "nvfp4_kernel": "x", "nvfp4_hopper_kernel": "x", "attend_kernel": "q",
    "attend_hopper_kernel": "q", "attend_wide_kernel": "q", "logits_kernel": "x",
    "lm_head_kernel": "x", "lm_head_hopper_kernel": "x", "split_k_kernel": "p",
    "gram_kernel": "x", "nvfp4_blackwell_kernel": "x", "experts_hopper_kernel": "x",
    "product_kernel": "lhs", "descend_span_kernel": "slope",
}  # fmt: skip


def operand(launch: Launch) -> str:
    """Return the type that a launch's products have, or nothing."""
    return launch.type(OPERAND[launch.kernel]) if launch.kernel in OPERAND else ""


def rows(launch: Launch) -> int:
    """Return the rows of one product, on the side of a warpgroup's 64."""
    if launch.kernel == "nvfp4_blackwell_kernel" or (
        launch.kernel == "matmul_kernel" and launch.constant("SWAP")
    ):
        return launch.constant("BN")
    if launch.kernel == "attend_kernel":
        return launch.constant("BQ") * launch.constant("Q_HEADS") // launch.constant("KV_HEADS")
    if launch.kernel == "descend_span_kernel":
        return launch.constant("ROWS")
    hopper = launch.kernel.replace("_wide_", "_hopper_").endswith("_hopper_kernel")
    return 64 if hopper else launch.constant("BM")


def instruction(launch: Launch, target: Capability) -> str:
    """Return a target's instruction: four warps multiply 64 rows and more together, else one does."""
    wide = rows(launch) >= 64 and launch.options.num_warps >= 4
    if target[0] == 9 and wide:
        return "wgmma.mma_async"
    newer = target[0] in (10, 11)
    if launch.type(OPERAND[launch.kernel]) == "*i8":
        newer = target == (10, 0) and not BEFORE_3_8
    if newer and wide:
        return "tcgen05.mma"
    return "mma.sync"


def faults(
    launch: Launch, target: Capability, found: Size, family: tuple[Capability, ...] = ()
) -> list[str]:
    """Return what is wrong with a launch's machine code, also where the family runs it."""
    wrong: list[str] = []
    if found.shared > min(TARGETS[each].shared for each in (target, *family)) * 1024:
        wrong.append(f"{found.shared} bytes of shared memory")
    if found.stack > SPILLED:
        wrong.append(f"spills {found.stack} bytes")
    if launch.kernel in OPERAND:
        kind = next(k for k in FORMATS if k in launch.type(OPERAND[launch.kernel]))
        formats, wanted = FORMATS[kind], instruction(launch, target)
        if not found.products:
            wrong.append("no tensor-core instruction")
        for product in found.products:
            if not product.startswith(wanted) or not any(f in product for f in formats):
                wrong.append(f"{product} in place of {wanted} of {kind}")
    return [f"{launch.kernel} {launch.source.constants}: {each}" for each in wrong]


@cache
def compiled(target: Capability, multiplies: bool) -> dict[tuple[str, ...], Launch]:
    """Return a target's launches, with products or without, one of each code."""
    chosen = [each for each in launches(target) if (each.kernel in OPERAND) == multiplies]
    assert len(chosen) > 15
    return {each.code: each for each in reversed(chosen)}


def of_its_own(target: Capability, multiplies: bool) -> list[Launch]:
    """Return what the elder does not launch, or not alike, and one launch of each kernel and format."""
    chosen, elder = compiled(target, multiplies), ELDER[multiplies][target]
    kinds = {(each.kernel, operand(each)): code for code, each in chosen.items()}
    return [
        each
        for code, each in chosen.items()
        if code not in compiled(elder, multiplies) or code in kinds.values()
    ]


def family(launch: Launch, target: Capability, multiplies: bool) -> tuple[Capability, ...]:
    """Return the targets for which this compilation stands."""
    younger = [each for each, elder in ELDER[multiplies].items() if elder == target]
    return tuple(each for each in younger if launch.code in compiled(each, multiplies))


def case(target: Capability, multiplies: bool, *, slow: bool) -> Any:
    """Return a test's parameters, skipped where this Triton assembles nothing for the target."""
    name = f"{name_of(target)} {'products' if multiplies else 'others'}"
    reason = f"the ptxas of Triton {triton.__version__} does not know {name_of(target)}"
    unknown = pytest.mark.skipif(not assembles(target), reason=reason)
    marks = [unknown, pytest.mark.slow] if slow else [unknown]
    return pytest.param(target, multiplies, id=name, marks=marks)


MATRIX = [
    case(target, multiplies, slow=not multiplies and target not in ALL_KERNELS)
    for target in TARGETS
    for multiplies in (True, False)
]


@pytest.mark.parametrize(("target", "multiplies"), MATRIX)
def test_every_launch_fits_its_target(target: Capability, multiplies: bool) -> None:
    if target in ELDER[multiplies]:
        chosen = of_its_own(target, multiplies)
    else:
        chosen = list(compiled(target, multiplies).values())
    wrong = [
        fault
        for each in chosen
        for fault in faults(each, target, size(each), family(each, target, multiplies))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("target", "multiplies"),
    [case(each, kind, slow=True) for kind, younger in ELDER.items() for each in younger],
)
def test_every_launch_fits_where_its_elder_launches_it(
    target: Capability, multiplies: bool
) -> None:
    chosen = compiled(target, multiplies).values()
    wrong = [fault for each in chosen for fault in faults(each, target, size(each))]
    assert not wrong, "\n".join(wrong)


def test_every_kernel_has_a_case() -> None:
    """Every kernel of the package is launched, and so compiled, for some target."""
    launched = {each.kernel for target in ALL_KERNELS for each in launches(target)}
    names = [m.name for m in pkgutil.walk_packages(fused_dequant.__path__, "fused_dequant.")]
    there = {
        attribute
        for name in names
        for attribute, value in vars(importlib.import_module(name)).items()
        if attribute.endswith("_kernel") and isinstance(value, KernelInterface)
    }
    assert len(there) > 20
    assert there - launched == set()
    assert OPERAND.keys() <= there


EARLIER = [  # target, head size: what attention's first tiles did there
    ((8, 0), 256, "spills"), ((8, 9), 512, "shared memory"), ((12, 0), 256, "shared memory"),
    ((12, 0), 512, "shared memory"), ((12, 1), 256, "shared memory"), ((12, 1), 512, "shared memory"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "D", "fault"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case[0] == (12, 1) else [])
        for case in EARLIER
    ],
)
def test_tiles_that_do_not_fit_are_found(
    target: Capability, D: int, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 rows x 64 positions, 4 warps, 3 stages; 64 x 32 for heads of 512: as on an H200 once."""
    tile = {"BN": 32 if D > 256 else 64, "num_warps": 8 if D > 256 else 4}
    tile |= {"BQ": 64 * {256: 8, 512: 2}[D] // 16, "num_stages": 2 if D > 256 else 3, "SPLITS": 2}
    monkeypatch.setattr(attend, "configure", lambda *_, **__: dict(tile))
    assert {D for D, _, _ in HEADS} == {256, 512}
    with noted_on(target) as found:
        for M in TOKENS:
            launch_layer("bf16", M)
    chosen = [e for e in found.values() if e.kernel == "attend_kernel" and e.constant("D") == D]
    assert chosen
    assert any(fault in told for each in chosen for told in faults(each, target, size(each)))


@pytest.mark.parametrize(
    ("target", "scheme"),
    [
        ((8, 9), "fp8"),
        ((9, 0), "bf16"),
        ((9, 0), "fp8"),
        ((9, 0), "nvfp4_fragments"),
        ((12, 0), "nvfp4_e2m1"),
    ],
)
def test_one_of_several_sequences_is_launched_as_if_it_were_alone(
    target: Capability, scheme: str
) -> None:
    """The same kernels and tiles, so the same sums; only sorting by expert adds nothing up."""

    def codes(sequences: int, each_alone: bool) -> set[tuple[str, ...]]:
        with noted_on(target) as found, launched_as_one_of(sequences if each_alone else 1):
            launch_scheme(scheme, 256 * sequences)
        sorts = ("count_kernel", "route_kernel")
        return {each.code for each in found.values() if each.kernel not in sorts}

    alone = codes(1, each_alone=True)
    assert all(codes(count, each_alone=True) == alone for count in (2, 3, 8))
    apart = {kernel for kernel, *_ in codes(8, each_alone=False) - alone}
    assert {"logits_kernel", "heads_kernel", "after_experts_kernel"} <= apart


POINTERS = {
    "slots": "*i32",
    "block_expert": "*i32",
    "block_rows": "*i32",
    "block_count": "*i32",
    "row_weight": "*fp32",
    "total": "i32",
    "N": "i32",
    "K": "i32",
    "y": "*bf16",
}
BF16 = {
    "x": "*bf16",
    "x_scale": "*fp32",
    "w": "*bf16",
    "w_scale": "*fp32",
    "cap": "fp32",
} | POINTERS
FP8 = BF16 | {"x": "*fp8e4nv", "w": "*fp8e4nv"}
INT8 = BF16 | {"x": "*i8", "w": "*i8"}
NVFP4 = {"x": "*bf16", "packed": "*u8", "scale": "*u8", "factor": "*fp32"} | POINTERS
FRAGMENTS = {"x": "*bf16", "x_more": "*bf16", "words": "*i32", "scales": "*i32", "factor": "*fp32"}
FRAGMENTS |= POINTERS | {"x_scale": "*bf16"}
W4A8 = FRAGMENTS | {"x": "*fp8e4nv", "x_more": "*fp8e4nv", "x_scale": "*fp32"}


def box(rows: int, columns: int, dtype: str = "bf16") -> str:
    """Type of a TMA descriptor of a Gluon kernel."""
    bits = 16 if dtype == "bf16" else 8
    return f"tensordesc<{dtype}[{rows}, {columns}],{NVMMASharedLayout(128, bits, 2)!r}>"


EXPERTS_UP = {"TOPK": 8, "GROUPED": True, "WEIGHTED": False, "EVEN_K": True}
EXPERTS_DOWN = {"TOPK": 1, "GROUPED": True, "WEIGHTED": True, "EVEN_K": False}
DENSE = {"TOPK": 1, "GROUPED": False, "WEIGHTED": False, "EVEN_K": True}


@dataclass(frozen=True)
class Case:
    """One kernel for sm_90, and the most instructions a weight in its main loop."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    per_weight: float
    options: dict[str, int] = field(default_factory=lambda: {"num_warps": 4, "num_stages": 3})


def fragments(
    name: str,
    signature: dict[str, str],
    mode: dict[str, Any],
    limit: float,
    warps: int,
    **sizes: int,
) -> Case:
    constants = mode | {"E4M3": signature is W4A8, "num_warps": warps} | sizes
    kernel = nvfp4_hopper.nvfp4_hopper_kernel
    return Case(name, kernel, signature, constants, limit, {"num_warps": warps})


CASES = [
    Case(
        "fp8 experts up", matmul.matmul_kernel, FP8,
        EXPERTS_UP | {"SCALED": True, "GELU_MUL": True, "BLOCKS_FIRST": False, "MORE": 0}
        | {"NARROWER": 0, "BM": 16, "BN": 128, "BK": 128, "SWAP": 1}, 1.4,
    ),
    fragments("nvfp4 experts up", FRAGMENTS, EXPERTS_UP | {"GELU_MUL": True}, 3.7, 8,
              BM=32, MORE=0, NARROWER=0, BN=128, BK=128, PARTS=1, STAGES=4),
    fragments("nvfp4 experts down", FRAGMENTS, EXPERTS_DOWN | {"GELU_MUL": False}, 3.9, 8,
              BM=32, MORE=0, NARROWER=0, BN=128, BK=128, PARTS=1, STAGES=4),
    fragments("80 rows and fewer", FRAGMENTS, EXPERTS_UP | {"GELU_MUL": True}, 2.8, 4,
              BM=64, MORE=16, NARROWER=4, BN=128, BK=128, PARTS=1, STAGES=3),
    fragments("w4a8, 80 rows", W4A8, EXPERTS_UP | {"GELU_MUL": True}, 2.5, 4,
              BM=64, MORE=16, NARROWER=0, BN=128, BK=128, PARTS=1, STAGES=3),
    fragments("w4a8, down", W4A8, EXPERTS_DOWN | {"GELU_MUL": False}, 2.3, 4,
              BM=32, MORE=0, NARROWER=0, BN=128, BK=128, PARTS=1, STAGES=3),
    fragments("dense", FRAGMENTS | {"x": box(128, 128), "x_more": box(128, 128)},
              DENSE | {"GELU_MUL": False}, 3.9, 4,
              BM=128, MORE=0, NARROWER=0, BN=64, BK=128, PARTS=2, STAGES=3),
    fragments("dense, 96 rows", FRAGMENTS | {"x": box(64, 128), "x_more": box(32, 128)},
              DENSE | {"GELU_MUL": False}, 4.6, 4,
              BM=64, MORE=32, NARROWER=0, BN=64, BK=128, PARTS=2, STAGES=3),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_instructions_a_weight_on_hopper(case: Case) -> None:
    report = compile_for(
        90, case.kernel, case.signature, case.constants | {"CHAINED": True}, **case.options
    )
    assert report.stack == report.spills == 0
    weights = case.constants["BN"] * case.constants["BK"] / (case.options["num_warps"] * 32)
    assert 0 < report.loop_instructions / weights <= case.per_weight


def test_two_are_compiled_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is what this Triton makes: of other launches at each commit."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, check=True).stdout
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for multiplies in (True, False):
        chosen = random.Random(head).choice(list(compiled((9, 0), multiplies).values()))
        told = size(chosen)
        monkeypatch.setenv(COMPILE, "1")
        assert size(chosen) == told
        monkeypatch.delenv(COMPILE)
    assert list(tmp_path.iterdir())


def test_the_record_holds_what_was_compiled() -> None:
    """Behind the other tests of this process, which asked."""
    if os.environ.get(COMPILE) == "record":
        write_record()
    record = json.loads(RECORD.read_text())
    if record["triton"] != triton.__version__:
        pytest.skip("the record is of another Triton")
    assert asked
    differing = [key for key, told in asked.items() if record["found"].get(key) != told]
    assert not differing, f"{len(differing)} of {len(asked)}: record them, as said above"
