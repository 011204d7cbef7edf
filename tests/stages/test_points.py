"""Operating points in a report: which pass, the fastest first, and which one a checkpoint states."""

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantize.host.files import write_json
from quantize.recipe.controls import SETTINGS
from quantize.recipe.reading import load_recipe
from quantize.recovery.gate import Verdict
from quantize.runs.folder import RunDir
from quantize.runs.weights import Weights
from quantize.runtime import Sampler
from quantize.stages.report.points import judged_points, settings_judged, settings_served
from quantize.stages.report.rows import Scores

OWN = {
    "max_denoising_steps": 48, "entropy_bound": 0.1, "confidence_threshold": 0.005,
    "stability_threshold": 1,
}  # fmt: skip
RECIPE = load_recipe("nvfp4")
ONE, TWO = RECIPE.evaluation.tasks[:2]  # the others were not asked
# name -> the settings, tokens a forward in both tasks, and p of "it does not fit" in those judged.
POINTS: dict[str, tuple[dict[str, Any], tuple[float, float], tuple[float, ...]]] = {
    "slow": ({"max_denoising_steps": 20}, (5, 10), (0.001, 0.002)),
    "fast": ({"max_denoising_steps": 10}, (20, 20), (0.004, 0.003)),
    "lost": ({"entropy_bound": 0.5}, (30, 30), (0.001, 0.2)),
    "half": ({"stability_threshold": 4}, (6, 6), (0.001,)),  # the other task was not comparable
}


def entries() -> list[dict[str, Any]]:
    """Return the entries of two tasks: 10 samples of 100 tokens, and 10 of 300."""
    found: list[dict[str, Any]] = []
    for at, (task, tokens) in enumerate(((ONE, 100.0), (TWO, 300.0))):
        made = {"model": {"activations": "none"}, "sampler": OWN | {"t_min": 0.4}}
        about = {"task": task, "activations": "none", "gated": True, "made_with": made}
        found.append(about | {"quantized_counts": None})
        for name, (settings, rates, _) in POINTS.items():
            made = {"model": {"activations": "fp8"}, "sampler": OWN | settings | {"t_min": 0.4}}
            about = {"task": task, "activations": f"at {name}", "gated": False, "made_with": made}
            counts = {"tokens_per_sample": tokens, "samples": 10, "tokens_per_forward": rates[at]}
            found.append(about | {"quantized_counts": counts})
    return found


def scores_of(folder: Path, weights: str) -> Scores:
    """Return the scores of a run whose candidate was scored on `weights`."""
    run = RunDir(folder)
    write_json(run.manifest_json, {"source": {"fingerprint": "bf16"}})
    write_json(run.verification_json, {"artifact": weights})
    made_with = {"model": {"weights": weights}}
    about = run.evaluation / "quantized" / f"{ONE}.conditions.json"
    write_json(about, {"made_with": made_with})
    return Scores(run, RECIPE)


def judged(outcome: str = "PASS", speeds: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    comparisons: Any = {
        name: {
            task: SimpleNamespace(
                unjudged=(),
                base=0.8,
                p_at_least_margin=p,
                p_at_most_margin=1.0,
                margin_pp=1.0,
                difference_pp=0.0,
                difference_interval=SimpleNamespace(low=-1.0, high=1.0),
                confidence=0.95,
                max_step_inflation=None,
                health={},
            )
            for task, p in zip((ONE, TWO), found, strict=False)
        }
        for name, (_, _, found) in POINTS.items()
    }
    verdict: Any = Verdict(outcome, "", "such_questions")  # type: ignore[arg-type]
    return judged_points(comparisons, entries(), RECIPE, verdict, speeds)


def test_the_fastest_comes_first_and_those_that_fit_both_tasks_pass() -> None:
    found = judged()
    assert [point["name"] for point in found] == ["lost", "fast", "slow", "half"]
    rates = [point["tokens_per_forward"] for point in found]
    assert rates == pytest.approx([30, 20, 4000 / 500, 6])
    assert {p["name"] for p in found if p["passes"]} == {"fast", "slow"}
    p_values = {p["name"]: p["p"] for p in found}
    assert p_values == {
        "slow": pytest.approx(3 * 0.002), "fast": pytest.approx(2 * 0.004), "lost": 0.2, "half": None,
    }  # fmt: skip
    fast = found[1]
    assert fast["settings"] == OWN | {"max_denoising_steps": 10}
    assert (fast["activations"], fast["tokens_a_second"]) == ("fp8", None)
    assert judged_points({}, [], RECIPE, Verdict("PASS", "", "such_questions"), None) == []


@pytest.mark.parametrize(("outcome", "count"), [("FAIL", 0), ("INCONCLUSIVE", 2)])
def test_no_point_of_weights_that_fail_passes(outcome: str, count: int) -> None:
    assert sum(point["passes"] for point in judged(outcome)) == count


def test_where_a_gpu_measured_tokens_a_second_order_the_points(tmp_path: Path) -> None:
    scores = scores_of(tmp_path, "these weights")
    models = [f"quantized-at-{name}" for name in POINTS]
    assert scores.speeds(models) is None
    rates = dict(zip(models, (4, 3, 2, 1), strict=True))
    speeds = {"device": "a GPU", "weights": "these weights", "tokens_a_second": rates}
    write_json(scores.run.evaluation / "speeds.json", speeds)
    assert scores.speeds([*models, "bf16"]) is None  # one was not measured
    assert scores.speeds(models[:3]) == speeds
    found = judged(speeds=scores.speeds(models))
    assert [(p["name"], p["tokens_a_second"]) for p in found] == list(
        zip(POINTS, (4, 3, 2, 1), strict=True)
    )


@pytest.mark.parametrize("weights", ["other weights", None])  # an earlier version named none
def test_speeds_of_other_weights_are_not_read(weights: str | None, tmp_path: Path) -> None:
    scores = scores_of(tmp_path, "these weights")
    speeds = {"device": "a GPU", "tokens_a_second": {"quantized": 1.0}}
    speeds |= {"weights": weights} if weights else {}
    write_json(scores.run.evaluation / "speeds.json", speeds)
    assert scores.speeds(["quantized"]) is None
    assert [said.partition(":")[0] for said in scores.not_read] == [
        "evaluation/speeds.json is not read"
    ]


@pytest.mark.parametrize(
    ("model", "about", "why"),
    [
        ("quantized", {"weights": "as it stands"}, None),
        ("quantized-at-t10", {"weights": "as scored"}, None),
        ("quantized-at-t10", {"weights": "earlier"}, r"scored on other weights \(earlier\)"),
        ("quantized-fp8", {"weights": "bf16"}, "other weights"),
        ("bf16", {"weights": "bf16"}, None),
        ("bf16-again", {"weights": "bf16"}, None),
        ("bf16", {"weights": "as it stands"}, "other weights"),
        ("bf16-again", {"weights": "earlier"}, "other weights"),
        ("quantized", {}, "do not name the weights"),
        ("quantized", {"weights": None}, "do not name the weights"),
        ("bf16", {"served": "x", "weights": None, "revision": "of BF16"}, None),
        ("quantized-fp8", {"served": "x", "weights": None, "revision": "v1"}, None),
        (
            "quantized-fp8",
            {"served": "x", "weights": None, "revision": "v2"},
            "on revision v2, and",
        ),
        ("quantized-fp8", {"served": "x", "weights": "earlier", "revision": "v1"}, "other weights"),
    ],
)
def test_scores_name_the_weights_that_they_are_of(
    model: str, about: dict[str, Any], why: str | None
) -> None:
    known = Weights(frozenset({"bf16"}), frozenset({"as it stands", "as scored"}), "v1")
    found = known.fault(model, {"model": about})
    assert found is None if why is None else re.search(why, str(found))


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (OWN, "own generation_config.json states: which are BF16's."),
        (
            OWN | {"max_denoising_steps": 1, "t_max": 5.0},
            "states: max_denoising_steps 1 (BF16 48), t_max 5.0 (BF16 not stated).",
        ),
        ({"sampler": "the server's"}, "at the settings of the server that answered."),
    ],
)
def test_a_report_says_at_which_settings_a_judged_checkpoint_answered(
    ours: dict[str, Any], said: str
) -> None:
    base = SimpleNamespace(made_with={"sampler": OWN})
    scores: Any = SimpleNamespace(both=lambda task: (base, None))
    tasks = [
        {"task": ONE, "gated": False, "made_with": {}},
        {"task": ONE, "gated": True, "made_with": {"sampler": ours}},
    ]
    assert settings_judged(tasks, scores).endswith(said)
    assert "No task was asked" in settings_judged(tasks[:1], scores)


def test_the_settings_of_a_sampler_are_listed_once() -> None:
    assert {field.name for field in fields(Sampler)} == SETTINGS


@pytest.mark.parametrize(
    ("stated", "point", "wrong"),
    [
        (None, None, None),
        ({"max_denoising_steps": 48, "sampler_config": {"entropy_bound": 0.1}}, None, None),
        ({"max_denoising_steps": None, "t_min": 0.4}, None, None),  # as the model's
        ({"t_min": 0.9}, None, "t_min is 0.9, and .* at 0.4"),  # a server's answers depend on it
        ({"max_denoising_steps": 20, "t_min": 0.9}, None, "is .*, and the answers were judged at"),
        ({"confidence_threshold": 0.01}, None, "confidence_threshold is 0.01, and .* at 0.005"),
        ({"max_denoising_steps": 20}, "slow", None),
        ({"max_denoising_steps": 10, "sampler_config": None}, "fast", None),
        ({"sampler_config": {"entropy_bound": 0.5}}, None, "entropy_bound is 0.5, and .* at 0.1"),
        ({"max_denoising_steps": 9}, None, "max_denoising_steps is 9, and .* at 48; `quantize adopt`"),
    ],
)  # fmt: skip
def test_a_checkpoint_states_what_was_judged(
    stated: dict[str, Any] | None, point: str | None, wrong: str | None, tmp_path: Path
) -> None:
    if stated is not None:
        write_json(tmp_path / "generation_config.json", stated)
    found, why = settings_served(tmp_path, entries(), judged())
    assert found == point
    assert (why is None) == (wrong is None)
    assert wrong is None or re.search(wrong, why or "")


def test_a_setting_that_scores_do_not_note_stood_at_its_default(tmp_path: Path) -> None:
    """As one that came later does where it is not used (`Sampler.noted`)."""
    tasks = entries()
    for task in tasks:
        del task["made_with"]["sampler"]["entropy_bound"]
    write_json(tmp_path / "generation_config.json", {"entropy_bound": 0.1})
    assert settings_served(tmp_path, tasks, []) == (None, None)
    write_json(tmp_path / "generation_config.json", {"entropy_bound": 0.5})
    assert "entropy_bound is 0.5, and the answers" in str(settings_served(tmp_path, tasks, []))
