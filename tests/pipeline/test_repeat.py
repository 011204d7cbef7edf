"""A run is made again from the recipe that its folder, card and bundle hold, and equals the first."""

import re
import shlex
import zipfile
from pathlib import Path

import pytest

from quantize.host.files import read_json
from quantize.pipeline.rehearse import small
from quantize.pipeline.run import started
from quantize.recipe.reading import read_recipe, resolved
from quantize.stages import denoising
from quantize.stages.evaluate import recording
from tests.support.quick_run import command, in_few_steps


def test_the_recipe_in_a_folder_resolves_to_itself_on_the_bundled_model(tmp_path: Path) -> None:
    """With a limit and in a rehearsal: neither has the limits that ship."""
    limited = started("nvfp4", None, tmp_path / "run", resume=False, limit=5)
    tried = started(small(resolved("nvfp4", bundled=True)), None, tmp_path / "try", resume=False)
    for beginning in (limited, tried):
        with beginning as run:
            path = tmp_path / "recipe.yaml"
            path.write_text(run.recipe.to_yaml())
            assert read_recipe(path).for_bundled_model() == run.recipe
            with started(str(path), None, tmp_path / "again", resume=False) as again:
                assert again.folder.path.name == run.folder.path.name


@pytest.mark.slow
def test_the_recipe_of_a_bundled_run_with_a_limit_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_few_steps(monkeypatch)
    monkeypatch.setattr(denoising, "HELD_OUT", 2)
    monkeypatch.setattr(recording, "RECORDED", 1)
    monkeypatch.chdir(tmp_path)
    words = ["run", "--recipe", "fp8_dynamic", "--limit", 3, "--noise-floor", "--out"]
    assert command(monkeypatch, *words, "first").code in (0, 1, 4)
    (first,) = Path("first").glob("fp8_dynamic-*")
    assert command(monkeypatch, "card", first).code == 0
    assert command(monkeypatch, "bundle", first, "--out", "bundle.zip").code == 0
    card = (first / "checkpoint" / "README.md").read_text()
    (from_card,) = re.findall(r"^```yaml\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)
    with zipfile.ZipFile("bundle.zip") as archive:
        from_bundle = archive.read(f"{first.name}/recipe.yaml").decode()
    assert from_card.strip() == from_bundle.strip() == (first / "recipe.yaml").read_text().strip()

    Path("recipe.yaml").write_text(from_card)
    (line,) = re.findall(r"^quantize (run .*)$", card, re.MULTILINE)
    again = command(monkeypatch, *shlex.split(line), "--out", "again")
    assert "warning" not in again.err
    (second,) = Path("again").glob("fp8_dynamic-*")
    assert second.name == first.name
    reports = [read_json(run / "report.json") for run in (first, second)]
    for key in ("recipe", "verdict", "tasks", "noise_floor", "artifact", "looks"):
        assert reports[0][key] == reports[1][key], key
    assert reports[0]["tasks"][0]["questions"] == 3
