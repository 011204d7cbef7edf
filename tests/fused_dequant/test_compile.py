"""Every kernel compiled for sm_80 to sm_120 on a machine without a GPU.

Asserted for each: no spill, shared memory within the target's limit, the tensor-core instruction the
format was chosen for, and, where the instruction budget decides the speed, instructions a weight.
"""

import importlib
import pkgutil
from dataclasses import dataclass, field
from typing import Any

import fused_dequant
import pytest
from fused_dequant import (
    attention,
    attention_hopper,
    attention_wide,
    input_rounding,
    matmul,
    nvfp4,
    nvfp4_hopper,
    quantize,
    residual,
    router,
    routing,
    sampling,
    vocabulary,
    vocabulary_hopper,
)
from kernels_support.compile_check import SHARED_LIMIT, compile_for
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.runtime.jit import KernelInterface

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
FRAGMENTS |= POINTERS


def box(rows: int, columns: int, dtype: str = "bf16") -> str:
    """Type of a TMA descriptor of a Gluon kernel."""
    bits = 16 if dtype == "bf16" else 8
    return f"tensordesc<{dtype}[{rows}, {columns}],{NVMMASharedLayout(128, bits, 2)!r}>"


ATTEND = {"q": "*bf16", "slots": "*i32", "first": "*i32", "last": "*i32"}
ATTEND |= {"out": "*fp16", "largest": "*fp32", "total": "*fp32"}
ATTEND |= dict.fromkeys(("rows", "n", "capacity", "splits"), "i32")
EXPERTS_UP = {"TOPK": 8, "GROUPED": True, "WEIGHTED": False, "EVEN_K": True}
EXPERTS_DOWN = {"TOPK": 1, "GROUPED": True, "WEIGHTED": True, "EVEN_K": False}
DENSE = {"TOPK": 1, "GROUPED": False, "WEIGHTED": False, "EVEN_K": True}


@dataclass(frozen=True)
class Case:
    """One kernel in one configuration, and what its machine code must show on each target."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    tensor_core: dict[int, str]  # target -> instruction
    options: dict[str, int] = field(default_factory=lambda: {"num_warps": 4, "num_stages": 3})
    per_weight: dict[int, float] = field(default_factory=dict)  # target -> most instructions
    spills: dict[int, int] = field(default_factory=dict)  # target -> most stores to local memory


def tile(**sizes: int) -> dict[str, Any]:
    return dict(sizes)


def matmul_case(
    name: str, signature: dict, mode: dict, cores: dict, gelu: bool, **sizes: Any
) -> Case:
    constants = mode | {"SCALED": signature is not BF16, "GELU_MUL": gelu}
    constants |= {"BLOCKS_FIRST": not mode["GROUPED"], "MORE": 0, "NARROWER": 0} | sizes
    limit = {90: 1.4} if signature is FP8 and sizes["SWAP"] else {}
    return Case(name, matmul.matmul_kernel, signature, constants, cores, per_weight=limit)


def attend_cases() -> list["Case"]:
    """As `attention.configure` launches it off Hopper, for both head sizes of the model."""
    cases: list[Case] = []
    for D, kv in ((256, 8), (512, 2)):
        config = attention.configure(256, 1, 16, kv, D, 100)
        BN, sizes = config["BN"], {"BQ": config["BQ"], "BN": config["BN"]}
        boxes = dict.fromkeys(("keys", "values"), f"tensordesc<bf16[{BN}, {D}]>")
        cores = dict.fromkeys((80, 86, 89, 120, 121), "HMMA")
        cores |= dict.fromkeys((100, 103, 110), "UTCHMMA" if D == 256 else "HMMA")
        options = {name: config[name] for name in ("num_warps", "num_stages")}
        constants = {"Q_HEADS": 16, "KV_HEADS": kv, "D": D, "SPLIT": True} | sizes
        few = {80: 1} if D == 256 else {}
        name = f"attention, heads of {D}"
        kernel = attention.attend_kernel
        cases.append(Case(name, kernel, ATTEND | boxes, constants, cores, options, spills=few))
    return cases


HALF = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
HALF_NARROW = HALF | {90: "HMMA", 100: "HMMA"}  # 16 rows: below the 64 of a warpgroup instruction
CASES = [
    matmul_case("bf16 experts up", BF16, EXPERTS_UP, HALF, True, BM=16, BN=64, BK=64, SWAP=1),
    matmul_case("bf16 dense", BF16, DENSE, HALF, False, BM=64, BN=128, BK=64, SWAP=0),
    matmul_case(
        "fp8 experts up",
        FP8,
        EXPERTS_UP,
        {89: "QMMA", 90: "QGMMA", 100: "UTCQMMA", 120: "QMMA"},
        True,
        BM=16,
        BN=128,
        BK=128,
        SWAP=1,
    ),
    matmul_case(
        "fp8 experts down",
        FP8,
        EXPERTS_DOWN,
        {89: "QMMA", 90: "QGMMA", 120: "QMMA"},
        False,
        BM=32,
        BN=128,
        BK=128,
        SWAP=1,
    ),
    matmul_case(
        "fp8 experts up, 80 rows and fewer",
        FP8,
        EXPERTS_UP,
        {89: "QMMA", 90: "QGMMA"},
        True,
        BM=64,
        MORE=16,
        NARROWER=2,
        BN=128,
        BK=128,
        SWAP=1,
    ),
    matmul_case(
        "fp8 dense",
        FP8,
        DENSE,
        {89: "QMMA", 90: "QGMMA", 120: "QMMA"},
        False,
        BM=64,
        BN=64,
        BK=128,
        SWAP=0,
    ),
    matmul_case(
        "int8 experts up",
        INT8,
        EXPERTS_UP,
        {80: "IMMA", 89: "IMMA", 90: "IGMMA", 120: "IMMA"},
        True,
        BM=16,
        BN=64,
        BK=64,
        SWAP=1,
    ),
    matmul_case(
        "int8 dense", INT8, DENSE, {80: "IMMA", 90: "IGMMA"}, False, BM=64, BN=64, BK=64, SWAP=0
    ),
    Case(
        "nvfp4 experts up",
        nvfp4.nvfp4_kernel,
        NVFP4,
        EXPERTS_UP | {"GELU_MUL": True} | tile(BM=16, BN=64, BK=128),
        HALF_NARROW,
        per_weight={90: 11.0},
    ),
    Case(
        "nvfp4 experts down",
        nvfp4.nvfp4_kernel,
        NVFP4,
        EXPERTS_DOWN | {"GELU_MUL": False} | tile(BM=16, BN=64, BK=128),
        HALF_NARROW,
    ),
    Case(
        "nvfp4 dense",
        nvfp4.nvfp4_kernel,
        NVFP4,
        DENSE | {"GELU_MUL": False} | tile(BM=64, BN=64, BK=128),
        {80: "HMMA", 89: "HMMA", 90: "HGMMA"},
    ),
    Case(
        "nvfp4 fragments up",
        nvfp4_hopper.nvfp4_hopper_kernel,
        FRAGMENTS,
        EXPERTS_UP
        | {"GELU_MUL": True, "num_warps": 8}
        | tile(BM=32, MORE=0, NARROWER=0, BN=128, BK=128, PARTS=1, STAGES=4),
        {90: "HGMMA"},
        {"num_warps": 8},
        {90: 3.7},
    ),
    Case(
        "nvfp4 fragments down",
        nvfp4_hopper.nvfp4_hopper_kernel,
        FRAGMENTS,
        EXPERTS_DOWN
        | {"GELU_MUL": False, "num_warps": 8}
        | tile(BM=32, MORE=0, NARROWER=0, BN=128, BK=128, PARTS=1, STAGES=4),
        {90: "HGMMA"},
        {"num_warps": 8},
        {90: 3.9},
    ),
    Case(
        "nvfp4 fragments up, 80 rows and fewer",
        nvfp4_hopper.nvfp4_hopper_kernel,
        FRAGMENTS,
        EXPERTS_UP
        | {"GELU_MUL": True, "num_warps": 4}
        | tile(BM=64, MORE=16, NARROWER=4, BN=128, BK=128, PARTS=1, STAGES=3),
        {90: "HGMMA"},
        {"num_warps": 4},
        {90: 2.8},
    ),
    Case(
        "nvfp4 fragments dense",
        nvfp4_hopper.nvfp4_hopper_kernel,
        FRAGMENTS | {"x": box(128, 128), "x_more": box(128, 128)},
        DENSE
        | {"GELU_MUL": False, "num_warps": 4}
        | tile(BM=128, MORE=0, NARROWER=0, BN=64, BK=128, PARTS=2, STAGES=3),
        {90: "HGMMA"},
        {"num_warps": 4},
        {90: 3.9},
    ),
    Case(
        "nvfp4 fragments dense, 96 rows",
        nvfp4_hopper.nvfp4_hopper_kernel,
        FRAGMENTS | {"x": box(64, 128), "x_more": box(32, 128)},
        DENSE
        | {"GELU_MUL": False, "num_warps": 4}
        | tile(BM=64, MORE=32, NARROWER=0, BN=64, BK=128, PARTS=2, STAGES=3),
        {90: "HGMMA"},
        {"num_warps": 4},
        {90: 4.6},
    ),
    Case(
        "attention, Hopper",
        attention_hopper.attend_hopper_kernel,
        ATTEND | dict.fromkeys(("q", "keys", "values"), box(64, 256)),
        {"Q_HEADS": 16, "KV_HEADS": 8, "D": 256, "SPLIT": True, "num_warps": 4},
        {90: "HGMMA"},
        {"num_warps": 4},
    ),
    Case(
        "attention, wide heads",
        attention_wide.attend_wide_kernel,
        ATTEND | {"keys": box(64, 512), "values": box(64, 512)},
        {"Q_HEADS": 16, "KV_HEADS": 2, "D": 512, "SPLIT": True, "num_warps": 8},
        {90: "HGMMA"},
        {"num_warps": 8},
    ),
    *attend_cases(),
    Case(
        "lm_head",
        vocabulary.lm_head_kernel,
        {
            "x": "tensordesc<bf16[64, 64]>",
            "w": "tensordesc<bf16[128, 64]>",
            "y": "tensordesc<bf16[64, 64]>",
            "cap": "fp32",
        }
        | dict.fromkeys(("M", "V", "H", "programs"), "i32"),
        tile(HARDWARE=True, BM=64, BN=128, BK=64),
        HALF,
        {"num_warps": 8, "num_stages": 3},
    ),
    Case(
        "lm_head, Hopper",
        vocabulary_hopper.lm_head_hopper_kernel,
        {"x": box(128, 64), "w": box(256, 64), "y": box(64, 64), "cap": "fp32"}
        | dict.fromkeys(("M", "V", "H", "programs"), "i32"),
        {"STAGES": 4},
        {90: "HGMMA"},
        {"num_warps": 4},
    ),
    Case(
        "soft embedding",
        vocabulary.split_k_kernel,
        {"p": "tensordesc<bf16[64, 64]>", "embedding": "tensordesc<bf16[64, 128]>"}
        | {"partial": "*fp32"}
        | dict.fromkeys(("M", "V", "H", "length"), "i32"),
        tile(BM=64, BN=128, BK=64),
        HALF,
    ),
]
QUICK = {
    ("fp8 experts up", 89), ("fp8 experts up", 90), ("fp8 experts down", 90),
    ("fp8 experts up, 80 rows and fewer", 90),
    ("nvfp4 fragments up", 90), ("nvfp4 fragments down", 90),
    ("nvfp4 fragments up, 80 rows and fewer", 90),
    ("nvfp4 fragments dense", 90), ("attention, Hopper", 90), ("attention, wide heads", 90),
    ("nvfp4 experts up", 80),
    ("int8 dense", 80), ("attention, heads of 256", 80), ("attention, heads of 512", 89),
    ("attention, heads of 256", 120), ("attention, heads of 512", 120),
    ("lm_head", 90), ("lm_head, Hopper", 90), ("soft embedding", 90), ("bf16 experts up", 100),
}  # fmt: skip
MATRIX = [
    pytest.param(case, target, id=f"{case.name} sm_{target}",
                 marks=[] if (case.name, target) in QUICK else [pytest.mark.slow])
    for case in CASES for target in case.tensor_core
]  # fmt: skip


@pytest.mark.parametrize(("case", "target"), MATRIX)
def test_machine_code(case: Case, target: int) -> None:
    constants = dict(case.constants)
    if "CHAINED" in case.kernel.arg_names:
        constants["CHAINED"] = target >= 90
    report = compile_for(target, case.kernel, case.signature, constants, **case.options)
    most = case.spills.get(target, 0)
    assert report.spills <= most
    assert report.stack <= 8 * most
    assert report.shared <= SHARED_LIMIT[target] * 1024
    assert case.tensor_core[target] in report.tensor_core, sorted(report.tensor_core)
    if target in case.per_weight:
        threads = case.options["num_warps"] * 32
        weights = case.constants["BN"] * case.constants["BK"] / threads
        assert 0 < report.loop_instructions / weights <= case.per_weight[target]


def test_quick_cases_exist() -> None:
    known = {(case.name, target) for case in CASES for target in case.tensor_core}
    assert known >= QUICK


def test_every_kernel_has_a_case() -> None:
    """Every kernel that the package can launch is compiled by one of this file's tests."""
    compiled = {case.kernel for case in CASES} | {kernel for kernel, *_ in BETWEEN + SAMPLER}
    compiled |= {routing.route_kernel, quantize.quantize_rows_kernel}
    names = [module.name for module in pkgutil.iter_modules(fused_dequant.__path__)]
    there = {
        value
        for name in names
        for attribute, value in vars(importlib.import_module(f"fused_dequant.{name}")).items()
        if attribute.endswith("_kernel") and isinstance(value, KernelInterface)
    }
    assert len(there) > 20
    missing = {kernel.__name__ for kernel in there - compiled}
    assert not missing, f"kernels without a case: {missing}"


COUNTS = dict.fromkeys(("L", "V", "N", "ranges", "B"), "i32")
SAMPLER_POINTERS = (
    {"logits": "*bf16", "seeds": "*i64", "canvas_index": "*i64", "step": "*i32", "finished": "*i1"}
    | dict.fromkeys(("schedule", "tops", "sums", "moments", "probability", "entropy"), "*fp32")
    | dict.fromkeys(("sampled", "replacement", "argmax", "new_argmax", "canvas", "history"), "*i64")
    | {"places": "*i32", "accepted": "*i1", "inverse_temperature": "*fp32"}
    | {"bound": "fp32", "confidence": "fp32"}
)
HEADS = dict.fromkeys(("qkv", "q_weight", "k_weight", "cos", "sin", "q", "keys", "values"), "*bf16")
HEADS |= {"slots": "*i32", "positions": "*i32", "n": "i32", "capacity": "i32", "eps": "fp32"}
COMBINE = {"parts": "*fp16", "largest": "*fp32", "total": "*fp32", "out": "*i8", "scale": "*fp32"}
COMBINE |= {"lines": "i32"}
LAYER = dict.fromkeys(("h", "o", "w_post", "w_dense", "w_experts", "w_router", "h_out"), "*bf16")
LAYER |= dict.fromkeys(("x_router", "dense", "experts", "w_1", "w_2", "w"), "*bf16")
LAYER |= {"scalar": "*bf16", "w_next": "*bf16", "H": "i32", "eps": "fp32", "root": "fp32"}
LAYER |= dict.fromkeys(("x_dense", "x_experts", "x"), "*i8")
LAYER |= dict.fromkeys(("dense_scale", "experts_scale", "x_scale"), "*fp32")
LAYER |= {"tokens": "*i64", "embedding": "*bf16", "update": "*bf16", "factor": "fp32", "y": "*bf16"}
LAYER |= {"weight": "*bf16", "gate_up": "*bf16", "K": "i32"}
ROUTER = {"x": "*bf16", "w": "*bf16", "partial": "*fp32", "M": "i32", "E": "i32", "K": "i32"}
ROUTER |= {"per_expert_scale": "*bf16", "ids": "*i32", "weights": "*fp32"}
SOFT = dict.fromkeys(("anchors", "total", "inverse_temperature", "partial"), "*fp32")
SOFT |= {"logits": "*bf16", "p": "*bf16", "out": "*bf16"} | dict.fromkeys(
    ("M", "V", "H", "length"), "i32"
)
ROW = {"LARGEST": 127.0, "BLOCK": 4096}
BOTH = {"DENSE": 127.0, "EXPERTS": 127.0, "BLOCK": 4096}
BETWEEN = [  # kernel, signature, constants, warps
    *(
        (attention.heads_kernel, HEADS, {"Q_HEADS": 16, "KV_HEADS": k, "D": d, "SHARED": k == 2}, 4)
        for k, d in ((8, 256), (2, 512))
    ),
    *(
        (kernel, COMBINE, {"SPLITS": 4, "D": 256} | sizes, 8)
        for kernel, sizes in (
            (attention.combine_kernel, {"LINES": 8}),
            (attention.combine_quantized_kernel, {"HEADS": 16, "LARGEST": 127.0}),
        )
    ),
    (residual.after_attention_kernel, LAYER, BOTH, 16),
    (residual.after_experts_kernel, LAYER, ROW | {"CHOICES": 8}, 8),
    (residual.begin_kernel, LAYER, ROW | {"UPDATED": True, "NORMED": True}, 8),
    (residual.scaled_norm_kernel, LAYER | {"x": "*bf16"}, {"BLOCK": 4096}, 8),
    (residual.gelu_mul_kernel, LAYER, {"BLOCK": 1024}, 4),
    (vocabulary.exponential_kernel, SOFT, {"HARDWARE": True, "EIGHTS": 256}, 8),
    (vocabulary.reduce_kernel, SOFT, {"SPLITS": 6, "RANGES": 8, "BLOCK": 1024}, 4),
    (router.logits_kernel, ROUTER, {"STEPS": 2, "EXPERTS": 128, "BM": 64, "BK": 256}, 8),
    (
        input_rounding.round_nvfp4_kernel,
        {"x": "*bf16", "experts": "*i32", "global_scale": "*fp32", "y": "*bf16", "K": "i32"},
        {"TOPK": 8, "EACH": True, "GROUPS": 32},
        4,
    ),
    (router.choose_kernel, ROUTER, {"SPLITS": 11, "TOPK": 8, "EXPERTS": 128}, 1),
]
SAMPLER = [  # kernel, constants, warps
    (sampling.statistics_kernel, {"RANGE": 4096, "EVEN": True}, 4),
    (sampling.draw_kernel, {"RANGE": 4096, "RANGES": 64}, 4),
    (sampling.accept_kernel, {"STABILITY": 1, "POSITIONS": 256, "COLUMNS": 32}, 16),
]


@pytest.mark.parametrize(
    "target",
    [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(120, marks=pytest.mark.slow)],
)
def test_elementwise_kernels(target: int) -> None:
    """Kernels without a tensor-core instruction: they must compile unspilled."""
    pointers = ("ids", "slots", "block_expert", "block_rows", "block_count")
    route = dict.fromkeys(pointers, "*i32") | {"total": "i32"}
    sizes = {"E": 128, "EXPERTS": 128, "BLOCK": 32, "PADDING": 32, "CHUNK": 8192}
    sizes |= {"CHAINED": target >= 90}
    reports = [compile_for(target, routing.route_kernel, route, sizes, num_warps=8)]
    if target >= 89:
        rows = {"x": "*bf16", "q": "*fp8e4nv", "scale": "*fp32", "M": "i32", "K": "i32"}
        constants = {"GELU_MUL": True, "LARGEST": 448.0, "ROWS": 1, "BLOCK": 4096}
        constants |= {"CHAINED": target >= 90}
        reports.append(
            compile_for(target, quantize.quantize_rows_kernel, rows, constants, num_warps=8)
        )
    chained = {"CHAINED": target >= 90}
    sampler = [(k, SAMPLER_POINTERS | COUNTS, c, warps) for k, c, warps in SAMPLER]
    for kernel, signature, constants, warps in BETWEEN + sampler:
        own = chained if "CHAINED" in kernel.arg_names else {}
        reports.append(compile_for(target, kernel, signature, constants | own, num_warps=warps))
    assert all(report.spills == 0 and report.stack == 0 for report in reports)
