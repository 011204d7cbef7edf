"""Step inflation: the ratio, its interval, and the outcomes against a limit."""

import numpy as np
import pytest
from recovery.steps import StepInflation, share_at, step_inflation

NEVER = (0.0, 0.0)


def answers(
    rng: np.random.Generator, count: int, factor: float
) -> list[dict[str, tuple[int, int]]]:
    """Draw steps and tokens of `count` questions on both sides; the second takes `factor` as many."""
    tokens = rng.integers(20, 400, count)
    rate = rng.lognormal(-2.0, 0.5, count)  # steps a token: hard questions take more on both sides
    sides = []
    for scale in (1.0, factor):
        noise = rng.lognormal(0.0, 0.3, count)
        steps = np.maximum(1, np.round(tokens * rate * scale * noise)).astype(int)
        sides.append(
            {str(i): (int(s), int(t)) for i, (s, t) in enumerate(zip(steps, tokens, strict=True))}
        )
    return sides


def test_a_model_that_takes_7_percent_more_everywhere_has_no_uncertainty() -> None:
    base = {str(i): (100 * i, 1000 + i) for i in range(1, 20)}
    more = {q: (steps * 107 // 100, tokens) for q, (steps, tokens) in base.items()}
    found = step_inflation(base, more, NEVER, confidence=0.95)
    assert found.ratio == pytest.approx(1.07, rel=1e-12)
    assert found.low == pytest.approx(found.high, rel=1e-9)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    rounds, factor = 1000, 1.05
    truth = [
        step_inflation(*answers(rng, 40_000, factor), NEVER, confidence=0.95).ratio
        for _ in range(3)
    ]
    held = sum(
        found.low <= np.mean(truth) <= found.high
        for _ in range(rounds)
        for found in [step_inflation(*answers(rng, 150, factor), NEVER, confidence=0.95)]
    )
    assert (
        930 <= held <= 970
    )  # 99 % of such experiments: 950 +- 2.6 * 6.9, and 2 for the truth's error


def test_only_an_interval_beyond_the_limit_exceeds_it() -> None:
    assert not StepInflation(1.02, 1.00, 1.04, NEVER).exceeds(0.05)
    assert not StepInflation(1.09, 1.04, 1.14, NEVER).exceeds(0.05)
    assert StepInflation(1.09, 1.06, 1.12, NEVER).exceeds(0.05)


def test_canvases_that_never_stop_are_counted() -> None:
    assert share_at([48, 12, 48, 30], 48) == 0.5
    assert share_at([], 48) == 0.0


@pytest.mark.parametrize(
    ("base", "quantized"),
    [
        ({"a": (1, 1)}, {"a": (1, 1)}),
        ({"a": (1, 1), "b": (1, 1)}, {"a": (1, 1), "c": (1, 1)}),
        ({"a": (0, 1), "b": (0, 1)}, {"a": (1, 1), "b": (1, 1)}),
    ],
)
def test_what_cannot_be_compared_is_refused(base, quantized) -> None:
    with pytest.raises(ValueError, match="step inflation needs"):
        step_inflation(base, quantized, NEVER, confidence=0.95)
