"""The packages live beside others: nothing of ours shadows or overwrites a foreign name."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import httpx
import pytest

import quantize
from tests.support import release

ROOT = Path(__file__).parent.parent
OURS = {"quantize", "fused_dequant"}


def test_source_roots_are_not_packages() -> None:
    for folder in ("kernels", "evaluation"):
        assert (ROOT / folder).is_dir()
        assert not (ROOT / folder / "__init__.py").exists()


def test_hugging_face_kernels_wins_over_the_folder_of_that_name() -> None:
    """From the repo's root, where our folder `kernels/` lies first on the path.

    So it does in this process, whose tests of models import transformers.
    """
    script = """
from importlib.util import find_spec
import quantize.recipes
assert find_spec("fused_dequant").origin
print(find_spec("kernels").origin)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "site-packages" in done.stdout


def test_a_checkout_that_is_not_installed_finds_its_packages() -> None:
    """As a machine does that runs the tree by PYTHONPATH alone: no editable install's finder helps."""
    script = """
import sys
editable = [f for f in sys.meta_path if getattr(f, "__module__", "").startswith("__editable__")]
sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in editable]
import quantize.recovery.catalog, quantize.recovery.gate, fused_dequant
from quantize.recipe.reading import shipped_recipes
tasks = quantize.recovery.catalog.known_tasks()
print(quantize.recovery.__file__, len(tasks) > 5 and "nvfp4" in shipped_recipes())
"""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", script], cwd="/", env=os.environ | {"PYTHONPATH": paths},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [str(ROOT / "evaluation/recovery/__init__.py"), "True"]


SOURCES = {  # folder in the repository -> package
    "quantize": "quantize",
    "recipes": "quantize/recipes",
    "evaluation/recovery": "quantize/recovery",
    "kernels/fused_dequant": "fused_dequant",
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
    command = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check"]
    command += ["--outdir", str(out), "."]
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
    for folder in ("quantize/recovery/tasks/", "fused_dequant/weights/tuning/"):
        assert any(name.startswith(folder) for name in wheel_names), folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a venv that holds the wheel alone and sees the dependencies."""
    venv = tmp_path_factory.mktemp("venv")
    made = [sys.executable, "-m", "venv", "--without-pip", str(venv)]
    subprocess.run(made, check=True)
    (wheel,) = built.glob("*.whl")
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    # A line of a .pth file is a folder whose own .pth files, an editable install's, are not read.
    (packages / "dependencies.pth").write_text(str(Path(torch.origin).parents[1]))
    return python.parent


@pytest.mark.slow
def test_the_wheel_works_without_the_repository(installed: Path, tmp_path: Path) -> None:
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "QUANTIZE"))}

    def command(*words: str) -> str:
        done = subprocess.run(
            [installed / "quantize", *words], cwd=tmp_path, env=alone, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode in (0, 4), done.stderr  # two problems decide nothing
        return done.stdout + done.stderr

    assert str(installed.parent) in command("doctor")
    command("run", "--recipe", "fp8_dynamic", "--limit", "2")
    (run,) = (tmp_path / "outputs").glob("fp8_dynamic-*")
    assert (run / "report.html").is_file()
    question = "Anna has 132 cards. Anna picks 94 more. How many cards does Anna have now?"
    assert "226" in command("generate", str(run / "checkpoint"), question, "--plain")
    served = subprocess.Popen(
        [installed / "quantize", "serve", str(run / "checkpoint"), "--port", "0", "--model-name", "x"],
        cwd=tmp_path, env=alone, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert served.stderr is not None
        told = next(line for line in served.stderr if "serving x at" in line)
        url = re.findall(r"http://[\d.:]+", told)[0]
        body = {"model": "x", "messages": [{"role": "user", "content": question}], "temperature": 0}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        assert "226" in reply.json()["choices"][0]["message"]["content"]
        assert httpx.get(f"{url}/").status_code == 200  # the page is in the wheel
    finally:
        served.terminate()
        served.wait(60)


def test_a_release_is_ready_only_when_version_changelog_and_tag_agree() -> None:
    dated = "# Changelog\n\n## 0.2.0, 2026-12-01\n"
    assert release.faults("0.2.0", dated, "", "", "abc") == []
    assert release.faults("0.2.0", dated, "", "abc", "abc") == []
    for given, says in (
        (("0.3.0", dated, "", "", "abc"), "begins with '0.2.0, 2026-12-01', not with 0.3.0"),
        (("0.2.0", "## Unreleased\n## 0.2.0", "", "", "abc"), "begins with 'Unreleased'"),
        (("0.2.0", "## 0.2.0\n", "", "", "abc"), "begins with '0.2.0', not with 0.2.0 and a date"),
        (("0.2.0", "## 0.2.01, 2026-12-01\n", "", "", "abc"), "begins with '0.2.01, "),
        (("0.2.0", dated, " M README.md", "", "abc"), "uncommitted: M README.md"),
        (("0.2.0", dated, "", "abd", "abc"), "stands for abd, not for HEAD"),
    ):
        (fault,) = release.faults(*given)
        assert says in fault


def test_a_distribution_states_its_version(built: Path) -> None:
    found = {release.stated(file) for file in built.iterdir()}
    assert found == {quantize.__version__}


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
