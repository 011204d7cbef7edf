"""A plan takes steps and experts from what `quantize measure` found of the model."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quantize.checkpoints.reader import known_config
from quantize.cli import cli
from quantize.cli.options import REAL_MODEL
from quantize.errors import InputError
from quantize.stages.plan.gpu_support import CanvasWork
from quantize.stages.plan.measured import measured_denoising

CONFIG = known_config(REAL_MODEL)


def measured(folder: Path, steps: float, hit: float, **changes: Any) -> Path:
    """measured.json of canvases that hit `hit` experts in step 1, and half as many in step 2."""
    layers = CONFIG["text_config"]["num_hidden_layers"]
    by_step = [
        {"canvases": 30, "experts_hit": [hit] * layers},
        {"canvases": 10, "experts_hit": [hit / 2] * layers},
    ]
    content = {"schema_version": 1, "kinds": {"all": {"steps_per_canvas": steps}}}
    path = folder / "measured.json"
    path.write_text(json.dumps(content | {"by_step": by_step} | changes))
    return path


def plan(*words: object) -> str:
    words = ("plan", "--model", REAL_MODEL, "--gpu", "h200", *words)
    done = CliRunner().invoke(cli, list(map(str, words)), env={"COLUMNS": "80"})
    assert done.exception is None, done.exception
    return " ".join(done.output.split())


def hours(said: str) -> list[float]:
    low, _, rest = said.partition("evaluate: ")[2].partition(" h to ")
    return [float(low), float(rest.partition(" h,")[0])]


def test_fewer_steps_take_as_much_less_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = measured(Path(), 12.5, 128)  # a long path would be broken between lines
    said, before = plan("--recipe", "nvfp4", "--measured", path), plan("--recipe", "nvfp4")
    assert f"as measured ({path}): 12.5 steps a canvas, each of which hits 112.0 of 128" in said
    assert "as measured" not in before
    assert hours(said) == pytest.approx([h * 13.5 / 27 for h in hours(before)], rel=0.06)


def test_few_experts_make_one_client_faster_and_sixteen_hardly(tmp_path: Path) -> None:
    path = measured(tmp_path, 16, 64)
    assert measured_denoising(path, CONFIG) == CanvasWork(16, 56 / 128)

    def rate(*words: object) -> float:
        said = plan("--serve", *words).partition("BF16 resident ")[2].split()
        return float(said[3].replace(",", ""))

    one, sixteen = (("--clients", n, "--context", 1024) for n in (1, 16))
    assert rate(*one, "--measured", path) > 1.3 * rate(*one)
    assert rate(*sixteen, "--measured", path) == pytest.approx(rate(*sixteen), rel=0.01)
    assert "12.5 steps a canvas" in plan("--serve", "--measured", measured(tmp_path, 12.5, 128))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"by_step": []}, "was not measured on a model of 30 layers with 128 experts"),
        ({"by_step": [{"canvases": 1, "experts_hit": [9.0] * 6}]}, "30 layers with 128 experts"),
        ({"by_step": [{"canvases": 1, "experts_hit": [200.0] * 30}]}, "30 layers with 128 experts"),
        ({"by_step": [{"canvases": 1, "experts_hit": [-3.0] * 30}]}, "30 layers with 128 experts"),
        ({"by_step": [{"canvases": 0, "experts_hit": [9.0] * 30}]}, "30 layers with 128 experts"),
        ({"by_step": [{"experts_hit": ["x"] * 30}]}, "30 layers with 128 experts"),
        ({"kinds": {"all": {"steps_per_canvas": 0}}}, "was edited"),
        ({"kinds": {"all": {"steps_per_canvas": "26"}}}, "was edited"),
        ({"schema_version": 99}, "of another version"),
        ({"kinds": {}}, "kinds.all.steps_per_canvas"),
    ],
)
def test_what_is_of_another_model_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        measured_denoising(measured(tmp_path, 12, 100, **changes), CONFIG)


def test_a_plan_of_the_bundled_model_reads_the_file_too(tmp_path: Path) -> None:
    words = ["plan", "--recipe", "fp8_dynamic", "--measured", str(measured(tmp_path, 12, 100))]
    done = CliRunner().invoke(cli, words)
    assert isinstance(done.exception, InputError)
    assert "was not measured on a model of 6 layers with 16 experts" in str(done.exception)
