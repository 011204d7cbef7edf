"""What is said of a GPU before weights are read, and tuning: on GPUs that are not here."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from fused_dequant.launch.targets import TARGETS, Capability
from fused_dequant.tune import launches
from fused_dequant.tune.candidates import Product, candidates
from fused_dequant.weights import tuning
from fused_dequant.weights.tuning import Config

from quantize.bench import tune as tuned
from quantize.bench.tune import gains_table, tune_gpu
from quantize.checkpoints.reader import known_config
from quantize.checkpoints.targets import plan_targets
from quantize.cli import cli
from quantize.cli.options import REAL_MODEL
from quantize.errors import InputError, ResourceError
from quantize.recipe.reading import load_recipe
from quantize.runtime.gpu import gpus
from quantize.runtime.gpu.gpus import GPUS, check_gpu, named, verdict
from quantize.stages.plan.gpu_support import floor, kernel_schemes
from quantize.stages.plan.plan import tensors_from_config

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (gpus, tuned):
        monkeypatch.setattr(module, "TUNED", tmp_path / "tuned")
    monkeypatch.delenv("QUANTIZE_TARGET", raising=False)
    yield
    tuning._folders[:] = [tuning.SHIPPED]
    tuning.forget()


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, capability: Capability) -> None:
    """Let torch see a GPU."""
    memory = type("Properties", (), {"total_memory": 24e9})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _=None: memory)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
@pytest.mark.parametrize("scheme", ["bf16", "fp8", "int8", "nvfp4"])
def test_every_gpu_runs_all_but_fp8_before_its_cores(gpu: gpus.Gpu, scheme: str) -> None:
    found = verdict(scheme, gpu)
    runs = scheme != "fp8" or gpu.capability >= (8, 9)
    assert (found.kernels is not None) == runs
    if not runs:
        assert "INT8_DYNAMIC" in found.note
    else:
        run_before = gpu.capability == (9, 0)
        assert ("run on an H200" in found.note) == run_before
        assert ("never run" in found.note) != run_before
    blackwell = gpu.capability >= (10, 0)
    assert ("W4A4" in found.note) == (scheme == "nvfp4" and blackwell)


def test_nvfp4_has_a_kernel_of_its_own_on_hopper_alone() -> None:
    assert verdict("nvfp4", GPUS["h100"]).kernels == "nvfp4_hopper"
    assert verdict("nvfp4", GPUS["b200"]).kernels == "nvfp4"
    assert "not among the targets" in verdict("bf16", gpus.Gpu("new", (13, 0))).note
    assert verdict("bf16", gpus.Gpu("T4", (7, 5))).kernels is None


def test_gpus_are_among_the_targets_and_found_by_any_spelling() -> None:
    assert {gpu.capability for gpu in GPUS.values()} <= set(TARGETS)
    assert named("RTX 5090") is named("rtx-5090") is GPUS["rtx5090"]
    assert named("NVIDIA L40S") is GPUS["l40s"]
    assert (named("4090"), named("DGX Spark")) == (GPUS["rtx4090"], GPUS["spark"])
    assert (named("H100 SXM"), named("h100-pcie")) == (GPUS["h100"], GPUS["h100pcie"])
    assert named("RTX PRO 6000") is GPUS["rtxpro6000"]
    assert named("sm_103", 270e9) == gpus.Gpu("sm_103", (10, 3), 270e9)
    for name in ("rtx6000", "sm_89"):
        with pytest.raises(InputError, match=f"--gpu {name}: (one of a100, |name its memory)"):
            named(name)


@pytest.mark.parametrize(
    ("name", "capability", "scheme", "said"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), "fp8", "cannot run fp8.*sm_89 or newer.*INT8_DYNAMIC"),
        ("Tesla T4", (7, 5), "nvfp4", "cannot run bf16.*sm_80 or newer"),
    ],
)
def test_a_gpu_is_refused_before_weights_are_read(
    name: str, capability: Capability, scheme: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, name, capability)
    with pytest.raises(ResourceError, match=f"{name} {said}"):
        check_gpu([scheme], CUDA)
    check_gpu([scheme], torch.device("cpu"))


def test_a_gpu_that_runs_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA GeForce RTX 4090", (8, 9))
    check_gpu(["fp8", "nvfp4"], CUDA)
    assert gpus.at_hand(CUDA).rates == GPUS["rtx4090"].rates
    pretend(monkeypatch, "NVIDIA GH200 480GB", (9, 0))
    assert gpus.at_hand(CUDA).rates == GPUS["gh200"].rates
    pretend(monkeypatch, "NVIDIA H100 PCIe", (9, 0))
    assert gpus.at_hand(CUDA).rates != GPUS["h100"].rates  # it has less of all
    pretend(monkeypatch, "NVIDIA RTX 4000 Ada Generation", (8, 9))
    assert gpus.at_hand(CUDA).rates is None


def test_the_floor_is_that_of_bytes_and_flop() -> None:
    """FP8's experts in one step of one canvas: 128 experts of 30 layers, read once."""
    config = known_config(REAL_MODEL)
    assert config is not None
    targets = plan_targets(tensors_from_config(config), load_recipe("fp8_dynamic").quantization)
    nbytes = 30 * 128 * (3 * 704 * 2816 + 2 * (2 * 704 + 2816))
    for rates in (GPUS["spark"].rates, GPUS["rtx5090"].rates):
        assert rates is not None
        found = floor(config, targets, rates, 1, 1024)
        assert found["experts"] == pytest.approx(nbytes / rates.copy)
        whole = floor(config, targets, rates, 1, 1024, "bf16")
        assert whole["experts"] == pytest.approx(30 * 128 * 2 * 3 * 704 * 2816 / rates.copy)
        assert whole["vocabulary"] == found["vocabulary"]


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [("nvfp4", ("nvfp4", "nvfp4", "nvfp4")), ("fp8_dynamic", ("fp8", "fp8", "fp8"))],
)
def test_a_recipe_names_its_kernels(recipe: str, expected: tuple[str, ...]) -> None:
    config = known_config(REAL_MODEL)
    targets = plan_targets(tensors_from_config(config), load_recipe(recipe).quantization)
    assert tuple(kernel_schemes(targets).values()) == expected


def test_plan_says_what_runs_on_a_named_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["plan", "--model", REAL_MODEL, "--recipe"]
    shown = CliRunner().invoke(cli, [*arguments, "nvfp4", "--gpu", "rtx5090"])
    assert shown.exit_code == 0, shown.output
    assert "RTX 5090 (sm_120, 32 GB)" in shown.output
    assert "compiled and checked, never run" in shown.output
    assert "estimate by arithmetic, not measured" in " ".join(shown.output.split())
    shown = CliRunner().invoke(cli, [*arguments, "fp8_dynamic", "--gpu", "a100"])
    assert "cannot run" in shown.output
    assert "estimate by arithmetic" not in " ".join(shown.output.split())


@pytest.mark.parametrize(
    ("gpu", "recipe", "least"),
    [
        ("b200", "nvfp4_w4a4", "2.2 ms"), ("rtx5090", "nvfp4_w4a4", "12.2 ms"),
        ("spark", "nvfp4_w4a4", "65.7 ms"), ("b200", "nvfp4a16", None), ("h200", "nvfp4_w4a4", None),
    ],
)  # fmt: skip
def test_plan_names_fp4_units_and_what_they_may_gain(
    gpu: str, recipe: str, least: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the recipe is served with calibrated inputs, a scale a layer, on a GPU that has them."""
    monkeypatch.setenv("COLUMNS", "300")
    arguments = ["plan", "--model", REAL_MODEL, "--recipe", recipe, "--gpu", gpu]
    shown = CliRunner().invoke(cli, arguments)
    assert shown.exit_code == 0, shown.output
    said = " ".join(shown.output.split())
    assert ("nvfp4_blackwell" in said) == (least is not None)
    assert ("without FP4 units" in said) == (least is not None)
    assert least is None or f"at least {least} a forward" in said


def made_up(product: Product, excluded: list[Config]) -> list[tuple[float, Config]]:
    """Find the last candidate the fastest, each a microsecond faster than the one before."""
    own = list(candidates(product, (8, 9)))
    return sorted(
        ((float(len(own) - i), config) for i, config in enumerate(own)), key=lambda t: t[0]
    )


class MadeUp:
    """Times nothing."""

    def __call__(self, product: Product) -> list[tuple[float, Config]]:
        return made_up(product, [])


def test_what_was_tuned_is_what_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "NVIDIA GeForce RTX 4090", (8, 9))
    where = ("linear", "fp8", 256, 4096, 2816, CUDA)
    before = tuning.choose(*where)
    folder = tmp_path / "tuned"
    choices = tune_gpu("linear/fp8/4096x2816 M=256", folder=folder, timer=MadeUp())
    (choice,) = choices
    assert choice.before is not None
    assert choice.microseconds == 1.0 < choice.before
    assert tuning.choose(*where) == choice.config != before
    rows = gains_table(choices).columns
    assert [next(iter(column.cells)) for column in rows][-1].endswith("%")
    tables = gpus.launches_digest(CUDA)
    tune_gpu("linear/fp8/2048x2816 M=256", folder=folder, timer=MadeUp())
    tuned = gpus.launches_digest(CUDA)
    assert tuned != tables
    monkeypatch.setattr(gpus, "SUMS", gpus.SUMS + 1)
    assert gpus.launches_digest(CUDA) not in (tuned, tables)
    assert tuning.choose(*where) == choice.config  # what was tuned before stays
    table = json.loads(next(folder.glob("*.json")).read_text())
    assert (table["device"], table["capability"]) == ("NVIDIA GeForce RTX 4090", "sm_89")
    assert not list(folder.glob("*.tmp"))
    pairs = tune_gpu("experts/int8", lambda n: 1 - 0.5**n, folder=folder, timer=MadeUp())
    used = {c.product.M: launches._chosen(c.product, "cpu").max() + 1 for c in pairs}
    assert used == {64: 64, 256: 64, 512: 96, 1024: 120, 2048: 128, 8192: 128}
    by_tokens = {(c.product.verb, c.product.M): tuning.block_rows(c.config) for c in pairs}
    assert all(
        rows == by_tokens["experts_down", M]
        for (verb, M), rows in by_tokens.items()
        if verb == "experts_up"
    )
    # A later process reads them as soon as it checks its GPU.
    tuning._folders[:] = [tuning.SHIPPED]
    tuning.forget()
    assert tuning.choose(*where) == before
    check_gpu(["fp8"], CUDA)
    assert tuning.choose(*where) == choice.config


def test_wrong_uses_of_tune_end_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceError, match="no CUDA device"):
        tune_gpu()
    pretend(monkeypatch, "NVIDIA GeForce RTX 4090", (8, 9))
    for only, said in (
        ("(", "no regular expression"),
        ("fp6", "finds no product"),
        ("2816x704", "without the other"),
    ):
        with pytest.raises(InputError, match=said):
            tune_gpu(only, timer=MadeUp())
    pretend(monkeypatch, "new", (13, 0))
    with pytest.raises(ResourceError, match="what can be tuned is sm_80"):
        tune_gpu(timer=MadeUp())
