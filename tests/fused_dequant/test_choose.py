"""Which layout a weight gets, on every GPU: as tests/data/choices.txt has it.

The file was written by the code that made this choice in 22 places. A line of the first part has a GPU,
a scheme, a mode and the layouts whose kernels are broken there; then which layouts are tested, whether
products run on FP4 units, whether the mode has weights of its own, and what `build` makes of weights:
of Linears, then of experts; with whole fragments, then without; NVFP4 with input scales, then without.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fused_dequant import formats, weights
from fused_dequant.launch import dispatch
from fused_dequant.launch.targets import TARGETS, Capability, name_of
from fused_dequant.tune.candidates import products
from fused_dequant.weights import fragments, tuning, w4a4, w4a8
from fused_dequant.weights.choose import PREFERRED, STORED, layout_for, made_of, preferred
from fused_dequant.weights.layouts import KERNELS

from quantize.errors import ResourceError
from quantize.runtime.gpu import gpus, trust
from quantize.runtime.gpu.gpus import Gpu, verdict
from quantize.runtime.gpu.memory import repacked
from quantize.schemes.modes import ACTIVATION_MODES, ActivationMode
from quantize.schemes.records import SCHEMES

RECORD = Path(__file__).parents[1] / "data" / "choices.txt"
LINES = RECORD.read_text().splitlines()
NAMES = {name_of(target): target for target in (*TARGETS, (7, 5), (10, 1), (13, 0))}
MODES: tuple[ActivationMode | None, ...] = (None, *ACTIVATION_MODES)


@pytest.fixture
def _blank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep caches apart, and lay nothing out: the tensors of a GPU that is not here are blank."""

    def laid_out(*_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blank = torch.empty(1, 1, 1, 1, device="meta")
        return blank, blank

    monkeypatch.setattr(fragments, "to_fragments", laid_out)
    monkeypatch.setattr(w4a8, "to_fragments", laid_out)
    monkeypatch.setattr(w4a4, "to_tiles", lambda scales: scales)
    monkeypatch.setattr(trust, "REMEMBERED", tmp_path / "selftest")
    monkeypatch.setattr(gpus, "TUNED", tmp_path / "tuned")
    monkeypatch.setattr(trust._Results, "step_fault", lambda _: None)
    monkeypatch.setattr(dispatch, "distrusted", set())
    monkeypatch.delenv("QUANTIZE_TARGET", raising=False)
    yield
    tuning._folders[:] = [tuning.SHIPPED]
    tuning.forget()


def pretend(monkeypatch: pytest.MonkeyPatch, target: Capability) -> None:
    """Let torch see a GPU."""
    memory = type("Properties", (), {"total_memory": 24e9})
    for attribute, answer in {
        "is_available": True, "get_device_name": name_of(target), "synchronize": None,
        "get_device_capability": target, "get_device_properties": memory,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, attribute, lambda *_, answer=answer: answer)


def built(scheme: str, dense: bool, whole: bool, in_fp8: bool, shared: bool, place: str) -> str:
    """Return the layout of a blank weight that is packed as `packing` packs it."""
    N, K = (64, 128) if whole else (80, 96 if scheme == "mxfp4" else 48)
    parts = {
        "bf16": [((N, K), torch.bfloat16)],
        "nvfp4": [((N, K // 2), torch.uint8), ((N, K // 16), torch.float8_e4m3fn)],
        "mxfp4": [((N, K // 2), torch.uint8), ((N, K // 32), torch.uint8)],
    }.get(scheme, [((N, K), torch.int8), ((N, 1), torch.float32)])
    lead = () if dense else (2,)
    tensors = [torch.zeros(*lead, *shape, dtype=dtype, device=place) for shape, dtype in parts]
    own = torch.ones(1, device=place) if shared else None
    return weights.build(scheme, *tensors, in_fp8=in_fp8, shared=own).scheme


@pytest.mark.usefixtures("_blank")
@pytest.mark.parametrize("place", ["cpu", *NAMES])
def test_what_is_tested_and_built_is_as_recorded(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line.split(": ") for line in LINES if line.startswith(f"{place} ")]
    assert len(lines) >= 24
    device = torch.device("cpu" if place == "cpu" else "cuda")
    if place != "cpu":
        pretend(monkeypatch, NAMES[place])
    for asked, recorded in lines:
        _, scheme, mode_name, broken = asked.split(" ")
        mode = next(mode for mode in MODES if str(mode) == mode_name)
        dispatch.distrusted.clear()
        tested: list[str] = []

        def fault(_: object, layout: str, tested=tested, broken=broken) -> str | None:
            tested.append(layout)
            return "wrong" if layout in broken.split("+") else None

        monkeypatch.setattr(trust._Results, "fault", fault)
        try:
            units = trust.trust({scheme}, mode, device)
        except ResourceError:
            assert f"refused {','.join(dict.fromkeys(tested))}" == recorded, asked
            continue
        layouts = [
            built(scheme, dense, whole, mode == "fp8" and scheme == "nvfp4", units and calibrated,
                  "cpu" if place == "cpu" else "meta")
            for dense in (True, False)
            for whole in (True, False)
            for calibrated in ((True, False) if scheme == "nvfp4" else (False,))
        ]  # fmt: skip
        kept = "own" if trust.has_own_weights(mode, device) else "shared"
        said = f"{','.join(dict.fromkeys(tested)) or '-'} {'units' if units else 'no'} {kept}"
        assert f"{said} {','.join(layouts)}" == recorded, asked


def test_verdicts_tuned_products_and_sizes_are_as_recorded() -> None:
    lines: list[str] = []
    for name, target in sorted(NAMES.items(), key=lambda pair: pair[1]):
        gpu = Gpu("x", target)
        for scheme in (*STORED, *(["nvfp4_e2m1"] if gpu.fp4 else [])):
            lines.append(f"verdict {name} {scheme}: {verdict(scheme, gpu).kernels}")
        for verb in ("experts", "linear") if target in TARGETS else ():
            tuned = dict.fromkeys(p.scheme for p in products(target) if p.verb.startswith(verb))
            lines.append(f"tuned {name} {verb}: {','.join(tuned)}")
    for place, target in (("elsewhere", (10, 0)), ("sm_90", (9, 0))):
        for scheme in SCHEMES.values():
            for mode in MODES:
                for module in ("a.experts.0.down_proj", "a.mlp.down_proj"):
                    layout = repacked(scheme, module, mode, target)
                    told = layout and layout.name
                    lines.append(f"repacked {place} {scheme.name} {mode} {module}: {told}")
    assert lines == [line for line in LINES if line.startswith(("verdict", "tuned", "repacked"))]


def test_the_table_names_kernels_and_ends_with_one_for_every_gpu() -> None:
    for (scheme, mode), layouts in PREFERRED.items():
        assert scheme in STORED
        assert mode in MODES
        assert layouts[-1] in STORED
        assert set(layouts) <= set(KERNELS)
        assert layout_for(scheme, mode, None, ()) == layouts[-1]
    for layout in KERNELS:
        assert layout in preferred(*made_of(layout))


def test_mxfp4_beside_nvfp4_keeps_its_layout_in_the_mode_fp8() -> None:
    """Its rows stay bf16 in every mode, as `quantize.schemes.modes` says."""
    codes, scale = formats.quantize_mxfp4(torch.randn(4, 64, 96))
    plain, in_fp8 = (weights.build("mxfp4", codes, scale, in_fp8=mode) for mode in (False, True))
    assert in_fp8.scheme == "mxfp4"
    assert torch.equal(weights.dequantize(in_fp8), weights.dequantize(plain))
