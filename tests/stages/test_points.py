"""Operating points in a report: which pass, the fastest first, and which one a checkpoint states."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantize.host.files import write_json
from quantize.recipe.sections import load_recipe
from quantize.recovery.gate import Verdict
from quantize.runs.folder import RunDir
from quantize.stages.report.points import judged_points, measured_speeds, settings_served

OWN = {
    "max_denoising_steps": 48, "entropy_bound": 0.1, "confidence_threshold": 0.01,
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


def judged(outcome: str = "PASS", speeds: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    comparisons: Any = {
        name: {
            task: SimpleNamespace(p_at_least_margin=p, health={})
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
    run = RunDir(tmp_path)
    models = [f"quantized-at-{name}" for name in POINTS]
    assert measured_speeds(run, models) is None
    speeds = {"device": "a GPU", "tokens_a_second": dict(zip(models, (4, 3, 2, 1), strict=True))}
    write_json(run.evaluation / "speeds.json", speeds)
    assert measured_speeds(run, [*models, "bf16"]) is None  # one was not measured
    assert measured_speeds(run, models[:3]) == speeds
    found = judged(speeds=measured_speeds(run, models))
    assert [(p["name"], p["tokens_a_second"]) for p in found] == list(
        zip(POINTS, (4, 3, 2, 1), strict=True)
    )


@pytest.mark.parametrize(
    ("stated", "point", "wrong"),
    [
        (None, None, None),
        ({"max_denoising_steps": 48, "sampler_config": {"entropy_bound": 0.1}}, None, None),
        ({"max_denoising_steps": None, "t_min": 0.9}, None, None),  # as the model's; not judged
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
