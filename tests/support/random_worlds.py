"""Whole verdicts in worlds drawn at random: tasks x limits x operating points, over looks, at once.

A world is its seed: one to three tasks, each with questions, repeats, accuracy and margin; one
estimand; a run's candidate, and up to three operating points. Each task judges accuracy, up to three
signs of ill health, and (for the run alone) steps. Each quantity of each candidate is damaged in one of
three ways,

  single   answers are lost (or show the sign) one by one, with the same small probability
  whole    some questions are lost outright, however often asked
  mixed    half of the damage each

and its true excess is nothing, half its limit, or exactly its limit. Some quantity of each candidate is
at its limit, so every PASS of it is false; none is above, so every FAIL is false as well.

Answers of a candidate share a part of their noise with BF16's. Where `together`, all quantities of an
answer also share one number: what is cut is wrong, too. Under `these_questions` the questions are the
same in every round, and so is the damage of each; else both are drawn anew.

`many_verdicts` judges with the product's functions (p-values, looks, levels, weights); it repeats the
order of `until_decided` and `judge` for many rounds at once, which `one_verdict` calls round by round.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import ndtri, stdtrit

from quantize.recovery.estimands import (
    ESTIMANDS,
    Estimand,
    Floats,
    Total,
    margin_p_values,
    total,
    units,
)
from quantize.recovery.estimands import limits as limits_at
from quantize.recovery.gate import judge, passing
from quantize.recovery.health import MORE, compare_sign, limits_of, sign_p_values
from quantize.recovery.limits import limits_on
from quantize.recovery.sequential import (
    LEAST_CHANCE,
    Look,
    Plan,
    at_looks,
    crossing,
    nominal_levels,
    until_decided,
)
from quantize.recovery.statistics import compare
from quantize.recovery.steps import exceeds_p, log_ratio, step_inflation
from quantize.recovery.terms import Comparison, Terms
from tests.support.worlds import Bench, are_fixed, by_name, many_costs, solved

ALPHA, INFLATION = 0.05, 0.1
DAMAGE = ("single", "whole", "mixed")
SIGNS = ("empty", "no_value", "cut")
BASE_RATES = (0.0, 0.002, 0.01, 0.03, 0.07, 0.15)  # how often BF16's answers show a sign
ACCURACY = "accuracy"


@dataclass(frozen=True)
class Damage:
    """How one quantity of a candidate is damaged: its kind, and the part of its limit."""

    kind: str
    part: float  # 0, 0.5 or 1


@dataclass(frozen=True)
class JudgedTask:
    """One task of a world: what is asked, and what BF16 does."""

    bench: Bench
    base_rates: Mapping[str, float]  # sign -> share of BF16's answers that show it
    spread: float  # a + b of the Beta from which each question's own share of a sign is drawn
    steps: bool  # a limit on steps is judged, and the true inflation is at the limit

    def quantities(self) -> list[str]:
        """Accuracy and the signs, as PASS needs them."""
        return [ACCURACY, *self.base_rates]


@dataclass(frozen=True)
class RandomWorld:
    """A run and its operating points; `damages` are of the run's candidate, then of each point."""

    seed: int
    estimand: Estimand
    tasks: Sequence[JudgedTask]
    damages: Sequence[Mapping[tuple[int, str], Damage]]
    shared_noise: float
    together: bool

    @classmethod
    def drawn(cls, seed: int, largest: int = 1500) -> "RandomWorld":
        """Return the world of a seed; no task has more than `largest` answers of a model."""
        pick = np.random.default_rng([seed, 51])
        estimand = ESTIMANDS[pick.integers(2)]
        tasks = [_drawn_task(pick, estimand, largest) for _ in range(pick.integers(1, 4))]
        damages = [_drawn_damages(pick, tasks) for _ in range(1 + pick.integers(0, 4))]
        shared = float(pick.choice([0.0, 0.5, 0.9]))
        return cls(seed, estimand, tasks, damages, shared, bool(pick.integers(2)))

    def plan(self, task: JudgedTask) -> Plan:
        """The looks at a task."""
        return Plan(self.estimand, task.bench.questions, task.bench.repeats, 0)

    def terms(self, task: JudgedTask, points: int) -> Terms:
        """The terms of the run (no points), or of one of so many points."""
        limits = dict.fromkeys(["empty", "no_value", "open_thought", "cut", "stutter"])
        judged = self.limits_pp(task)
        return Terms(
            estimand=self.estimand,
            margin_pp=task.bench.margin_pp,
            confidence=1 - ALPHA / max(1, points),
            max_step_inflation=INFLATION if task.steps and not points else None,
            health_pp=limits | judged,
        )

    def limits_pp(self, task: JudgedTask) -> dict[str, float]:
        """Return sign -> its default limit, without regard to BF16's share."""
        count = units(self.estimand, task.bench.questions, task.bench.repeats)
        terms = Terms(estimand=self.estimand, margin_pp=task.bench.margin_pp, health_pp={})
        limits = limits_of(terms, count)
        return {sign: limit for sign in task.base_rates if (limit := limits[sign]) is not None}


def _drawn_task(pick: np.random.Generator, estimand: Estimand, largest: int) -> JudgedTask:
    repeats = int(pick.choice([1, 1, 2, 4, 12, 32, 48]))
    most = max(20, min(1400, largest // repeats))
    questions = int(np.exp(pick.uniform(math.log(20), math.log(most + 1))))
    margin = float(pick.choice([1, 2, 3, 5, 8, 12]))
    accuracy = float(pick.choice([1.0, 0.95, 0.75, 0.5, 0.25]))
    signs = list(pick.permutation(SIGNS)[: pick.integers(0, 4)])
    rates = {str(sign): float(pick.choice(BASE_RATES)) for sign in signs}
    bench = Bench(questions, repeats, accuracy, min(margin, 100 * accuracy / 2))
    return JudgedTask(bench, rates, float(pick.choice([0.5, 2, 8, 1000])), bool(pick.integers(2)))


def _drawn_damages(
    pick: np.random.Generator, tasks: Sequence[JudgedTask]
) -> dict[tuple[int, str], Damage]:
    keys = [(index, name) for index, task in enumerate(tasks) for name in task.quantities()]
    bad = keys[pick.integers(len(keys))]
    parts = {key: float(pick.choice([0, 0, 0.5, 1])) for key in keys} | {bad: 1.0}
    return {key: Damage(str(pick.choice(DAMAGE)), part) for key, part in parts.items()}


# --- answers ------------------------------------------------------------------------------------


def _shares(
    world: RandomWorld, index: int, name: str, rounds: int, generator: np.random.Generator
) -> Floats:
    """Return the probability [rounds, n] that BF16's answer is wrong, or shows the sign."""
    task, fixed = world.tasks[index], world.estimand == "these_questions"
    if fixed:
        generator = np.random.default_rng([world.seed, index, *name.encode()])
    count = 1 if fixed else rounds
    if name == ACCURACY:
        shares = 1 - solved(task.bench, generator, count)
    elif (rate := task.base_rates[name]) == 0:
        shares = np.zeros((count, task.bench.questions))
    else:
        shape = (count, task.bench.questions)
        shares = generator.beta(rate * task.spread, (1 - rate) * task.spread, shape)
    return np.broadcast_to(shares, (rounds, task.bench.questions))


def _worse(
    world: RandomWorld, index: int, name: str, damage: Damage, shares: Floats,
    generator: np.random.Generator,
) -> Floats:  # fmt: skip
    """Return the candidate's probabilities [rounds, n], whose mean is above BF16's by the damage."""
    task, fixed = world.tasks[index], world.estimand == "these_questions"
    if name == ACCURACY:
        mean = float(shares[0].mean()) if fixed else 1 - task.bench.accuracy
        excess = damage.part * task.bench.margin_pp / 100
    else:
        mean = float(shares[0].mean()) if fixed else task.base_rates[name]
        excess = damage.part * max(world.limits_pp(task)[name] / 100, MORE * mean)
    whole = excess * {"single": 0.0, "whole": 1.0, "mixed": 0.5}[damage.kind]
    if not fixed:
        struck = generator.random(shares.shape) < whole / (1 - mean)
        worse = np.where(struck, 1.0, shares)
    else:  # question after question, in an order of its own
        order = np.random.default_rng([world.seed, 7, index, *name.encode()])
        order = order.permutation(shares.shape[1])
        room = (1 - shares[0])[order]
        taken = np.clip(whole * room.size - (np.cumsum(room) - room), 0, room)
        worse = shares.copy()
        worse[:, order] += taken
        mean = float(shares[0].mean())
    rest = excess - whole
    return worse + (1 - worse) * rest / (1 - mean - whole)


def _tables(
    world: RandomWorld, index: int, rounds: int, generator: np.random.Generator
) -> list[dict[str, Floats]]:
    """Return for BF16 and each candidate: quantity -> 1 where an answer is wrong or shows the sign.

    Tables are [rounds, n, k]. A candidate's answer has BF16's noise with probability `shared_noise`.
    """
    task = world.tasks[index]
    shape = (rounds, task.bench.questions, task.bench.repeats)
    if world.estimand == "these_questions" and task.bench.repeats == 1:
        order = generator.permuted(np.tile(np.arange(shape[1]), (rounds, 1)), axis=1)
    else:
        order = None

    def noises() -> dict[str, Floats]:
        one = generator.random(shape, np.float32)
        names = task.quantities()
        return {n: one if world.together else generator.random(shape, np.float32) for n in names}

    base = noises()
    shares = {name: _shares(world, index, name, rounds, generator) for name in task.quantities()}
    sides = [(base, shares)]
    for damages in world.damages:
        same, other = generator.random(shape, np.float32) < world.shared_noise, noises()
        noise = {name: np.where(same, base[name], other[name]) for name in base}
        worse = {
            name: _worse(world, index, name, damages[index, name], shares[name], generator)
            for name in task.quantities()
        }
        sides.append((noise, worse))

    def shown(noise: Floats, chance: Floats) -> Floats:
        if order is not None:  # which questions a look takes first is drawn, as plans draw it
            chance = np.take_along_axis(chance, order, 1)
        return (noise < chance[..., None]).astype(np.float64)

    return [{name: shown(noise[name], chance[name]) for name in noise} for noise, chance in sides]


# --- verdicts -----------------------------------------------------------------------------------


def _first(table: Floats, look: Look) -> Floats:
    return table[:, : look.questions, : look.repeats]


def _p_values(
    world: RandomWorld, index: int, base: Mapping[str, Floats], other: Mapping[str, Floats]
) -> dict[str, Floats]:
    """Return quantity -> p-values [looks, 3, rounds] of "at least its limit" and "at most".

    Third is by how many standard errors the estimate keeps the limit.
    """
    task, limits = world.tasks[index], world.limits_pp(world.tasks[index])
    looks = world.plan(task).looks
    values: dict[str, Floats] = {}
    for name in task.quantities():
        rows: list[Any] = []
        for look in looks:
            x, y = _first(base[name], look), _first(other[name], look)
            if name == ACCURACY:  # tables hold the wrong answers
                limit_pp: Any = task.bench.margin_pp
                judged = margin_p_values(total(x - y, world.estimand), limit_pp)
            else:
                limit_pp, *judged = sign_p_values(x, y, world.estimand, limits[name])
            rows.append([*judged, _inside(total(x - y, world.estimand), limit_pp)])
        values[name] = np.array(rows)
    return values


def _inside(less: Total, limit_pp: Any) -> Any:
    low, high = (100 * np.clip(end, -1, 1) for end in limits_at(less, 1 - ALPHA / 2))
    return 2 * ndtri(1 - ALPHA / 2) * (limit_pp + 100 * less.mean) / (high - low)


def _step_p(costs: Floats, looks: Sequence[Look], *, sampled: bool) -> Floats:
    """Return p-values of "the inflation is at most its limit", and its inside [looks, 2, rounds]."""
    rows: list[Any] = []
    for table in (_first(costs, look) for look in looks):
        ratio, saves = log_ratio(table, sampled=sampled)
        middle = ratio.mean
        half = stdtrit(ratio.freedom, 1 - ALPHA / 2) * np.sqrt(ratio.variance) / ratio.units
        width = np.exp(middle + half) - np.exp(middle - half)
        room = 1 + INFLATION - np.exp(middle)
        inside = 2 * ndtri(1 - ALPHA / 2) * room / width
        rows.append([exceeds_p(ratio, saves, INFLATION), inside])
    return np.array(rows)


def _crossed(p_values: Floats, fractions: tuple[float, ...], alpha: float) -> np.ndarray:
    """Return at which looks [looks, rounds] the sequential p-value is at most `alpha`."""
    levels = np.array(nominal_levels(fractions, alpha))[:, None]
    return np.logical_or.accumulate(p_values <= levels, 0)


def cost_of(fractions: Sequence[float], look: int, inside: Any) -> Any:
    """Return a look's tokens in those of a whole task: twice as many if it seems to lose the margin.

    `inside` are the standard errors by which the estimate keeps the margin.
    """
    return (fractions[look] - (fractions[look - 1] if look else 0)) * (1 + (inside < 0))


@dataclass
class _Asked:
    """One candidate's run: which rounds passed each task, failed, and how many looks they took."""

    passed: list[np.ndarray]
    failed: np.ndarray
    last: list[np.ndarray]  # of each task, the index of the last look taken; -1: not asked


def _ask(
    world: RandomWorld, values: Sequence[Mapping[str, Floats]], steps: Sequence[Floats | None],
    alpha: float, least_chance: float, budget: float,
) -> _Asked:  # fmt: skip
    """Ask task after task, look by look, as `until_decided` does, in all rounds at once."""
    spent = np.zeros(values[0][ACCURACY].shape[-1])
    rounds = values[0][ACCURACY].shape[-1]
    with_steps, with_signs = any(s is not None for s in steps), any(len(v) > 1 for v in values)
    signs = {name for v in values for name in v if name != ACCURACY}
    weight = len(values) * (1 + with_steps + with_signs)
    state, may_pass = _Asked([], np.zeros(rounds, bool), []), np.ones(rounds, bool)
    for task, value, step in zip(world.tasks, values, steps, strict=True):
        fractions = tuple(look.fraction for look in world.plan(task).looks)
        passes = np.all([_crossed(p[:, 0], fractions, alpha) for p in value.values()], 0)
        shares = {n: alpha / weight / (1 if n == ACCURACY else len(signs)) for n in value}
        tests = [(p[:, 1], p[:, 2], shares[n]) for n, p in value.items()]
        if step is not None:
            tests.append((step[:, 0], step[:, 1], alpha / weight))
        some = np.any([_crossed(p, fractions, share) for p, _, share in tests], 0)
        passed, last = np.zeros(rounds, bool), np.full(rounds, -1)
        asked_on = np.ones(rounds, bool)
        for look, now in enumerate(fractions):
            asked_on &= spent < budget
            active = ~state.failed & ~passed & asked_on
            last[active] = look
            spent += active * cost_of(fractions, look, value[ACCURACY][look, 2])
            state.failed |= active & some[look]
            passed |= active & passes[look] & ~some[look]
            inside = value[ACCURACY][look, 2]
            hopes = may_pass * crossing(inside, fractions, now, alpha)
            hopes += sum(crossing(-at[look], fractions, now, share) for _, at, share in tests)
            asked_on &= hopes >= least_chance
        may_pass &= passed
        state.passed.append(passed)
        state.last.append(last)
    return state


def _thresholds(
    world: RandomWorld, values: Sequence[Mapping[str, Floats]], asked: _Asked, points: int
) -> Floats:
    """Return the least of alpha / 1 ... alpha / `points` that a point's p-value is at most, else 1."""
    least = np.ones(asked.failed.shape)
    everywhere = np.all([last >= 0 for last in asked.last], 0)
    for number in range(1, points + 1):
        inside = everywhere.copy()
        for task, value, last in zip(world.tasks, values, asked.last, strict=True):
            fractions = tuple(look.fraction for look in world.plan(task).looks)
            for p in value.values():
                crossed = _crossed(p[:, 0], fractions, ALPHA / number)
                inside &= np.take_along_axis(crossed, np.maximum(last, 0)[None], 0)[0]
        least[inside] = ALPHA / number
    return least


def _holm(least: Floats) -> np.ndarray:
    """Return which points [points, rounds] are adopted: Holm's correction over all."""
    order = np.argsort(least, 0, kind="stable")
    ranked = np.take_along_axis(least, order, 0)
    levels = ALPHA / np.arange(len(least), 0, -1)[:, None]
    fits = np.logical_and.accumulate(ranked <= levels + 1e-12, 0)
    adopted = np.zeros_like(fits)
    np.put_along_axis(adopted, order, fits, 0)
    return adopted


def drawn_answers(
    world: RandomWorld, rounds: int, block: int
) -> tuple[list[list[dict[str, Floats]]], list[Floats | None]]:
    """Return of each task the tables of BF16 and the candidates, and the costs if steps are judged."""
    generator = np.random.default_rng([world.seed, block])
    tables = [_tables(world, index, rounds, generator) for index in range(len(world.tasks))]
    costs = [
        many_costs(
            task.bench,
            generator,
            rounds,
            INFLATION,
            fixed=are_fixed(world.estimand, task.bench.repeats),
        )
        if task.steps
        else None
        for task in world.tasks
    ]
    return tables, costs


def many_verdicts(
    world: RandomWorld, rounds: int, block: int = 0, least_chance: float = LEAST_CHANCE,
    budget: float = math.inf,
) -> dict[str, Any]:  # fmt: skip
    """Return of each round: false PASS and FAIL of the run, points adopted, and each quantity alone.

    "quantities" maps (candidate, task, quantity) at its limit to [passes alone, fails alone] over all
    looks, each at 5 %. "last" has of each task the index of the run's last look, -1 if it took none.
    """
    tables, costs = drawn_answers(world, rounds, block)
    looks = [world.plan(task).looks for task in world.tasks]
    steps = [
        None
        if cost is None
        else _step_p(cost, look, sampled=not are_fixed(world.estimand, cost.shape[2]))
        for cost, look in zip(costs, looks, strict=True)
    ]
    points = len(world.damages) - 1
    alone: dict[tuple[int, int, str], Any] = {}
    found: list[_Asked] = []
    least: list[Floats] = []
    for number, damages in enumerate(world.damages):
        values = [
            _p_values(world, index, sides[0], sides[number + 1])
            for index, sides in enumerate(tables)
        ]
        for (index, name), damage in damages.items():
            fractions = tuple(look.fraction for look in looks[index])
            if damage.part == 1:
                pair = [_crossed(values[index][name][:, s], fractions, ALPHA)[-1] for s in (0, 1)]
                alone[number, index, name] = np.array(pair)
        judged = steps if number == 0 else [None] * len(steps)
        spending = (ALPHA / points, 0.0, math.inf) if number else (ALPHA, least_chance, budget)
        found.append(_ask(world, values, judged, *spending))
        if number:
            least.append(_thresholds(world, values, found[-1], points))
    run = found[0]
    return {
        "PASS": np.all(run.passed, 0) & ~run.failed,
        "FAIL": run.failed,
        "last": run.last,
        "adopted": _holm(np.stack(least)) if points else np.zeros((0, rounds), bool),
        "quantities": alone,
        "steps": [
            _crossed(p[:, 0], tuple(x.fraction for x in look), ALPHA)[-1]
            for p, look in zip(steps, looks, strict=True)
            if p is not None
        ],
    }


def one_verdict(
    world: RandomWorld, tables: Sequence[Sequence[Mapping[str, Floats]]],
    costs: Sequence[Floats | None], number: int, round_: int, budget: float = math.inf,
) -> tuple[str, dict[str, Comparison | None]]:  # fmt: skip
    """Return the product's own verdict on one round of a candidate, and its comparisons."""
    points = 0 if number == 0 else len(world.damages) - 1
    plans = {str(index): world.plan(task) for index, task in enumerate(world.tasks)}

    def at(index: int, look: Look) -> Comparison:
        task, terms = world.tasks[index], world.terms(world.tasks[index], points)
        base, other = (
            {name: _first(table, look)[round_] for name, table in side.items()}
            for side in (tables[index][0], tables[index][number + 1])
        )
        cost, inflation = costs[index], None
        if cost is not None and not points:
            seen = _first(cost, look)[round_]
            sides = (
                {str(i): list(map(tuple, rows)) for i, rows in enumerate(seen[..., a : a + 2])}
                for a in (0, 2)
            )
            inflation = step_inflation(
                *sides,
                (),
                confidence=terms.confidence,
                limit=terms.max_step_inflation,
                sampled=not are_fixed(world.estimand, cost.shape[2]),
            )
        limits = world.limits_pp(task)
        return replace(
            compare(by_name(1 - base[ACCURACY]), by_name(1 - other[ACCURACY]), terms),
            step_inflation=inflation,
            health={
                name: compare_sign(base[name], other[name], terms, limits[name])
                for name in task.base_rates
            },
        )

    def ask(name: str, many: int) -> tuple[int, Comparison | None]:
        nonlocal spent
        looks = plans[name].looks[:many]
        if not looks:
            return many, None
        seen = at_looks([at(int(name), look) for look in looks], looks)
        shares = [look.fraction for look in looks]
        spent += cost_of(shares, many - 1, limits_on(seen)["margin"].inside)
        return many, seen

    spent, least = 0.0, LEAST_CHANCE if number == 0 else 0.0
    seen = until_decided(plans, ask, least, lambda _: spent < budget)[1]
    return judge(seen).outcome, seen


def adopted(seen: Sequence[Mapping[str, Comparison | None]]) -> list[bool]:
    """Return which points the product would name, from each point's comparisons."""
    whole = {
        str(number): [c for c in each.values() if c is not None]
        for number, each in enumerate(seen)
        if all(each.values())
    }
    fits = passing(whole) if whole else {}
    return [fits.get(str(number), 1.0) <= ALPHA + 1e-12 for number in range(len(seen))]
