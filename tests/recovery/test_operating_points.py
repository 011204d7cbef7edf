"""Operating points: sampler settings of the candidate that are judged, and the fastest that passes."""

from dataclasses import replace
from typing import Any

import pytest

from quantize.errors import InputError
from quantize.recipe.controls import JUDGED
from quantize.recipe.reading import load_recipe, parse_recipe
from quantize.recipe.sections import OperatingPoint
from quantize.recovery.gate import Verdict, judge, passing
from quantize.recovery.pairing import paired
from quantize.recovery.terms import Comparison, Terms
from quantize.reports.headline import chosen_point
from quantize.runtime import Sampler
from tests.support.faulty import scoring


def at(steps: int, **fault: Any) -> Comparison | Verdict:
    """A candidate whose sampler takes `steps` at most, beside the model's own 48."""
    other = scoring(**fault)
    sampler = {"max_denoising_steps": steps, "t_min": 0.4}
    other = replace(other, conditions=other.conditions | {"sampler": sampler})
    base = scoring()
    own = {"max_denoising_steps": 48, "t_min": 0.4}
    base = replace(base, conditions=base.conditions | {"sampler": own})
    return paired(
        base,
        other,
        Terms(estimand="such_questions", margin_pp=5, health_pp={}),
        other_settings=JUDGED,
    )


def test_settings_that_are_judged_may_differ_by_name_and_no_others() -> None:
    assert isinstance(at(10), Comparison)
    base, other = scoring(), scoring()
    warmer = replace(other, conditions={"sampler": {"max_denoising_steps": 48, "t_min": 0.5}})
    found = paired(
        base,
        warmer,
        Terms(estimand="such_questions", margin_pp=5),
        other_settings=JUDGED,
    )
    assert isinstance(found, Verdict)
    assert found.outcome == "NOT COMPARABLE"


def test_the_whole_loss_of_a_point_must_fit_and_holm_is_over_points() -> None:
    points = {"t5": at(5, scores={"exact": 0.0}, from_=1), "t10": at(10), "t20": at(20, text="")}
    comparisons = {name: [c] for name, c in points.items() if isinstance(c, Comparison)}
    found = passing(comparisons)
    assert found["t10"] <= 0.05 < min(found["t5"], found["t20"])  # 20 % wrong, 20 % empty
    assert found["t10"] == pytest.approx(3 * passing({"t10": comparisons["t10"]})["t10"])


def test_a_point_with_a_sign_that_cannot_be_seen_does_not_pass() -> None:
    """As the verdict of such a run is INCONCLUSIVE, its point is not adopted."""
    whole = paired(scoring(), scoring(), Terms(estimand="such_questions", margin_pp=5))
    assert isinstance(whole, Comparison)
    unseen = replace(whole, unjudged=["empty"])
    assert judge({"t": unseen}).outcome == "INCONCLUSIVE"
    fits = passing({"seen": [whole], "unseen": [unseen]})
    assert fits["seen"] <= 0.05 < fits["unseen"] == 1


def test_the_fastest_that_passes_is_named() -> None:
    def point(name: str, speed: float, *, passes: bool) -> dict[str, Any]:
        rates = {"tokens_per_forward": speed, "tokens_a_second": 100 * speed}
        return {"name": name, "passes": passes} | rates

    points = [
        point("t5", 20, passes=False),
        point("t10", 14, passes=True),
        point("t20", 9, passes=True),
    ]
    counts = {"tokens_per_sample": 50, "samples": 10, "tokens_per_forward": 8}
    about = {"tasks": [{"gated": True, "quantized_counts": counts}], "speeds": None}
    unknown = about | {"operating_points": points}
    assert ": t10, 14.0 tokens a forward." in chosen_point(unknown)
    rates = {"device": "a GPU", "tokens_a_second": {"quantized": 800, "bf16": 700}}
    said = chosen_point(about | {"operating_points": points, "speeds": rates})
    assert ": t10, 1,400 tokens/s on a GPU (own settings 800, BF16 700)." in said
    counts["tokens_per_forward"] = 14  # none that passes is faster than the model's own settings
    assert "that passes is faster than" in chosen_point(unknown)
    assert chosen_point(about | {"operating_points": points[:1]}).startswith(
        "None of 1 operating points"
    )
    assert "were not judged" in chosen_point({"operating_points": []})


def test_a_fixed_point_never_stops_early() -> None:
    """Its argmax would have to be stable over more steps than there are."""
    fixed = OperatingPoint(max_denoising_steps=10, fixed=True).settings()
    assert fixed == {"max_denoising_steps": 10, "stability_threshold": 10}
    assert replace(Sampler(), **fixed).stability_threshold == 10
    assert OperatingPoint(entropy_bound=0.2).settings() == {"entropy_bound": 0.2}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("operating_points: {x: {}}", "names no setting"),
        ("operating_points: {x: {max_denoising_steps: 0}}", "greater than or equal to 1"),
        ("operating_points: {x: {max_denoising_steps: 10000}}", "less than or equal to 1000"),
        ("operating_points: {x: {max_denoising_steps: 2.5}}", "valid integer"),
        ("operating_points: {x: {entropy_bound: 0}}", "greater than 0"),
        ("operating_points: {x: {entropy_bound: .nan}}", "finite"),
        ("operating_points: {x: {entropy_bound: .inf}}", "finite"),
        ("operating_points: {x: {confidence_threshold: -1}}", "greater than 0"),
        ("operating_points: {x: {stability_threshold: -1}}", "greater than or equal to 0"),
        ("operating_points: {x: {activations: int4}}", "activations"),
        ("operating_points: {x: {steps: 10}}", "unknown key 'evaluation.operating_points.x.steps'"),
        ("operating_points: {x: {fixed: true}}", "fixed needs max_denoising_steps"),
        (
            "operating_points: {x: {max_denoising_steps: 5, fixed: true, stability_threshold: 2}}",
            "fixed needs",
        ),
        ("operating_points: {x: 10}", "operating_points"),
        ("health_pp: {empty: .nan}", "finite"),
        ("health_pp: {empty: 0}", "greater than 0"),
        ("health_pp: {emty: 1}", "health_pp"),
        ("health_pp: {empty: many}", "number"),
    ],
)
def test_settings_that_mean_nothing_are_one_line(text: str, says: str) -> None:
    recipe = load_recipe("fp8_dynamic").to_yaml()
    bad = recipe.replace(f"  {text.split(':')[0]}: {{}}\n", f"  {text}\n", 1)
    assert bad != recipe
    with pytest.raises(InputError) as error:
        parse_recipe(bad, "mine.yaml")
    assert says in str(error.value)
    assert "\n" not in str(error.value)
