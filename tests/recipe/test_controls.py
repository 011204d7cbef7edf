"""The sampler's controls are declared once: what has them takes name, bounds and default from there."""

from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from quantize.cli import cli
from quantize.errors import InputError
from quantize.recipe.controls import CONTROLS, JUDGED
from quantize.recipe.sections import OperatingPoint
from quantize.runtime import Sampler
from quantize.serve.protocol import CompletionRequest


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_is_everywhere_where_controls_are(name: str) -> None:
    asked = CONTROLS[name].metadata["asked"]
    called, default = asked["alias"] or name, getattr(Sampler(), name)
    body: dict[str, Any] = {"model": "m", "prompt": "x", called: default}
    assert getattr(CompletionRequest.model_validate(body).sampler(Sampler()), name) == default
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate(body | {called: type(default)(asked["le"] + 1)})
    assert called in CliRunner().invoke(cli, ["serve", "--help"]).output
    assert (name in OperatingPoint.model_fields) == (name in JUDGED)


@pytest.mark.parametrize("name", sorted(JUDGED))
def test_bounds_hold_for_checkpoints_and_operating_points_alike(name: str) -> None:
    """A value just below the least one is refused by both, by name."""
    bounds = CONTROLS[name].metadata["bounds"]
    wrong = bounds["gt"] if "gt" in bounds else bounds["ge"] - 1
    with pytest.raises(InputError, match=f"{name} must be"):
        Sampler.from_config({name: wrong})
    with pytest.raises(ValidationError, match=name):
        OperatingPoint.model_validate({name: wrong})
