"""A run begins with a model that can read text."""

import shutil
from pathlib import Path

import pytest

from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError
from quantize.recipe.sections import load_recipe
from quantize.runs.folder import RunDir
from quantize.stages.plan.plan import plan


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
    with pytest.raises(InputError, match=rf"tokenizer\.json: .*{message}"):
        plan(Checkpoint.open(folder), load_recipe("nvfp4a16"), run)
    assert not run.targets_csv.exists()
