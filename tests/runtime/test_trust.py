"""The self-test at the door of a GPU that is not here, and what happens where a kernel is broken."""

import ast
import importlib
import itertools
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from fused_dequant.launch import dispatch, targets
from fused_dequant.tune import cases, launches, selftest, steptest
from fused_dequant.tune.candidates import Product
from fused_dequant.weights import layout_for, tuning
from fused_dequant.weights.tuning import Config
from triton.compiler.errors import CompilationError

import quantize
from quantize.errors import ResourceError
from quantize.runtime.gpu import gptqtest, gpus, trust
from quantize.runtime.gpu.placement import Placement
from quantize.schemes.gptq import Rounded, gptq
from quantize.schemes.modes import ActivationMode
from quantize.schemes.records import SCHEMES, Scheme

CUDA = torch.device("cuda")
B200, H200 = ("NVIDIA B200", (10, 0)), ("NVIDIA H200", (9, 0))
Gpu = tuple[str, tuple[int, int]]
Pretend = Callable[..., list[str]]


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Let torch see a GPU on which the kernels of some layouts are broken; return what is tested."""
    monkeypatch.setattr(trust, "REMEMBERED", tmp_path / "selftest")
    monkeypatch.setattr(gpus, "TUNED", tmp_path / "tuned")
    monkeypatch.setattr(tuning, "_folders", [tuning.SHIPPED])
    monkeypatch.setattr(dispatch, "distrusted", set())
    monkeypatch.delenv("QUANTIZE_TARGET", raising=False)

    def there(gpu: Gpu, *broken: str) -> list[str]:
        name, capability = gpu
        memory = type("Properties", (), {"total_memory": 24e9})
        for attribute, answer in {
            "is_available": True, "get_device_name": name, "get_device_capability": capability,
            "get_device_properties": memory, "synchronize": None,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, attribute, lambda *_, answer=answer: answer)
        tested: list[str] = []

        def fault(scheme: str, device: torch.device) -> str | None:
            tested.append(scheme)
            return "are wrong: a relative error of 1.4e+00" if scheme in broken else None

        monkeypatch.setattr(selftest, "fault", fault)
        monkeypatch.setattr(steptest, "fault", lambda _: None)
        return tested

    return there


@pytest.mark.parametrize(
    ("gpu", "schemes", "mode", "tested", "units"),
    [
        (B200, {"nvfp4"}, "per_layer", ["bf16", "nvfp4", "nvfp4_e2m1"], True),
        (B200, {"nvfp4"}, None, ["bf16", "nvfp4"], False),
        (B200, {"nvfp4"}, "per_expert", ["bf16", "nvfp4"], False),
        (B200, {"fp8"}, "per_layer", ["bf16", "fp8"], False),
        (H200, {"nvfp4"}, "per_layer", ["bf16", "nvfp4_fragments"], False),
        (H200, {"nvfp4", "fp8"}, "fp8", ["bf16", "fp8", "nvfp4_e4m3"], False),
    ],
)
def test_what_a_mode_multiplies_with_is_tested_once(
    gpu: Gpu, schemes: set[str], mode: ActivationMode | None, tested: list[str], units: bool,
    pretend: Pretend, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    found = pretend(gpu)
    for _ in range(2):
        assert trust.trust(schemes, mode, CUDA) == units
        assert found == tested
    assert capsys.readouterr().err.count("testing products of") == len(tested)
    assert not dispatch.distrusted


def test_a_cpu_has_no_kernels(pretend: Pretend) -> None:
    tested = pretend(B200)
    assert not trust.trust({"nvfp4"}, "per_layer", torch.device("cpu"))
    assert tested == []


@pytest.mark.parametrize(
    ("gpu", "broken", "mode"),
    [
        (B200, "nvfp4_e2m1", "per_layer"),
        (H200, "nvfp4_fragments", None),
        (H200, "nvfp4_e4m3", "fp8"),
    ],
)
def test_a_broken_kernel_gives_way_to_the_plain_one(
    gpu: Gpu, broken: str, mode: ActivationMode | None, pretend: Pretend,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """With a line that asks for a report, in this process and the next, which tests nothing again."""
    tested = pretend(gpu, broken)
    assert not trust.trust({"nvfp4"}, mode, CUDA)
    assert broken in tested
    assert dispatch.distrusted == {broken}
    assert layout_for("nvfp4", mode, gpu[1]) != broken
    said = " ".join(capsys.readouterr().err.split())
    assert (
        f"{gpu[0]}: products of {broken} are wrong: a relative error of 1.4e+00: a plainer kernel"
        in said
    )
    assert "please report this" in said
    before = list(tested)
    dispatch.distrusted.clear()
    assert not trust.trust({"nvfp4"}, mode, CUDA)
    assert tested == before
    assert "please report this" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpu", "broken"), [(B200, ("fp8",)), (H200, ("nvfp4_fragments", "nvfp4"))]
)
def test_a_gpu_whose_plain_kernel_is_broken_is_refused(
    gpu: Gpu, broken: tuple[str, ...], pretend: Pretend
) -> None:
    pretend(gpu, *broken)
    with pytest.raises(ResourceError, match=r"are wrong: a relative error.*hides this GPU"):
        trust.trust({broken[-1]}, None, CUDA)


def test_a_kernel_that_does_not_compile_is_one_line_with_the_compilers_reason(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Triton's message quotes the kernel first, and a function that it calls fails by its own error."""
    why = "source and result must have the same logical storage size"
    fault = selftest.fault
    pretend(H200)
    monkeypatch.setattr(selftest, "fault", fault)
    fails = {"nvfp4_fragments"}

    def relative_error(layout: str, _: torch.device) -> float:
        if layout not in fails:
            return 1e-3
        line = ast.parse("def kernel():\n    return inner()").body[0]
        inner = CompilationError("def inner():\n    return 1", line, why)
        raise CompilationError("def kernel():\n    return inner()", line, None) from inner

    monkeypatch.setattr(selftest, "relative_error", relative_error)
    said = f"products of {{}} do not run with triton {triton.__version__}: CompilationError: {why}"
    assert not trust.trust({"nvfp4"}, None, CUDA)
    assert dispatch.distrusted == fails
    printed = " ".join(capsys.readouterr().err.split())
    assert f"{H200[0]}: {said.format('nvfp4_fragments')}: a plainer kernel is taken" in printed
    dispatch.distrusted.clear()
    fails.add("fp8")
    with pytest.raises(ResourceError, match=f"^{H200[0]}: {said.format('fp8')}, and no other"):
        trust.trust({"fp8"}, None, CUDA)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (None, "no triton: ModuleNotFoundError: import of triton halted"),
        (ModuleType("triton"), "no triton: AttributeError: module 'triton' has no attribute 'jit'"),
        (SimpleNamespace(__version__="3.8.0+git1"), "triton 3.8.0+git1: AttributeError"),
    ],
    ids=["missing", "left empty", "of a distribution of another name"],
)
def test_an_installation_without_a_triton_that_runs_is_one_line(
    module: object, words: str, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = selftest.fault
    pretend(H200)

    def relative_error(*_: object) -> float:
        return importlib.import_module("triton").jit

    monkeypatch.setattr(selftest, "fault", fault)
    monkeypatch.setattr(selftest, "relative_error", relative_error)
    monkeypatch.setitem(sys.modules, "triton", module)
    line = f"^NVIDIA H200: products of bf16 do not run with {re.escape(words)}.*hides this GPU$"
    with pytest.raises(ResourceError, match=line):
        trust.trust({"fp8"}, None, CUDA)


def test_of_processes_that_begin_at_once_one_tests(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested, began = pretend(H200), threading.Barrier(2, timeout=60)
    at_once = selftest.fault
    monkeypatch.setattr(selftest, "fault", lambda *of: (time.sleep(0.2), at_once(*of))[1])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: (began.wait(), trust.trust({"fp8"}, None, CUDA)), range(2)))
    assert tested == ["bf16", "fp8"]


def test_other_versions_and_damaged_files_are_tested_again(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested = pretend(H200)
    trust.trust({"fp8"}, None, CUDA)
    (path,) = trust.REMEMBERED.glob("*.json")
    assert json.loads(path.read_text())["faults"] == dict.fromkeys(("bf16", "fp8", trust.STEP))
    path.write_text("{")
    trust.trust({"fp8"}, None, CUDA)
    monkeypatch.setattr(trust, "_sources", lambda: "others")
    trust.trust({"fp8"}, None, CUDA)
    assert tested == ["bf16", "fp8"] * 3


def test_what_was_tuned_is_tested_before_it_runs(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new table is one that no test knew: its configurations are launched, once each."""
    tested, launched, error = pretend(H200), [], 1e-3

    def relative_error(product: Product, config: Config, _: torch.device) -> float:
        launched.append((product, config))
        return error

    monkeypatch.setattr(launches, "relative_error", relative_error)
    trust.trust({"fp8"}, None, CUDA)
    assert (tested, launched) == (["bf16", "fp8"], [])
    new = {"BM": 16, "MORE": 0, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3, "SWAP": 1}
    table = {"device": H200[0], "capability": "sm_90"}
    shipped = tuning.table(H200[0], "sm_90")["linear/fp8/4096x2816"]
    known = {"1024": shipped["1024"], "256": new, "512": new}
    table["kernels"] = {"linear/fp8/4096x2816": known, "experts/int8/2816x704": {"64": new}}
    gpus.TUNED.mkdir()
    tuning.table_path(H200[0], gpus.TUNED).write_text(json.dumps(table))
    for _ in range(2):  # the second time, nothing is new
        trust.trust({"fp8"}, None, CUDA)
        assert tested == ["bf16", "fp8", "fp8"]
        assert launched == [(Product("linear", "fp8", 256, 4096, 2816), new)]
    error = 0.2
    with pytest.raises(
        ResourceError,
        match=r"2816x704 M=64 .*'BM': 16.* wrong: a relative error of 2.0e-01; remove",
    ):
        trust.trust({"int8"}, None, CUDA)
    assert launched[1:] == [(Product("experts_down", "int8", 64, 2816, 704), new)]


def test_a_kernel_between_products_has_no_plainer_one(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a Triton cannot compile it: one line, in this process and the next."""
    pretend(H200)
    why = "rows of attention in full layers do not run with triton 3.8.0: CompilationError: at 1"
    runs: list[int] = []
    monkeypatch.setattr(steptest, "fault", lambda _: runs.append(1) or why)
    for _ in range(2):
        with pytest.raises(ResourceError, match=f"^NVIDIA H200: {why}; please report"):
            trust.trust({"fp8"}, None, CUDA)
    assert runs == [1]


def test_a_gpu_that_cannot_round_by_gptq_is_refused_for_that_alone(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each format of codes is tested once, and known to the next process; nearest needs none."""
    pretend(H200)
    why = "do not run with triton 3.8.0: OutOfResources: out of resource"
    tested: list[str] = []

    def fault(scheme: Scheme, _: torch.device) -> str | None:
        tested.append(scheme.codes.name)
        return why if scheme.codes.name == "int8" else None

    monkeypatch.setattr(gptqtest, "fault", fault)
    able = [SCHEMES[name] for name in ("NVFP4", "FP8_DYNAMIC", "NVFP4A16")]
    trust.trust_rounding([*able, SCHEMES["INT8_DYNAMIC"]], torch.device("cpu"))
    assert tested == []
    for _ in range(2):
        trust.trust_rounding(able, CUDA)
        with pytest.raises(
            ResourceError, match=f"^NVIDIA H200: GPTQ's kernels for int8 codes {why}.*nearest"
        ):
            trust.trust_rounding([SCHEMES["INT8_DYNAMIC"], *able], CUDA)
    assert tested == ["e2m1", "e4m3", "int8"]
    trust.trust({"int8"}, None, CUDA)


@pytest.mark.parametrize("scheme", ["NVFP4", "FP8_DYNAMIC", "INT8_DYNAMIC"])
def test_a_fault_of_rounding_is_named(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU torch computes both sides; the second, the GPU's, is spoiled."""
    monkeypatch.setattr(cases, "INNER", 64)
    cpu, calls = torch.device("cpu"), itertools.count()
    assert gptqtest.fault(SCHEMES[scheme], cpu) is None

    def spoiled(*arguments: Any) -> Rounded:
        rounded = gptq(*arguments)
        if next(calls) % 2:
            name = next(iter(rounded.tensors))  # the codes
            rounded.tensors[name] = rounded.tensors[name].roll(1, 1)
        return rounded

    monkeypatch.setattr(gptqtest, "gptq", spoiled)
    said = str(gptqtest.fault(SCHEMES[scheme], cpu))
    assert said.startswith("are wrong: a relative error of ")
    monkeypatch.setattr(gptqtest, "gptq", lambda *_: 1 / 0)
    said = str(gptqtest.fault(SCHEMES[scheme], cpu))
    assert (
        said == f"do not run with triton {triton.__version__}: ZeroDivisionError: division by zero"
    )


def test_a_run_that_rounds_by_gptq_tests_it_before_its_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(schemes: Iterable[Scheme], device: torch.device) -> None:
        assert {scheme.name for scheme in schemes} == {"NVFP4", "NVFP4A16"}
        assert device == torch.device(Placement.here(None).device)
        raise ResourceError("GPTQ's kernels are wrong")

    monkeypatch.setattr(trust, "trust_rounding", refuse)
    with pytest.raises(ResourceError, match="are wrong"):
        quantize.run("nvfp4", out=tmp_path)
    (run,) = tmp_path.iterdir()
    assert not (run / "targets.csv").exists()


def test_a_process_whose_gpu_is_gone_ends_and_the_next_one_knows(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(B200, "nvfp4_e2m1")
    trust.trust({"bf16"}, None, CUDA)

    def gone(*_: object) -> None:
        if dispatch.distrusted or "nvfp4_e2m1" in next(trust.REMEMBERED.glob("*.json")).read_text():
            raise RuntimeError("CUDA error: an illegal instruction was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", gone)
    with pytest.raises(ResourceError, match="run this again"):
        trust.trust({"nvfp4"}, "per_layer", CUDA)
    assert not trust.trust({"nvfp4"}, "per_layer", CUDA)
    assert dispatch.distrusted == {"nvfp4_e2m1"}


def test_scores_depend_on_what_multiplied(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trust, "schemes_of", lambda _: {"nvfp4"})
    pretend(B200)
    assert trust.condition(tmp_path, "per_layer", CUDA) == {"products": "fp4 units"}
    assert trust.condition(tmp_path, "per_expert", CUDA) == {}
    pretend(("NVIDIA B300", (10, 3)), "nvfp4_e2m1")
    assert trust.condition(tmp_path, "per_layer", CUDA) == {"distrusted": ["nvfp4_e2m1"]}


@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.fixture(autouse=True)
    def _apart(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(trust, "REMEMBERED", tmp_path / "selftest")
        monkeypatch.setattr(dispatch, "distrusted", set())

    def test_all_kernels_are_right_in_seconds(self) -> None:
        schemes = {"bf16", "fp8", "int8", "nvfp4", "mxfp4"}
        for mode in (None, "fp8", "per_layer"):
            began = time.monotonic()
            trust.trust(schemes, mode, CUDA)
            print(f"self-test of mode {mode}: {time.monotonic() - began:.1f} s")
        assert not dispatch.distrusted

    def test_gptq_s_kernels_are_right_in_seconds(self) -> None:
        for scheme in ("NVFP4", "FP8_DYNAMIC", "INT8_DYNAMIC"):
            began = time.monotonic()
            error = gptqtest.relative_error(SCHEMES[scheme], CUDA)
            print(f"self-test of GPTQ, {scheme}: {error:.1e}, {time.monotonic() - began:.1f} s")
            assert error <= selftest.LARGEST_ERROR / 2

    def test_broken_on_purpose_the_plain_kernel_multiplies(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if not targets.is_hopper(CUDA):
            pytest.skip("only Hopper has two kernels of NVFP4")
        from fused_dequant.products import nvfp4_hopper

        right = nvfp4_hopper.launch
        monkeypatch.setattr(nvfp4_hopper, "launch", lambda *parts: right(*parts).roll(1, 0))
        trust.trust({"nvfp4"}, None, CUDA)
        assert dispatch.distrusted == {"nvfp4_fragments"}
        assert "a plainer kernel is taken" in " ".join(capsys.readouterr().err.split())
        assert cases.random_weight("nvfp4", 1, 64, 64, "cuda").scheme == "nvfp4"
        assert selftest.relative_error("nvfp4", CUDA) < selftest.LARGEST_ERROR
