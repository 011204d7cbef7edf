"""A finished run of the tiny model, made once for all tests that continue or damage one."""

from pathlib import Path

import pytest

from quantize.pipeline.stages import STAGES
from quantize.recipe.reading import load_recipe
from tests.support.quick_run import Quick


@pytest.fixture(scope="session")
def finished_quick(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that run, its BF16 model beside it."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        done = Quick(folder, tiny_checkpoint, patch).run()
    assert done.code == 0, done.err
    recipe = load_recipe("nvfp4_w4a4")
    assert done.redone() == [stage.name for stage in STAGES if stage.is_needed(recipe)]
    return folder


@pytest.fixture
def quick(finished_quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quick:
    """A copy of that run, of the same model."""
    return Quick(tmp_path, finished_quick, monkeypatch, copy=True)
