"""Formats, references, dispatch and errors of the kernels, on the CPU; the kernels in the
interpreter.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fused_dequant as fd
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from fused_dequant import formats, reference, weights
from fused_dequant.launch import targets
from fused_dequant.tune import candidates, cases, search
from fused_dequant.weights import tuning, w4a8, w4a16
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels_support import breaking, ptx
from tests.support.kernels_support.device import in_the_interpreter

ROOT = Path(__file__).parents[2]
HOPPER = (9, 0)
KERNELS = (
    "kernels", "denoising", "look", "attention", "residual", "simulated", "gptq_kernels", "w4a4",
    "selftest",
)  # fmt: skip
ALL_SCALES = torch.arange(127, dtype=torch.uint8)  # every non-negative finite e4m3 byte


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> str:
    """What pytest says of each GPU test in the interpreter; of Hessians' alone for `make test-cpus`."""
    if any(item.name == "test_every_kernel_in_the_interpreter" for item in request.session.items):
        return in_the_interpreter(*(f"tests/fused_dequant/test_{name}.py" for name in KERNELS))
    return in_the_interpreter("tests/fused_dequant/test_gptq_kernels.py", "-k", "hessians_are")


def test_every_kernel_in_the_interpreter(interpreted: str) -> None:
    """The GPU tests again, less those that need a GPU."""
    assert interpreted.count(" PASSED ") >= 198


def test_hessians_in_the_interpreter(interpreted: str) -> None:
    assert len(re.findall(r"::test_hessians_are_those_of_torch\[\w+\] PASSED ", interpreted)) == 3


def test_a_cpu_needs_no_triton() -> None:
    """macOS and Windows have none: operations, formats and the runtime's imports go without."""
    program = """
import sys
sys.modules["triton"] = None
import torch, fused_dequant as fd, quantize.runtime.opening
from fused_dequant.tune import cases
from fused_dequant.tune import candidates
weight = cases.random_weight("nvfp4", 1, 32, 64, "cpu")
assert fd.linear(cases.random_tokens(3, 64, "cpu"), weight).shape == (3, 32)
assert not any(name.startswith("triton.") for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@given(st.floats(-6, 6, width=32) | st.integers(-96, 96).map(lambda n: n / 16))  # ties too
@settings(max_examples=150)
def test_encoding_is_to_nearest_with_ties_to_even(value: float) -> None:
    given = torch.tensor([value, 0.0])
    code = int(formats.pack(formats.e2m1_codes(given.clone(), torch.empty(2))))
    assert torch.equal(formats.unpack_e2m1(torch.tensor([code]).byte()), formats.round_e2m1(given))
    distance = (torch.tensor(formats.E2M1) - abs(value)).abs()
    nearest = distance == distance.min()
    assert nearest[code & 7]
    if nearest.sum() > 1:
        assert code % 2 == 0
    assert value == 0 or (code >= 8) == (value < 0)


def test_dequantization_matches_compressed_tensors() -> None:
    packed = torch.randint(0, 256, (32, 64), dtype=torch.uint8)
    scale = ALL_SCALES[torch.randint(0, 127, (32, 8))].view(torch.float8_e4m3fn)
    global_scale = torch.tensor([173.0])
    codes = unpack_fp4_from_uint8(packed, 32, 128, dtype=torch.float32)
    theirs = codes.unflatten(-1, (-1, 16)) * (scale.float() / global_scale)[..., None]
    ours = formats.dequantize_nvfp4(packed, scale, global_scale, torch.float64)
    torch.testing.assert_close(ours.float(), theirs.flatten(-2), rtol=3e-7, atol=0)


def test_fragments_decode_every_code_with_every_scale_exactly() -> None:
    """16 codes x 127 scales in every position a fragment has, bit for bit, and no value elsewhere."""
    packed = torch.randint(0, 256, (2, 256, 512), dtype=torch.uint8)
    bytes_ = ALL_SCALES[torch.randint(0, 127, (2, 256, 64))]
    bytes_[0, :127, 0] = ALL_SCALES
    packed[0, :127, :8] = torch.arange(8, dtype=torch.uint8) * 0x22 + 0x10
    scale = bytes_.view(torch.float8_e4m3fn)
    decoded = w4a16.decode_fragments(*w4a16.to_fragments(packed, scale))
    exact = formats.dequantize_nvfp4(packed, scale, torch.ones(1), torch.float64) / 128
    assert torch.equal(decoded.double(), exact)
    codes = torch.stack((packed & 0xF, packed >> 4), -1).flatten().long()
    pairs = codes * 128 + bytes_.repeat_interleave(16, -1).flatten()
    assert len(pairs.unique()) == 16 * 127


def test_the_decode_assembly_is_the_reference() -> None:
    """The PTX of the Hopper kernel, interpreted, against `decode_fragments`, on random bits."""
    from fused_dequant.products.nvfp4_decode import decode_assembly

    packed = torch.randint(0, 256, (1, 128, 64), dtype=torch.uint8)
    scale = ALL_SCALES[torch.randint(0, 127, (1, 128, 8))].view(torch.float8_e4m3fn)
    words, scales = w4a16.to_fragments(packed, scale)
    # fragment axes: tile, tile, warp, row%8, lane%4, pair of steps, word; scale words have no lane%4
    pairs = words.reshape(1, 2, 2, 4, 8, 4, 2, 2).long() & 0xFFFFFFFF
    scale_words = scales.reshape(1, 2, 2, 4, 8, 1, 2).long().expand(-1, -1, -1, -1, -1, 4, -1)
    operands = {"$8": pairs[..., 0], "$9": pairs[..., 1], "$10": scale_words & 0xFFFFFFFF}
    registers = ptx.run(decode_assembly(), operands)
    decoded = torch.stack([registers[f"${i}"] for i in range(8)], -1)
    halves = torch.stack((decoded & 0xFFFF, decoded >> 16), -1)
    # register = 4 * step + 2 * (k//8) + row//8
    axes = halves.reshape(1, 2, 2, 4, 8, 4, 2, 2, 2, 2, 2).permute(0, 1, 3, 9, 4, 2, 6, 7, 8, 5, 10)
    values = axes.reshape(1, 128, 128).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(values, w4a16.decode_fragments(words, scales))


def codes_and_scales() -> tuple[torch.Tensor, torch.Tensor]:
    """16 codes x 127 scales, and random ones: packed uint8 [2, 256, 64] and scales e4m3 [2, 256, 8]."""
    packed = torch.randint(0, 256, (2, 256, 64), dtype=torch.uint8)
    bytes_ = ALL_SCALES[torch.randint(0, 127, (2, 256, 8))]
    bytes_[0, :127, 0] = ALL_SCALES
    packed[0, :127, :8] = torch.arange(8, dtype=torch.uint8) * 0x22 + 0x10
    return packed, bytes_.view(torch.float8_e4m3fn)


def test_nvfp4_in_fp8_is_the_nearest_e4m3() -> None:
    """Every code with every scale, against torch's own rounding; scales that are too small give 0."""
    packed, scale = codes_and_scales()
    exact = formats.dequantize_nvfp4(packed, scale, torch.ones(1)) / 8
    small = (scale.float() < 0.25).repeat_interleave(16, -1)
    wanted = torch.where(small, 0, exact).to(torch.float8_e4m3fn)
    found = formats.nvfp4_as_e4m3(packed, scale)
    assert torch.equal(found.float(), wanted.float())
    error = (found.double() - exact).norm() / exact.double().norm()
    assert 0.01 < error < 2**-5  # the largest error of one weight
    # e2m1 * scale <= 1.5 where a block counts as zero, of 2,688
    assert float(exact[small].abs().max()) * 8 < 1.5
    weight = weights.build("nvfp4", packed, scale, torch.tensor([[2.0, 4.0]] * 2), in_fp8=True)
    assert weight.scheme == "fp8"
    assert weight.scale is not None
    assert weight.scale[0, :32].tolist() == ([0.125] * 8 + [0.25] * 8) * 2


def test_fragments_of_w4a8_are_the_same_weight() -> None:
    """The layout's own arithmetic in torch and the kernel's PTX, interpreted, to the bit."""
    from fused_dequant.products.nvfp4_decode import e4m3_assembly

    packed, scale = codes_and_scales()
    words, scales = w4a8.to_fragments(packed, scale)
    wanted = formats.nvfp4_as_e4m3(packed, scale).view(torch.uint8)
    assert torch.equal(w4a8.decode_fragments(words, scales).view(torch.uint8), wanted)
    # fragment axes: experts, tile, tile, warp, row%8, lane%4, word
    own = words.reshape(2, 4, 2, 4, 8, 4, 4).long() & 0xFFFFFFFF
    pair = scales.view(torch.int16).reshape(2, 4, 2, 4, 8, 4).long() & 0xFFFFFFFF
    operands = {f"${8 + i}": own[..., i] for i in range(4)} | {"$12": pair}
    registers = ptx.run(e4m3_assembly(), operands)
    decoded = torch.stack([registers[f"${i}"] for i in range(8)], -1)
    found = torch.stack([decoded >> 8 * i & 0xFF for i in range(4)], -1).to(torch.uint8)
    # register = 4 * step + 2 * half + row//8; the product's column 32 step + 16 half + 4 t + j
    axes = found.reshape(2, 4, 2, 4, 8, 4, 2, 2, 2, 4).permute(0, 1, 3, 8, 4, 2, 6, 7, 5, 9)
    product = axes.reshape(2, 256, 128)
    assert torch.equal(product.unflatten(-1, (-1, 4, 4, 4)).transpose(-2, -3).flatten(-4), wanted)


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xC0, 0xFF])
def test_fragments_refuse_damaged_scales(byte: int) -> None:
    packed = torch.zeros(1, 64, 32, dtype=torch.uint8)
    scale = torch.full((1, 64, 4), 0x38, dtype=torch.uint8)
    scale[0, 3, 2] = byte
    with pytest.raises(ValueError, match="negative or NaN"):
        w4a16.to_fragments(packed, scale.view(torch.float8_e4m3fn))


def test_fragments_refuse_odd_shapes() -> None:
    packed = torch.zeros(1, 80, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiples of 64, got N=80, K=64"):
        w4a16.to_fragments(packed, torch.zeros(1, 80, 4).to(torch.float8_e4m3fn))


def test_dense_products_of_w4a8_are_fp8_s() -> None:
    from fused_dequant.products import nvfp4_hopper

    weight = cases.blank_weight("nvfp4_e4m3", 1, 64, 64, "cpu")
    x = torch.zeros(1, 64).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="multiplied in FP8 as scheme fp8"):
        nvfp4_hopper.launch(weight, x, torch.ones(1), {})


def test_configurations_that_do_not_fit_are_refused() -> None:
    """Tiles of more channels than N, and blocks of other rows than the choices were sorted into."""
    from fused_dequant.products import nvfp4_hopper, routing

    blank = torch.empty(4, dtype=torch.int32)
    blocks = routing.Routing(blank, blank, blank, blank, block=16, topk=2)
    weight = cases.blank_weight("nvfp4_e4m3", 2, 192, 128, "cpu")
    x, many = torch.zeros(1, 128).to(torch.float8_e4m3fn), {"BM": 256, "BK": 64, "RING": 9}
    with pytest.raises(ValueError, match="192 channels are no multiple of a tile's 128"):
        nvfp4_hopper.launch(weight, x, torch.ones(1), many, blocks)
    weight = cases.blank_weight("nvfp4_e4m3", 2, 256, 128, "cpu")
    with pytest.raises(ValueError, match="blocks of 16 rows, but a configuration for others"):
        nvfp4_hopper.launch(weight, x, torch.ones(1), many, blocks)


def test_rows_of_zeros_and_damage() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, -3.0], [float("nan"), 1.0], [float("inf"), 1.0]])
    for dtype in (torch.float8_e4m3fn, torch.int8):
        q, scale = formats.quantize_rows(x, dtype)
        assert scale[0] == 1
        assert q[0].float().tolist() == [0, 0]
        assert float(q[1, 1]) * float(scale[1]) == pytest.approx(-3.0)
        assert scale[2:].isnan().all()


def test_interleaved_rows() -> None:
    gate, up = torch.arange(16.0)[:, None], torch.arange(100.0, 116.0)[:, None]
    rows = formats.interleave_gate_up(gate, up).flatten()
    assert rows[:16].tolist() == [*range(8), *range(100, 108)]
    with pytest.raises(ValueError, match="rows % 8"):
        formats.interleave_gate_up(gate[:4], up[:4])


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "int8", "nvfp4", "mxfp4"])
def test_cpu_operations_follow_the_reference(scheme: str) -> None:
    weight = cases.random_weight(scheme, 1, 48, 64, "cpu")
    x = cases.random_tokens(6, 64, "cpu")
    exact = x.double() @ weights.dequantize(weight, torch.float64)[0].T
    rounding = {"bf16": 3e-3, "nvfp4": 3e-3, "mxfp4": 3e-3, "fp8": 4e-2, "int8": 1.5e-2}[scheme]
    assert reference.relative_error(fd.linear(x, weight), exact) < rounding
    assert torch.equal(fd.linear(x.reshape(2, 3, 64), weight).flatten(0, 1), fd.linear(x, weight))
    gate_up = cases.random_weight(scheme, 4, 64, 64, "cpu")
    down = cases.random_weight(scheme, 4, 64, 32, "cpu")
    ids, routing_weights = cases.random_routing(6, 4, 2, "cpu")
    y = fd.routed_experts(x, None, ids, routing_weights, gate_up, down).float().sum(1)
    dense = [weights.dequantize(w, torch.float64) for w in (gate_up, down)]
    exact = reference.experts(x, *dense, ids, routing_weights, torch.float64)
    assert reference.relative_error(y, exact) < 2 * rounding


def test_split_global_scales_of_gate_and_up() -> None:
    gate, up = torch.randn(2, 1, 16, 64)
    scales = torch.tensor([2688 / 2.0, 2688 / 5.0])
    parts = [formats.quantize_nvfp4(w, s) for w, s in zip((gate, up), scales, strict=True)]
    packed = formats.interleave_gate_up(parts[0][0], parts[1][0])
    scale = formats.interleave_gate_up(*(p[1].view(torch.uint8) for p in parts))
    weight = weights.build("nvfp4", packed, scale.view(torch.float8_e4m3fn), 128 / scales[None])
    expected = formats.interleave_gate_up(
        *(formats.dequantize_nvfp4(*p, s) for p, s in zip(parts, scales, strict=True))
    )
    torch.testing.assert_close(weights.dequantize(weight), expected)


def test_errors_name_what_is_wrong() -> None:
    x = cases.random_tokens(5, 64, "cpu")
    fp8 = cases.random_weight("fp8", 1, 48, 64, "cpu")
    codes, scale = fd.quantize_rows(x, "int8")
    with pytest.raises(ValueError, match="K = 64"):
        fd.linear(x[:, :32], fp8)
    with pytest.raises(ValueError, match=r"int8 do not fit a weight of scheme fp8"):
        fd.linear(codes, fp8, scale)
    down = cases.random_weight("int8", 1, 64, 24, "cpu")
    ids, one = torch.zeros(5, 1, dtype=torch.int32), torch.ones(5, 1)
    with pytest.raises(ValueError, match="one scheme for both"):
        fd.routed_experts(x, None, ids, one, fp8, down)
    with pytest.raises(ValueError, match=r"int8 do not fit a weight of scheme fp8"):
        fd.routed_experts(codes, scale, ids, one, fp8, fp8)
    with pytest.raises(ValueError, match="fp8 or int8, not nvfp4"):
        fd.quantize_rows(x, "nvfp4")
    with pytest.raises(ValueError, match="unknown scheme 'fp6'"):
        fd.require("fp6", torch.device("cpu"))


def test_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    cuda = torch.device("cuda")
    fd.require("nvfp4", cuda)
    with pytest.raises(
        ValueError, match=r"fp8 needs compute capability 8\.9 or newer; NVIDIA A100 has 8\.0"
    ):
        fd.require("fp8", cuda)
    with pytest.raises(ValueError, match=r"nvfp4_fragments needs compute capability 9\.0;"):
        fd.require("nvfp4_fragments", cuda)


def test_tuning_tables_are_complete() -> None:
    """Each entry is a configuration its kernel takes; the experts' two products share their BM."""
    files = list(tuning.SHIPPED.glob("*.json"))
    assert files, "no tuning table is shipped"
    for file in files:
        table = json.loads(file.read_text())
        assert file == tuning.table_path(table["device"])
        assert targets.name_of(HOPPER) == table["capability"]
        assert table["kernels"]
        for key, buckets in table["kernels"].items():
            verb, scheme, shape = key.split("/")
            N, K = map(int, shape.split("x"))
            for tokens, config in buckets.items():
                known = [set(tuning.default(verb, scheme, int(tokens), N, K))]
                known += [{"STAGES"}] if verb == "lm_head" else []  # the kernel for Hopper
                if scheme == "nvfp4_e4m3":  # that of experts of many rows
                    known += [{"BM", "NARROWER", "BK", "RING"}]
                assert set(config) in known, key
        for scheme in ("bf16", "fp8", "int8", "nvfp4_fragments", "nvfp4_e4m3"):
            up = table["kernels"][f"experts/{scheme}/1408x2816"]
            down = table["kernels"][f"experts/{scheme}/2816x704"]
            rows = [{m: tuning.block_rows(c) for m, c in t.items()} for t in (up, down)]
            assert rows[0] == rows[1]


@pytest.mark.parametrize(("tokens", "fullest"), [(256, 94), (1024, 187)])
def test_tuning_routes_as_unevenly_as_a_model(tokens: int, fullest: int) -> None:
    """Mean over 30 layers of the tokens of the fullest expert, against a random 26B model's."""
    found = {0.0: 0.0, cases.SPREAD[tokens]: 0.0}
    for spread in found:
        for seed in range(30):
            ids, _ = cases.random_routing(tokens, 128, 8, "cpu", spread=spread, seed=seed)
            found[spread] += float(ids.flatten().long().bincount(minlength=128).max()) / 30
    assert found[cases.SPREAD[tokens]] == pytest.approx(fullest, rel=0.1)
    assert found[0.0] < 0.6 * fullest


def test_tuning_goes_on_without_a_candidate_that_broke_its_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (timed,) = search.Timer(breaking.time_candidates)(
        candidates.Product("linear", "fp8", 3, 64, 64)
    )
    assert timed[1] == {"BM": 3}
    broken = re.search(r"an illegal instruction in process (\d+)", caplog.text)
    assert broken
    assert timed[0] != float(broken[1]), "the product ran again in the broken process"


def test_candidates_fit_the_registers_and_hold_what_is_shipped() -> None:
    """No candidate past the limit, and each shipped configuration of an expert is a candidate."""
    table = json.loads(tuning.table_path("NVIDIA H200").read_text())["kernels"]
    seen = 0
    for product in candidates.products(HOPPER):
        own = list(candidates.candidates(product, HOPPER))
        assert own, product
        for config in own:
            if config.keys() == {"STAGES"}:  # lm_head on Hopper: one tile, checked by compiling it
                continue
            channels, warps = (128, 8) if "RING" in config else (config["BN"], config["num_warps"])
            accumulators = tuning.block_rows(config) * channels / (32 * warps)
            assert accumulators <= candidates.MAX_ACCUMULATORS
        checked = product.verb.startswith("experts") or product.verb == "lm_head"
        if checked and (shipped := table[product.key].get(str(product.M))):
            assert shipped in own, product
            seen += 1
    assert seen == 54


@pytest.mark.parametrize("target", targets.TARGETS)
def test_every_target_tunes_what_it_runs(target: targets.Capability) -> None:
    """Its schemes and no others, in pairs of experts; all that is launched without a table is tried."""
    found = list(candidates.products(target))
    nvfp4 = "nvfp4_fragments" if target == HOPPER else "nvfp4"
    schemes = {"bf16", "int8", nvfp4} | ({"fp8"} if target >= (8, 9) else set())
    schemes |= {"nvfp4_e4m3"} if target == HOPPER else set()
    assert {p.scheme for p in found} == schemes | ({"nvfp4_e2m1"} if target >= (10, 0) else set())
    for product in found:
        own = list(candidates.candidates(product, target))
        default = tuning.default(
            product.table_verb, product.scheme, product.M, product.N, product.K
        )
        assert own.count(default) == 1
        assert len(own) > 5
        assert ({"STAGES"} in [set(c) for c in own]) == (
            product.verb == "lm_head" and target == HOPPER
        )
    ups = [i for i, p in enumerate(found) if p.verb == "experts_up"]
    assert [found[i + 1].verb for i in ups] == ["experts_down"] * len(ups)


def test_kernels_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate of every product has its kernel among those to compile."""
    jobs = [(p, c) for p in candidates.products(HOPPER) for c in candidates.candidates(p, HOPPER)]
    kernels: list[tuple[candidates.Product, tuning.Config]] = []
    pool = SimpleNamespace(imap_unordered=lambda _, own, chunksize: kernels.extend(own) or [])
    context = SimpleNamespace(Pool=lambda: nullcontext(pool))
    monkeypatch.setattr(search.multiprocessing, "get_context", lambda _: context)
    search.compile_all(jobs)
    assert len(kernels) < len(jobs)
    wanted = {(p.verb, p.scheme, str(c)) for p, c in jobs}
    assert wanted == {(p.verb, p.scheme, str(c)) for p, c in kernels}


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[Path]:
    """A folder of the user's tables."""
    tuning.user_tables(tmp_path)
    yield tmp_path
    tuning._folders[:] = [tuning.SHIPPED]
    tuning.forget()


def write(folder: Path, device: str, target: str, **kernels: dict[str, dict[str, int]]) -> None:
    table = {"device": device, "capability": target}
    table["kernels"] = {f"linear/fp8/{key}": buckets for key, buckets in kernels.items()}
    tuning.table_path(device, folder).write_text(json.dumps(table))
    tuning.forget()


def test_buckets_of_tokens(tables: Path) -> None:
    write(tables, "some GPU", "sm_89", **{"64x64": {"16": {"BM": 1}, "256": {"BM": 2}}})

    def chosen(M: int, N: int, K: int, device: str | None = "some GPU") -> dict[str, int]:
        return tuning.lookup("linear", "fp8", M, N, K, device, "sm_89")

    assert [chosen(m, 64, 64)["BM"] for m in (1, 16, 17, 4096)] == [1, 1, 2, 2]
    assert chosen(1, 128, 64)["BM"] == 1  # the nearest N of the same K
    assert chosen(8, 64, 128) == tuning.default("linear", "fp8", 8, 64, 128)


def test_the_own_name_counts_before_the_architecture_and_the_user_before_what_ships(
    tables: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def chosen(device: str | None, target: str, shape: tuple[int, int] = (64, 64)) -> int:
        return tuning.lookup("linear", "fp8", 1, *shape, device, target).get("BM", 0)

    write(tables, "one", "sm_89", **{"64x64": {"16": {"BM": 1}}, "8x8": {"16": {"BM": 8}}})
    write(tables, "two", "sm_89", **{"64x64": {"16": {"BM": 2}}})
    assert [chosen(name, "sm_89") for name in ("one", "two")] == [1, 2]
    assert chosen("two", "sm_89", (8, 8)) == 8  # what its own table lacks, the other has
    assert chosen("three", "sm_89") in (1, 2)
    assert chosen(None, "sm_89") in (1, 2)
    shipped = tuning.lookup("linear", "fp8", 256, 4096, 2816, "NVIDIA H100", "sm_90")
    write(tables, "NVIDIA H200", "sm_90", **{"4096x2816": {"256": {"BM": 77}}})
    mine = tuning.lookup("linear", "fp8", 256, 4096, 2816, "NVIDIA H200", "sm_90")
    assert mine == {"BM": 77} != shipped
    own, other = (
        tuning.lookup("linear", "fp8", 1024, 4096, 2816, f"NVIDIA {name}", "sm_90")
        for name in ("H200", "H100")
    )
    assert own == other != {"BM": 77}  # of M that the user's table lacks, what ships
    for text in ("{", '{"device": 3}', "[1]"):
        (tables / "broken.json").write_text(text)
        tuning.forget()
        assert chosen("one", "sm_89") == 1
        assert "broken.json is no tuning table" in caplog.text
        caplog.clear()
    (tables / "broken.json").unlink()
    for shape in ((64, 64), (8, 8)):
        assert tuning.lookup("linear", "fp8", 1, *shape, "z", "sm_121") == tuning.default(
            "linear", "fp8", 1, *shape
        )
    assert caplog.text.count("no tuning table for z") == 1


class OnGpu:
    """Stands for a CUDA device of a name and a capability."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
        self.device = torch.device("cuda")

    def experts(self) -> dict[str, int]:
        return tuning.choose("experts", "fp8", 256, 1408, 2816, self.device)


def test_launches_are_chosen_by_name_then_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUANTIZE_TARGET", raising=False)
    on_h200 = OnGpu(monkeypatch, "NVIDIA H200", (9, 0)).experts()
    assert OnGpu(monkeypatch, "NVIDIA H100 80GB HBM3", (9, 0)).experts() == on_h200
    elsewhere = OnGpu(monkeypatch, "NVIDIA GeForce RTX 4090", (8, 9)).experts()
    assert elsewhere == tuning.default("experts", "fp8", 256, 1408, 2816) != on_h200


def test_a_forced_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 that chooses as an RTX 4090: no fragments, no kernels of sm_90, no table."""
    gpu = OnGpu(monkeypatch, "NVIDIA H200", (9, 0))
    assert targets.is_hopper(gpu.device)
    monkeypatch.setenv("QUANTIZE_TARGET", "sm_89")
    assert not targets.is_hopper(gpu.device)
    assert gpu.experts() == tuning.default("experts", "fp8", 256, 1408, 2816)
    with pytest.raises(ValueError, match=r"nvfp4_fragments needs compute capability 9\.0"):
        fd.require("nvfp4_fragments", gpu.device)
    monkeypatch.setenv("QUANTIZE_TARGET", "sm_90")
    assert gpu.experts() != tuning.default("experts", "fp8", 256, 1408, 2816)
    monkeypatch.setenv("QUANTIZE_TARGET", "sm_75")
    with pytest.raises(ValueError, match="QUANTIZE_TARGET=sm_75: one of sm_80, sm_86"):
        fd.require("fp8", gpu.device)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_dense_product_of_streamed_fragments_is_not_chained(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads weights before it waits, and no document says that its launch heeds their arrival."""
    from fused_dequant.products import nvfp4_hopper

    launched: list[dict[str, Any]] = []
    kernel = {(4, 1): lambda **arguments: launched.append(arguments)}
    monkeypatch.setattr(nvfp4_hopper, "nvfp4_hopper_kernel", kernel)
    monkeypatch.setattr(nvfp4_hopper, "chained", lambda _: {"CHAINED": True, "launch_pdl": True})
    weight = weights.Weight(
        "nvfp4_fragments", torch.zeros(1, 4, 2, 1), torch.zeros(1), torch.zeros(1), streamed
    )
    config = {"BM": 16, "MORE": 0, "BN": 64, "BK": 64, "PARTS": 1}
    nvfp4_hopper.launch(weight, torch.zeros(16, 128, dtype=torch.bfloat16), None, config)
    (arguments,) = launched
    assert (arguments["CHAINED"], "launch_pdl" in arguments) == (not streamed, not streamed)
