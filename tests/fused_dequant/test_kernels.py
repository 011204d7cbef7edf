"""Every kernel against float64, on an NVIDIA GPU or, with TRITON_INTERPRET=1, in Triton's interpreter.

`test_every_kernel_in_the_interpreter` runs this file in a process of its own with the interpreter on.
One error, relative Frobenius against float64 of the dequantized operands, and one tolerance a format:
a bf16 result alone costs 1.6e-3; the experts round twice more (hidden rows, slots before the sum).
"""

import re
import sys
from functools import partial
from pathlib import Path
from types import FrameType

import fused_dequant as fd
import pytest
import torch
from fused_dequant import formats, reference, weights
from fused_dequant.formats import EIGHT_BIT
from fused_dequant.reference import relative_error
from fused_dequant.tune import cases
from fused_dequant.tune.cases import rounded
from fused_dequant.weights import fragments, tuning, w4a16
from triton.runtime.jit import KernelInterface

from tests.support.kernels_support.device import DEVICE, HOPPER, INTERPRETED, MARKS

pytestmark = MARKS

TOLERANCE = {"bf16": 2.5e-3, "fp8": 3.5e-3, "int8": 2.5e-3, "nvfp4": 2.5e-3, "mxfp4": 2.5e-3}
EXPERTS_TOLERANCE = {"bf16": 4e-3, "fp8": 2e-2, "int8": 1e-2, "nvfp4": 4e-3, "nvfp4_e4m3": 2e-2}
EXPERTS_TOLERANCE["mxfp4"] = 4e-3
SCHEMES = ("bf16", "fp8", "int8", "nvfp4", "mxfp4")
OF_EXPERTS = SCHEMES if INTERPRETED else (*SCHEMES, "nvfp4_e4m3")  # which is fp8 but on Hopper
SHAPES = [(1, 64, 64), (17, 80, 208), (64, 144, 192)]
if not INTERPRETED:
    SHAPES += [
        (256, 4096, 2816),
        (255, 2816, 2112),
        (256, 2816, 4096),
        (1024, 2816, 704),
        (7, 1408, 2816),
    ]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    actual, expected = actual.cpu(), expected.cpu()
    error = relative_error(actual, expected)
    if error <= tolerance:
        return
    worst = int((actual.double() - expected).abs().argmax())
    raise AssertionError(
        f"relative error {error:.2e} > {tolerance:.1e}; worst element {worst}: "
        f"{actual.flatten()[worst]} for {expected.flatten()[worst]}"
    )


def summed(y: torch.Tensor, ids: torch.Tensor, experts: int) -> torch.Tensor:
    """What `after_experts` adds up: choices of experts that there are; others were not written."""
    routed = ((ids >= 0) & (ids < experts))[..., None]
    return torch.where(routed, y, 0).double().sum(1)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_linear(scheme: str, M: int, N: int, K: int) -> None:
    K += K % 32 if scheme == "mxfp4" else 0
    x = cases.random_tokens(M, K, DEVICE)
    weight = cases.random_weight(scheme, 1, N, K, DEVICE)
    expected = rounded(x, scheme) @ weights.dequantize(weight, torch.float64)[0].T
    assert_close(fd.linear(x, weight), expected, TOLERANCE[scheme])


@pytest.mark.parametrize(("swap", "more"), [(0, 0), (1, 0), (1, 16)])
@pytest.mark.parametrize("scheme", ["bf16", "fp8", "int8"])
def test_operand_orders_and_two_accumulators(scheme: str, swap: int, more: int) -> None:
    x = cases.random_tokens(39, 96, DEVICE)
    weight = cases.random_weight(scheme, 1, 80, 96, DEVICE)
    q, scale = x, None
    if scheme in EIGHT_BIT:
        q, scale = formats.quantize_rows(x, EIGHT_BIT[scheme])
    config = {"BM": 16, "MORE": more, "BN": 64, "BK": 64, "SWAP": swap}
    config |= {"num_warps": 4, "num_stages": 3}
    y = weight.multiply(q, scale, config)
    expected = rounded(x, scheme) @ weights.dequantize(weight, torch.float64)[0].T
    assert_close(y, expected, TOLERANCE[scheme])


@pytest.mark.parametrize("scheme", OF_EXPERTS)
@pytest.mark.parametrize("tokens", [1, 17] if INTERPRETED else [1, 17, 64, 256, 1024])
def test_experts(scheme: str, tokens: int) -> None:
    """Experts 5 to 7 of 8 get no token; one id of the first token is out of range and adds nothing."""
    hidden, inner, experts, topk = (64, 48, 8, 3) if INTERPRETED else (2816, 704, 16, 8)
    inner += inner % 32 if scheme == "mxfp4" else 0
    gate_up = cases.random_weight(scheme, experts, 2 * inner, hidden, DEVICE)
    down = cases.random_weight(scheme, experts, hidden, inner, DEVICE, seed=5)
    x = cases.random_tokens(tokens, hidden, DEVICE)
    ids, routing_weights = cases.random_routing(
        tokens, experts, topk, DEVICE, used=max(topk, experts - 3)
    )
    ids[0, 0] = experts
    y = summed(fd.routed_experts(x, None, ids, routing_weights, gate_up, down), ids, experts)
    expected = reference.experts(
        x.double(), *(weights.dequantize(w, torch.float64) for w in (gate_up, down)),
        ids, routing_weights, torch.float64, activation=lambda t: rounded(t.to(x.dtype), scheme),
    )  # fmt: skip
    assert_close(y, expected, EXPERTS_TOLERANCE[scheme])


UNEVEN = [0, 1, 15, 16, 17, 32, 33, 48, 49, 64, 65, 80, 81, 130]  # tokens of an expert


@pytest.mark.parametrize(("BM", "MORE", "narrower"), [(32, 32, 3), (64, 16, 4)])
@pytest.mark.parametrize("scheme", OF_EXPERTS)
def test_blocks_are_as_wide_as_their_rows(
    scheme: str, BM: int, MORE: int, narrower: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks computed at 80, 64, 48, 32 or 16 rows, each at its first and last number of rows."""
    fragments = scheme.startswith("nvfp4")
    if scheme == "mxfp4" or (fragments and not HOPPER):
        pytest.skip("only the kernel for sm_90 has narrower blocks of this format")
    hidden, inner = (64, 32) if INTERPRETED else (2816, 704)
    gate_up = cases.random_weight(scheme, len(UNEVEN), 2 * inner, hidden, DEVICE)
    down = cases.random_weight(scheme, len(UNEVEN), hidden, inner, DEVICE, seed=5)
    config = {"BM": BM, "MORE": MORE, "NARROWER": narrower, "BN": 64, "BK": 64, "num_warps": 4}
    config |= {"PARTS": 1, "STAGES": 3} if fragments else {"SWAP": 1, "num_stages": 3}
    chosen: list[str] = []
    monkeypatch.setattr(tuning, "choose", lambda verb, *_: chosen.append(verb) or config)
    ids = torch.arange(len(UNEVEN), dtype=torch.int32).repeat_interleave(torch.tensor(UNEVEN))
    generator = torch.Generator().manual_seed(0)
    ids = ids[torch.randperm(len(ids), generator=generator)][:, None].to(DEVICE)
    x, one = cases.random_tokens(len(ids), hidden, DEVICE), torch.ones(len(ids), 1, device=DEVICE)
    given, between = (x, None), None
    if INTERPRETED and scheme in EIGHT_BIT:  # by torch: a program a row takes the interpreter long
        between = partial(formats.quantize_rows, dtype=EIGHT_BIT[scheme])
        given = between(x)
    y = fd.routed_experts(*given, ids, one, gate_up, down, between)[:, 0]
    assert chosen == ["experts", "experts"]
    expected = reference.experts(
        x.double(), *(weights.dequantize(w, torch.float64) for w in (gate_up, down)), ids, one,
        torch.float64, activation=lambda t: rounded(t.to(x.dtype), scheme),
    )  # fmt: skip
    assert_close(y, expected, EXPERTS_TOLERANCE[scheme])


@pytest.mark.parametrize("scheme", OF_EXPERTS)
def test_all_tokens_to_one_expert(scheme: str) -> None:
    gate_up = cases.random_weight(scheme, 4, 64, 64, DEVICE)
    down = cases.random_weight(scheme, 4, 64, 32 if INTERPRETED else 64, DEVICE, seed=5)
    if not INTERPRETED:
        gate_up = cases.random_weight(scheme, 4, 128, 64, DEVICE)
    x = cases.random_tokens(40, 64, DEVICE)
    ids = torch.full((40, 1), 2, dtype=torch.int32, device=DEVICE)
    one = torch.ones(40, 1, device=DEVICE)
    y = fd.routed_experts(x, None, ids, one, gate_up, down)[:, 0]
    expected = reference.experts(
        x.double(), *(weights.dequantize(w, torch.float64) for w in (gate_up, down)), ids, one,
        torch.float64, activation=lambda t: rounded(t.to(x.dtype), scheme),
    )  # fmt: skip
    assert_close(y, expected, EXPERTS_TOLERANCE[scheme])


@pytest.mark.parametrize("scheme", EIGHT_BIT)
def test_experts_of_quantized_tokens(scheme: str) -> None:
    """As a norm's kernel hands them out: the same bits as of bf16 tokens."""
    gate_up = cases.random_weight(scheme, 4, 128, 64, DEVICE)
    down = cases.random_weight(scheme, 4, 64, 64, DEVICE, seed=5)
    x = cases.random_tokens(9, 64, DEVICE)
    ids, routing_weights = cases.random_routing(9, 4, 2, DEVICE)
    quantized = fd.quantize_rows(x, gate_up.scheme)
    y = fd.routed_experts(*quantized, ids, routing_weights, gate_up, down)
    assert torch.equal(y, fd.routed_experts(x, None, ids, routing_weights, gate_up, down))


def test_the_walk_of_an_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that rows pass from `routed_experts` to their kernels are those of structure.md.

    Kernels are launched, and do nothing: what they compute leads nowhere else.
    """
    page = (Path(__file__).parents[2] / "docs" / "structure.md").read_text()
    walk = page.split("## The walk of an activation")[1].split("\n## ")[0]
    told = re.findall(r"`(\w+\.\w+)\(", walk)
    weight = [cases.random_weight("fp8", 4, *shape, DEVICE) for shape in ((128, 64), (64, 64))]
    x = fd.quantize_rows(cases.random_tokens(9, 64, DEVICE), "fp8")
    chosen = cases.random_routing(9, 4, 2, DEVICE)
    seen: list[str] = []
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda *_: lambda *_, **__: None)

    def note(frame: FrameType, event: str, _: object) -> None:
        path, arguments = Path(frame.f_code.co_filename), frame.f_locals.values()
        kernel = "_kernel" in frame.f_code.co_name  # interpreted ones are Python too
        if event == "call" and Path(str(fd.__file__)).parent in path.parents and not kernel:
            rows = [a for a in arguments if isinstance(a, torch.Tensor) and a.dim() == 2]
            if any(a.dtype in (torch.bfloat16, torch.float8_e4m3fn) for a in rows):
                seen.append(f"{path.stem}.{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        fd.routed_experts(*x, *chosen, *weight)
    finally:
        sys.setprofile(None)
    assert seen == told
    assert 0 < len(told) <= 8


def test_choices_before_their_sum() -> None:
    """Addend c of a token is what its choice c alone gives."""
    gate_up = cases.random_weight("bf16", 8, 128, 64, DEVICE)
    down = cases.random_weight("bf16", 8, 64, 64, DEVICE, seed=5)
    x = cases.random_tokens(5, 64, DEVICE)
    ids, routing_weights = cases.random_routing(5, 8, 3, DEVICE)
    parts = fd.routed_experts(x, None, ids, routing_weights, gate_up, down)
    assert parts.shape == (5, 3, 64)
    for choice in range(3):
        one = slice(choice, choice + 1)
        alone = ids[:, one].contiguous(), routing_weights[:, one].contiguous()
        own = fd.routed_experts(x, None, *alone, gate_up, down)[:, 0]
        assert_close(parts[:, choice], own.double(), 1e-3)


@pytest.mark.parametrize("experts", [6, 21])
@pytest.mark.parametrize(("few", "most"), [(256, 9), (0, 9), (0, 2)])  # 1, 3 and 2 chunks
def test_routing_sorts_every_slot_once(
    few: int, most: int, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 132 choices some are of no expert; a program places 32 or 16 of them."""
    from fused_dequant.products import routing

    monkeypatch.setattr(routing, "FEW", few)
    monkeypatch.setattr(routing, "CHUNK", 64)
    monkeypatch.setattr(routing, "MOST", most)
    monkeypatch.setattr(routing, "PIECE", 64 if few else 16)
    ids = torch.randint(-1, experts + 1, (33, 4), dtype=torch.int32, device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *shape, **kind: torch.full(shape, -7, **kind))
        blocks = routing.route(ids, experts, 16)
    used = int(blocks.block_count)
    assert (blocks.slots[used * 16 :] == -7).all(), "written past the blocks in use"
    slots = blocks.slots[: used * 16].cpu().reshape(used, 16)
    owner = blocks.block_expert[:used].cpu()
    assert ((slots < ids.numel()).sum(1) == blocks.block_rows[:used].cpu()).all()
    assert (slots <= ids.numel()).all()
    assert set(blocks.block_rows[:used].tolist()) - {16}, "no block is padded: nothing is tested"
    seen = slots[slots < ids.numel()]
    valid = ((ids >= 0) & (ids < experts)).flatten().cpu().nonzero().flatten()
    assert seen.sort().values.tolist() == valid.tolist()
    flat = ids.flatten().cpu()
    for row, expert in zip(slots, owner, strict=True):
        members = row[row < ids.numel()]
        assert (flat[members.long()] == expert).all()
        assert members.tolist() == sorted(members.tolist())
    assert used <= blocks.max_blocks


@pytest.mark.skipif(not HOPPER, reason="its kernels run on sm_90 alone")
def test_experts_of_many_rows_have_the_bits_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 256, computed at each height, and of 80 at most: the same sums in one order."""
    counts = [0, 1, 31, 32, 33, 64, 65, 96, 97, 128, 129, 192, 193, 255, 256, 257, 300, 601]
    gate_up = cases.random_weight("nvfp4_e4m3", len(counts), 1408, 2816, DEVICE)
    down = cases.random_weight("nvfp4_e4m3", len(counts), 2816, 704, DEVICE, seed=5)
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=generator)].view(-1, 2)
    share = torch.rand(ids.shape, generator=generator).to(DEVICE)
    x, ids = cases.random_tokens(len(ids), 2816, DEVICE), ids.to(DEVICE)
    many, few = {"BM": 256, "NARROWER": 4}, {"BM": 64, "MORE": 16, "NARROWER": 4, "BN": 128}
    few |= {"PARTS": 1, "STAGES": 4, "num_warps": 4}
    configs = [
        {2816: many | {"BK": 128, "RING": 5}, 704: many | {"BK": 64, "RING": 9}},
        {2816: few | {"BK": 128}, 704: few | {"BK": 64}},
    ]
    found = []
    for own in configs:
        monkeypatch.setattr(tuning, "choose", lambda *product, own=own: own[product[4]])
        found.append(fd.routed_experts(x, None, ids, share, gate_up, down))
    assert found[0].isfinite().all()
    assert torch.equal(*found)


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
@pytest.mark.parametrize("gelu_mul", [False, True])
def test_quantize_rows(scheme: str, gelu_mul: bool) -> None:
    dtype, columns = EIGHT_BIT[scheme], 208
    x = cases.random_tokens(9, columns * (1 + gelu_mul), DEVICE)
    x[3] = 0
    x[4] *= 1e12
    q, scale = fd.quantize_rows(x, scheme, gelu_mul=gelu_mul)
    h = x.double()
    if gelu_mul:
        h = reference.gelu_mul(*h.chunk(2, -1))
    expected_q, expected_scale = formats.quantize_rows(h, dtype)
    assert_close(scale, expected_scale.double(), 1e-6)
    # The last bit of h decides a tie here and there; never more than one step of the format.
    assert (q.float() == expected_q.float()).float().mean() > 0.99
    assert_close(q.double(), expected_q.double(), 2e-2)


def moved(x: torch.Tensor) -> torch.Tensor:
    """Columns in the order of `w4a8`: of each 64, as 4 x 4 groups of 4, transposed."""
    return x.unflatten(-1, (-1, 4, 4, 4)).transpose(-2, -3).flatten(-4)


def test_rows_quantized_for_w4a8_have_their_columns_moved() -> None:
    """Alone and behind a norm; the dense branch keeps its order."""
    x = cases.random_tokens(9, 192, DEVICE)
    plain, scale = fd.quantize_rows(x, "fp8")
    other, same = fd.quantize_rows(x, "nvfp4_e4m3")
    assert torch.equal(other.view(torch.uint8), moved(plain.view(torch.uint8)))
    assert not torch.equal(other.view(torch.uint8), plain.view(torch.uint8))
    assert torch.equal(same, scale)
    norms = tuple(cases.random_tokens(4, 192, DEVICE, seed=3))
    _, dense, experts, _ = fd.after_attention(x, x.flip(0), norms, ("fp8", "fp8"))
    _, kept, other, _ = fd.after_attention(x, x.flip(0), norms, ("fp8", "nvfp4_e4m3"))
    assert torch.equal(kept[0].view(torch.uint8), dense[0].view(torch.uint8))
    assert torch.equal(other[0].view(torch.uint8), moved(experts[0].view(torch.uint8)))
    assert torch.equal(other[1], experts[1])


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "int8", "nvfp4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_damaged_token_damages_itself_alone(scheme: str, value: float) -> None:
    x = cases.random_tokens(17, 64, DEVICE)
    weight = cases.random_weight(scheme, 1, 64, 64, DEVICE)
    clean = fd.linear(x, weight)
    x[5, 7] = value
    damaged = fd.linear(x, weight)
    others = [i for i in range(17) if i != 5]
    assert not damaged[5].isfinite().any()
    assert torch.equal(damaged[others], clean[others])


def test_every_mxfp4_scale_with_every_code_is_exact() -> None:
    """All bytes but e8m0's NaN and the three whose values BF16 cannot hold, or float32 flushes."""
    packed = torch.arange(8, device=DEVICE).repeat(256, 2).byte() * 0x22 + 0x10  # [256, 16]
    scale = torch.arange(256, device=DEVICE).byte()[:, None]
    weight = weights.build("mxfp4", packed[:252], scale[:252])
    x = torch.eye(32, dtype=torch.bfloat16, device=DEVICE)
    expected = torch.tensor([*formats.E2M1, *(-v for v in formats.E2M1)]).double().repeat(2)
    expected = expected * 2.0 ** (scale[:252].cpu().double() - 127)
    found = fd.linear(x, weight).T.double().cpu()
    normal = expected.abs() >= 2.0**-126
    assert torch.equal(found[normal], expected[normal])
    assert found[~normal].abs().max() < 2.0**-125
    assert torch.equal(weights.dequantize(weight, torch.float64)[0].cpu(), expected)


def test_nvfp4_extreme_scales() -> None:
    """Largest, smallest subnormal and zero block scales with every code, exact in float64."""
    packed = torch.randint(0, 256, (64, 64), dtype=torch.uint8, device=DEVICE)
    packed[:, :8] = torch.arange(8, device=DEVICE, dtype=torch.uint8) * 0x22 + 0x10  # all codes
    bytes_ = torch.tensor([0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0x40, 0x30], dtype=torch.uint8)
    scale = bytes_.to(DEVICE).repeat(64, 1).view(torch.float8_e4m3fn)
    weight = weights.build("nvfp4", packed, scale, torch.tensor([128.0], device=DEVICE))
    x = torch.zeros(128, 128, dtype=torch.bfloat16, device=DEVICE)
    x[range(128), range(128)] = 1  # picks out the weight: the result is the decode, exactly
    y = fd.linear(x, weight)
    expected = formats.dequantize_nvfp4(packed, scale, torch.ones(1, device=DEVICE)).T
    assert torch.equal(y.float(), expected)


def test_lm_head_and_soft_embedding() -> None:
    tokens, vocabulary, hidden = (5, 304, 80) if INTERPRETED else (256, 32768 + 8, 2816)
    x = cases.random_tokens(tokens, hidden, DEVICE) * 20
    table = cases.random_weight("bf16", 1, vocabulary, hidden, DEVICE).data[0]
    expected = reference.lm_head(x, table, 30.0, torch.float64)
    assert_close(fd.lm_head(x, table, 30.0), expected, TOLERANCE["bf16"])
    logits = (cases.random_tokens(tokens, vocabulary, DEVICE, seed=3) * 5).contiguous()
    sharpness = torch.linspace(1, 2.5, tokens, device=DEVICE)
    expected = reference.soft_embedding(logits, table, sharpness, torch.float64)
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=DEVICE)
    assert fd.soft_embedding(logits, table, sharpness, out) is out
    assert_close(out, expected, 4e-3)


def test_soft_embedding_of_logits_far_apart() -> None:
    """The first logits of a range say little of the others: late peaks, ranges at -inf, a low rest."""
    V, hidden = 2 * 8 * 1024 + 72, 80
    table = cases.random_weight("bf16", 1, V, hidden, DEVICE).data[0]
    logits = cases.random_tokens(5, V, DEVICE, seed=3) * 5
    logits[0, V - 9] = 4000
    logits[1, 3000], logits[1, V - 2] = 900, 899.5
    logits[2, : V // 2 + 5] = -float("inf")
    logits[3, 4000:] -= 300
    sharpness = torch.tensor([0.7, 1.0, 1.5, 1.0, 40.0], device=DEVICE)
    y = fd.soft_embedding(logits, table, sharpness)
    for row in range(5):
        expected = reference.soft_embedding(
            logits[row : row + 1], table, sharpness[row : row + 1], torch.float64
        )
        assert_close(y[row : row + 1], expected, 4e-3)
    assert torch.equal(y[0], table[V - 9])


@pytest.mark.skipif(not HOPPER, reason="needs sm_90")
@pytest.mark.parametrize(("M", "V"), [(1, 304), (130, 32768 + 8), (1024, 4096)])
def test_lm_head_on_hopper(M: int, V: int) -> None:
    """Every element is written; 20 runs are equal bit for bit."""
    from fused_dequant.vocabulary import dense_hopper

    x = cases.random_tokens(M, 2816, "cuda") * 20
    table = cases.random_weight("bf16", 1, V, 2816, "cuda").data[0]
    y = torch.empty(M, V, dtype=torch.bfloat16, device="cuda")
    expected = reference.lm_head(x, table, 30.0, torch.float64)
    first = None
    for _ in range(20):
        y.fill_(float("nan"))
        dense_hopper.lm_head(x, table, 30.0, {"STAGES": 4}, y)
        first = y.clone() if first is None else first
        assert torch.equal(y, first)
    assert_close(y, expected, TOLERANCE["bf16"])


@pytest.mark.skipif(INTERPRETED, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("scheme", OF_EXPERTS)
def test_graph_replay_with_another_routing(scheme: str) -> None:
    gate_up = cases.random_weight(scheme, 16, 1408, 2816, "cuda")
    down = cases.random_weight(scheme, 16, 2816, 704, "cuda", seed=5)
    x = cases.random_tokens(64, 2816, "cuda")
    ids, routing_weights = cases.random_routing(64, 16, 8, "cuda")
    fd.routed_experts(x, None, ids, routing_weights, gate_up, down)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fd.routed_experts(x, None, ids, routing_weights, gate_up, down)
    x.copy_(cases.random_tokens(64, 2816, "cuda", seed=9))
    ids.copy_(cases.random_routing(64, 16, 8, "cuda", used=8, seed=9)[0])
    graph.replay()
    replayed = y.clone()
    graph.replay()
    assert torch.equal(replayed, y), "two runs on the same input differ"
    assert torch.equal(replayed, fd.routed_experts(x, None, ids, routing_weights, gate_up, down))


@pytest.mark.parametrize(
    ("E", "N", "K"), [(2, 128, 704), (1, 64, 64)] + ([] if INTERPRETED else [(128, 1408, 2816)])
)
def test_fragments_are_those_of_torch(E: int, N: int, K: int) -> None:
    """Bit for bit: every code with every scale, blocks of scale 0, a last program that is not full."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (E, N, K // 2), generator=generator).to(torch.uint8)
    scale = torch.randint(0, 127, (E, N, K // 16), generator=generator).to(torch.uint8)
    scale[0, 3:9] = 0
    scale = scale.view(torch.float8_e4m3fn)
    found = fragments.to_fragments(packed.to(DEVICE), scale.to(DEVICE))
    for own, wanted in zip(found, w4a16.to_fragments(packed, scale), strict=True):
        assert torch.equal(own.cpu(), wanted)


@pytest.mark.skipif(not HOPPER, reason="needs sm_90")
def test_fragments_equal_the_plain_loop() -> None:
    """Two kernels, two layouts, one weight: the same products in the same order of K."""
    w = torch.randn(256, 704, device="cuda") / 26
    global_scale = 2688 / w.abs().max()
    packed, scale = formats.quantize_nvfp4(w, global_scale)
    fragments = weights.build("nvfp4", packed, scale, 128 / global_scale)
    assert fragments.scheme == "nvfp4_fragments"
    x = cases.random_tokens(48, 704, "cuda")
    factor = (128 / global_scale).repeat(1, 2)
    config = {"BM": 16, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 2}
    plain = weights.Weight("nvfp4", packed[None], scale[None], factor).multiply(x, None, config)
    assert_close(fd.linear(x, fragments), plain.double(), 2e-3)


@pytest.mark.skipif(not HOPPER, reason="needs sm_90")
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("BM", "MORE", "BN", "warps"), [(64, 32, 64, 4), (128, 0, 64, 4), (64, 0, 128, 8)]
)
def test_dense_tiles_of_fragments(BM: int, MORE: int, BN: int, warps: int, parts: int) -> None:
    """Against float64, K no multiple of BK, odd M; 50 replays equal bit for bit."""
    weight = cases.random_weight("nvfp4", 1, 2816, 2112, "cuda")
    x = cases.random_tokens(200, 2112, "cuda")
    config = {"BM": BM, "MORE": MORE, "BN": BN, "BK": 128, "PARTS": parts, "STAGES": 3}
    config["num_warps"] = warps

    def run() -> torch.Tensor:
        return weight.multiply(x, None, config)

    expected = x.double() @ weights.dequantize(weight, torch.float64)[0].T
    first = run()
    assert_close(first, expected, TOLERANCE["nvfp4"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for _ in range(50):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, first)
