"""The plugin on the source of vLLM's releases, run on a CPU; skipped where these sources are not.

    for V in 0.26.0 0.27.0 0.27.1 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0 0.33.0; do
      pip download --no-deps --only-binary :all: -d build/vllm/$V vllm==$V
      unzip build/vllm/$V/*.whl 'vllm/model_executor/models/diffusion_gemma.py' -d build/vllm/$V
    done

QUANTIZE_TEST_VLLM names another folder. On 2026-11-28 all nine releases passed.
"""

import importlib.util
import os
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
SOURCES = Path(os.environ.get("QUANTIZE_TEST_VLLM", ROOT / "build" / "vllm"))
RELEASES = [
    "0.26.0",
    "0.27.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
]
FILE = "vllm/model_executor/models/diffusion_gemma.py"


@pytest.fixture(scope="module")
def shown() -> ModuleType:
    """The program that shows the fault to vLLM's maintainers."""
    file = ROOT / "docs" / "upstream" / "vllm_commit_pass.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=RELEASES)
def unpacked(request: pytest.FixtureRequest) -> Path:
    """A folder with the file of a release."""
    folder = SOURCES / request.param
    if not (folder / FILE).is_file():
        pytest.skip(f"the source of vLLM {request.param} is not in {SOURCES}")
    return folder


def test_a_committed_canvas_keeps_its_embeddings(shown: ModuleType, unpacked: Path) -> None:
    """Bit for bit, where the release itself moves them; a denoised canvas is the release's own."""
    with shown.release(unpacked) as (theirs, plugin):
        conditioning = theirs.DiffusionGemmaSelfConditioning(shown.WIDTH, shown.INNER)
        faulty, plain = shown.prepared(theirs.DiffusionGemmaModelState, conditioning)
        served = plugin.RepairedDiffusionGemma.get_model_state_cls()
        repaired, _ = shown.prepared(served, conditioning)
    assert torch.equal(repaired[1], plain[1])
    assert torch.equal(repaired[0], faulty[0])
    for canvas in faulty[1], faulty[0]:
        assert not any(torch.allclose(canvas, embedded, rtol=0.1) for embedded in plain)
    # What the release makes of a committed canvas are its embeddings at a root mean square of one.
    torch.testing.assert_close(faulty[1], shown.RMSNorm(shown.WIDTH, has_weight=False)(plain[1]))


def test_a_release_with_another_source_is_refused(
    shown: ModuleType, unpacked: Path, tmp_path: Path
) -> None:
    text = (unpacked / FILE).read_text("utf-8")
    changed = text.replace("is_decode_indices_np = np.where", "is_decode_indices_np = 1 * np.where")
    assert changed != text
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).write_text(changed, "utf-8")
    with pytest.raises(RuntimeError, match="does not know this vLLM"), shown.release(tmp_path):
        pass
    shutil.copy(unpacked / FILE, tmp_path / FILE)
    with shown.release(tmp_path):
        pass
