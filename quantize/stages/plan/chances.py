"""Says what a recipe's looks decide for a known loss: chances of PASS and FAIL, and tokens asked.

Whole runs are drawn as `sequential` takes them: task after task, the cheapest first, with its bounds,
its giving up and its budget (both models' answers of typical length). Only accuracy is judged. It is
arithmetic: an estimate moves like a normal sum.
"""

import math

import numpy as np
from scipy.special import ndtri

from quantize.recipe.sections import Recipe
from quantize.recovery.estimands import unseen_p
from quantize.recovery.sequential import LEAST_CHANCE, crossing, nominal_levels
from quantize.stages.plan.estimate import TYPICAL, known_plans, tokens_by_task

# Shares that BF16 may solve, those of tests/support/worlds.py; of another task half, the least certain.
SOLVED = {
    "aime25": 0.437, "gpqa_diamond": 0.641, "gsm8k": 0.943,
    "aime25_thinking": 0.65, "gpqa_diamond_thinking": 0.698, "gsm8k_thinking": 0.951,
}  # fmt: skip
WITHIN = 0.45  # share of p (1 - p) that lies within questions; both models share half of the noise
RUNS = 4000


def outlook(recipe: Recipe, lost: float) -> tuple[float, float, float]:
    """Return the shares of runs with PASS and with FAIL, and of all tokens that a run asks on average.

    Each task of `known_plans` (one at least) truly loses the part `lost` of its margin.
    """
    plans, most, generator = known_plans(recipe), tokens_by_task(recipe), np.random.default_rng(0)
    alpha, asked = 1 - recipe.gate.confidence, np.zeros(RUNS)
    all_pass, failed = np.ones(RUNS, bool), np.zeros(RUNS, bool)
    for task in sorted(plans, key=most.__getitem__):
        plan, margin = plans[task], recipe.gate.margin_pp[task] / 100
        fractions, solved = tuple(look.fraction for look in plan.looks), SOLVED.get(task, 0.5)
        steps, moved = np.diff([0, *fractions]), WITHIN * solved * (1 - solved)
        # An answer's variance by the p-value, which counts the margin's losses as if they were seen.
        judged, answers = moved + margin, plan.questions * plan.repeats
        drift = (1 - lost) * margin * math.sqrt(answers / judged)
        noise = np.sqrt(steps * (moved + lost * margin) / judged)
        motion = generator.normal(drift * steps, noise, (RUNS, len(steps))).cumsum(1).T
        levels = [nominal_levels(fractions, level) for level in (alpha, alpha / len(plans))]
        going, passed = ~failed, np.zeros(RUNS, bool)
        for now, step, at, level, holm in zip(fractions, steps, motion, *levels, strict=True):
            going &= 2 * TYPICAL * asked < (recipe.evaluation.token_budget or math.inf)
            asked += going * step * most[task]
            inside = at / math.sqrt(now)  # standard errors by which the estimate keeps the margin
            beyond = np.maximum(0, -at) / now / math.sqrt(judged * answers)
            outside = inside / np.sqrt(1 + 1.5 * beyond)  # as roots of Poisson's counts differ
            shown = unseen_p(math.ceil(plan.units * now), 100 * margin) <= level
            passed |= going & shown & (inside >= -ndtri(level))
            failed |= going & (outside <= ndtri(holm))
            hope = crossing(-inside, fractions, now, alpha / len(plans))
            hope += all_pass * crossing(inside, fractions, now, alpha)
            going &= ~(passed | failed) & (hope >= LEAST_CHANCE)
        all_pass &= passed
    return float(all_pass.mean()), float(failed.mean()), float(asked.mean() / sum(most.values()))
