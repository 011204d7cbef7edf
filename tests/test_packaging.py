"""The packages live beside others: nothing of ours shadows or overwrites a foreign name."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"quantize", "fused_dequant", "recovery"}


def test_source_roots_are_not_packages() -> None:
    for folder in ("kernels", "evaluation"):
        assert (ROOT / folder).is_dir()
        assert not (ROOT / folder / "__init__.py").exists()


def test_hugging_face_kernels_wins_over_the_folder_of_that_name() -> None:
    """From the repo's root, where our folder `kernels/` lies first on the path."""
    script = (
        "import kernels, fused_dequant, recovery, quantize.recipes;"
        "from transformers import DiffusionGemmaForBlockDiffusion;"
        "print(kernels.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "site-packages" in done.stdout


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = tmp_path_factory.mktemp("wheel")
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools would pack what an old one holds
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(out),
        ".",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("diffusiongemma_quantize-*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_wheel_installs_only_our_packages(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == OURS


def test_wheel_carries_its_data(wheel_names: list[str]) -> None:
    for needed in (
        "quantize/recipes/nvfp4.yaml",
        "quantize/checkpoints/known_models/google--diffusiongemma-26B-A4B-it.json",
        "quantize/bundled/checkpoint/config.json",
        "quantize/bundled/data/heldout.jsonl",
    ):
        assert needed in wheel_names
    for folder in ("recovery/tasks/", "fused_dequant/tuning/"):
        assert any(name.startswith(folder) for name in wheel_names), folder


def test_kernels_import_torch_and_triton_only() -> None:
    allowed = set(sys.stdlib_module_names) | {"torch", "triton", "fused_dequant"}
    files = list((ROOT / "kernels" / "fused_dequant").rglob("*.py"))
    assert len(files) >= 5
    for file in files:
        assert imported_packages(file) <= allowed, file


def imported_packages(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names
