"""The packages live beside others: nothing of ours shadows or overwrites a foreign name."""

import ast
import shutil
import subprocess
import sys
import tarfile
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


SOURCES = {  # folder in the repository -> package
    "quantize": "quantize",
    "recipes": "quantize/recipes",
    "kernels/fused_dequant": "fused_dequant",
    "evaluation/recovery": "recovery",
}
OF_ITS_OWN = "quantize/serve/vllm_plugin/"  # another distribution


def sources() -> dict[str, str]:
    """Every file of the packages in the repository -> its name in a wheel."""
    command = ["git", "ls-files", "-co", "--exclude-standard", *SOURCES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, str] = {}
    for name in done.stdout.splitlines():
        if not name.startswith(OF_ITS_OWN) and (ROOT / name).is_file():
            folder = next(folder for folder in SOURCES if name.startswith(f"{folder}/"))
            found[name] = SOURCES[folder] + name.removeprefix(folder)
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source distribution, and with the wheel that is built from it alone."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    top = ["pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt"]
    for name in (
        *sources(),
        *top,
        "docs/structure.md",
        "tests/cli/test_cli.py",
        "tests/conftest.py",
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), "."]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def wheel_names(built: Path) -> list[str]:
    (wheel,) = built.glob("diffusiongemma_quantize-*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_the_wheel_holds_the_packages_files_and_no_others(wheel_names: list[str]) -> None:
    found = {name for name in wheel_names if ".dist-info/" not in name}
    assert found == set(sources().values())


def test_the_source_distribution_holds_what_the_wheel_is_built_from(built: Path) -> None:
    (archive,) = built.glob("diffusiongemma_quantize-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {member.name.partition("/")[2] for member in tar if member.isfile()}
    mine = {name for name in names if ".egg-info/" not in name}
    made = {"PKG-INFO", "setup.cfg"}
    top = {"pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt"}
    assert mine - made == set(sources()) | top


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
