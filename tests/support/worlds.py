"""Answers of two models whose difference is known: what intervals and verdicts are held against.

Each estimand has its own truth. These questions: the n questions stay the same in every round,
answers are drawn anew, the truth is their own mean loss. Such questions: questions too are drawn anew,
the truth is the mean loss of all that could be drawn. And each is damaged in two ways:

  single   every answer that was right is lost with the same small probability
  whole    some questions are lost outright: never right again, however often asked

Question i is solved with probability p_i ~ Beta, such that 55 % of p (1 - p) lies between questions
(50 to 60 % were seen on real benchmarks), or always ("certain": every loss is a rare event and nothing
else varies, which is what normal intervals fail on). Half of the answers share their noise with the
base's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantize.recovery.estimands import Estimand, Floats

BETWEEN = 0.55
DAMAGE = ("single", "whole")


@dataclass(frozen=True)
class Bench:
    """n questions, k answers each, base accuracy (1: certain), margin in pp."""

    questions: int
    repeats: int
    accuracy: float
    margin_pp: float

    def __str__(self) -> str:
        certain = ", certain" if self.accuracy == 1 else ""
        return f"{self.questions} x {self.repeats}{certain}, margin {self.margin_pp:g}"


RECIPES = [Bench(30, 64, 0.437, 3), Bench(198, 32, 0.641, 3), Bench(1319, 1, 0.943, 2)]
# What the shipped recipes ask, without and with thinking: 8 hours of one H200.
SHIPPED = [
    Bench(30, 40, 0.437, 3), Bench(198, 8, 0.641, 3), RECIPES[2],
    Bench(30, 20, 0.65, 5), Bench(198, 3, 0.698, 5), Bench(1319, 1, 0.951, 2),
]  # fmt: skip
CERTAIN = [Bench(30, 64, 1, 3), Bench(198, 32, 1, 3), Bench(1319, 1, 1, 2)]
FEW = [Bench(n, 64, accuracy, 3) for n in (2, 5, 10, 20, 40) for accuracy in (0.641, 1)]
FEW += [
    Bench(2, 2, 0.641, 10),
    Bench(10, 8, 0.641, 10),
    Bench(40, 2, 0.641, 10),
    Bench(40, 1, 1, 10),
]


@dataclass(frozen=True)
class World:
    """A bench, what is asked of it, how it is damaged, and how much is truly lost."""

    bench: Bench
    estimand: Estimand
    damage: str
    loss_pp: float

    def __str__(self) -> str:
        return f"{self.bench}: {self.estimand}, {self.damage} lost, {self.loss_pp:g} pp"


def are_fixed(estimand: Estimand, repeats: int) -> bool:
    """Return whether chance is in the answers alone: the questions stay, with several answers each."""
    return estimand == "these_questions" and repeats > 1


def solved(bench: Bench, generator: np.random.Generator, rounds: int = 1) -> Floats:
    """Return the probability [rounds, n] with which the base solves each question."""
    shape = (rounds, bench.questions)
    if bench.accuracy == 1:
        return np.ones(shape)
    total = 1 / BETWEEN - 1  # a + b of the Beta: Var(p_i) = p (1 - p) / (a + b + 1)
    return generator.beta(bench.accuracy * total, (1 - bench.accuracy) * total, shape)


def questions(
    world: World, generator: np.random.Generator, rounds: int = 1
) -> tuple[Floats, Floats]:
    """Return the probabilities [rounds, n] of base and quantized."""
    share = world.loss_pp / 100 / world.bench.accuracy  # of the right answers that are lost
    if world.estimand == "such_questions":
        p = solved(world.bench, generator, rounds)
        lost = generator.random(p.shape) < share if world.damage == "whole" else share
        return p, p * (1 - np.asarray(lost))
    p = solved(world.bench, np.random.default_rng(world.bench.questions))  # the same in every round
    if world.damage == "single":
        return p, p * (1 - world.loss_pp / 100 / p.mean())
    left = world.loss_pp / 100 * p.size  # of the mass to take away, question after question
    return p, p - np.minimum(p, np.clip(left - (np.cumsum(p) - p), 0, None))


def many_answers(
    world: World, generator: np.random.Generator, rounds: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return which answers [rounds, n, k] of base and quantized are right."""
    p, q = questions(world, generator, rounds)
    shape = (rounds, p.shape[1], world.bench.repeats)
    noise = generator.random(shape)
    other = np.where(generator.random(shape) < 0.5, noise, generator.random(shape))
    return noise < p[..., None], other < q[..., None]


def many_points(
    bench: Bench, estimand: Estimand, losses_pp: Sequence[float], generator: np.random.Generator,
    rounds: int,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return which answers [rounds, n, k] of a base are right, and of points [points, rounds, n, k].

    Each point loses so many single answers; half of its answers share their noise with the base's.
    """
    p, _ = questions(World(bench, estimand, "single", 0), generator, rounds)
    accuracy = p.mean() if estimand == "these_questions" else bench.accuracy
    shape = (rounds, p.shape[1], bench.repeats)
    noise = generator.random(shape)
    points: list[np.ndarray] = []
    for loss in losses_pp:
        other = np.where(generator.random(shape) < 0.5, noise, generator.random(shape))
        points.append(other < (p * (1 - loss / 100 / accuracy))[..., None])
    return noise < p[..., None], np.stack(points)


def many_costs(
    bench: Bench,
    generator: np.random.Generator,
    rounds: int,
    inflation: float,
    *,
    fixed: bool = False,
) -> Floats:
    """Return steps and tokens of base, then of quantized [rounds, n, k, 4], of a known inflation.

    Tokens of an answer, steps a token (hard questions take more) and the noise of both are lognormal;
    inflation varies by 15 % between questions, and is `inflation` over all that could be drawn or, if
    `fixed`, over each round's own questions.
    """
    each, every = (rounds, bench.questions, 1), (rounds, bench.questions, bench.repeats)

    def drawn(spread: float, shape: tuple[int, ...]) -> Floats:
        return generator.lognormal(-(spread**2) / 2, spread, shape)

    tokens, rate = 170 * drawn(0.6, each), 0.15 * drawn(0.5, each)
    columns: list[Floats] = []
    more = drawn(0.15, each)
    if fixed:
        more *= (tokens * rate).sum(1, keepdims=True) / (tokens * rate * more).sum(1, keepdims=True)
    for scale in (np.ones(each), (1 + inflation) * more):
        length = np.maximum(1, np.round(tokens * drawn(0.3, every)))
        steps = length * rate * scale * drawn(0.3, every)
        columns += [np.floor(steps + generator.random(every)), length]
    return np.stack(columns, -1)


def by_name(values: np.ndarray) -> dict[str, list[float]]:
    """Scores [questions] or [questions, k] as `compare` takes them."""
    rows = np.atleast_2d(values.T).T.astype(float).tolist()
    return {str(i): row for i, row in enumerate(rows)}


def three_sigma(p: float, rounds: int) -> float:
    return 3 * math.sqrt(p * (1 - p) / rounds)
