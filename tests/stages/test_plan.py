"""A run begins with a model that can read text, and a plan needs no weights."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest

import quantize
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError
from quantize.pipeline.run import started
from quantize.pipeline.stages import Run, stage
from quantize.recipe.reading import load_recipe, shipped_recipes
from quantize.runs.folder import RunDir
from quantize.stages.plan.show import show_plan


@pytest.mark.parametrize(
    ("text", "message"), [(None, "is missing"), ("{", "not readable as JSON"), ("[]", "not a JSON")]
)
def test_a_tokenizer_that_is_missing_or_no_json_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, text: str | None, message: str
) -> None:
    folder, run = tmp_path / "bf16", RunDir(tmp_path / "run")
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "tokenizer.json").unlink()
    if text is not None:
        (folder / "tokenizer.json").write_text(text)
    begun = Run(run, load_recipe("nvfp4a16"), Checkpoint.open(folder), [], is_bundled=False)
    with pytest.raises(InputError, match=rf"tokenizer\.json: .*{message}"):
        stage("plan").work(begun)
    assert not run.targets_csv.exists()


def test_what_shows_only_beside_the_model_names_the_recipes_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(shipped_recipes()["nvfp4a16"].replace("[lm_head,", "[lm_head, lm_haed,"))
    with pytest.raises(InputError, match=f"^recipe {path}: .*'lm_haed' matches no module"):
        quantize.plan(str(path))
    with (
        pytest.raises(InputError, match=f"^recipe {path}: "),
        started(str(path), None, tmp_path / "outputs", resume=False),
    ):
        pass
    with pytest.raises(InputError, match=f"^recipe {path}: "):
        show_plan(str(path), None, None)


def test_python_plans_googles_model_without_downloading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    targets = quantize.plan("nvfp4", "google/diffusiongemma-26B-A4B-it")
    assert sum(target.bytes_before for target in targets) > 50e9
