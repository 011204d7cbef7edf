"""Estimates each stage's memory on a GPU, its streamed bytes and disk, and the time of evaluation.

Only evaluation, which takes most of a run's time, is timed, by the tokens/s of `gpu_support`. `quantize
rehearse` measures every stage on the machine itself. The time is a range: from typical answer lengths
and an early verdict to all answers at their limits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantize.checkpoints.reader import TensorInfo
from quantize.checkpoints.targets import Target, sum_bytes
from quantize.errors import ResourceError
from quantize.recipe.sections import Recipe
from quantize.recovery.sequential import Plan, out_of_reach
from quantize.runtime.gpu.gpus import Gpu
from quantize.runtime.gpu.memory import MemoryPlan, Need, cache_bytes, plan
from quantize.stages.memory_needs import choice_bytes, needs, replayed_of
from quantize.stages.plan.gpu_support import CONTEXT, CanvasWork, tokens_a_second

STEPS = 48  # denoising steps of a canvas, at most
# The most host memory that stages held for themselves on one H200's machine (docs/first-26b-run.md),
# without the rows of GPTQ.
HOST_BYTES = {"convert": 1.6e9, "verify": 1.8e9, "round": 3.6e9}
OWN_BYTES = 3.0e9
# GPU memory by arithmetic: the CUDA context and a few pieces of weights.
PIECES_BYTES = 3.6e9
# Evaluation, docs/evaluation.md: steps of a canvas in a public report; the share of tokens used, 58 M
# of 168 M that AIME and GPQA allow; the simulated share of tokens that a run without loss asks for.
STEPS_A_CANVAS, TYPICAL, SEQUENTIAL = 26, 0.35, 0.61
AS_REPORTED = CanvasWork(STEPS_A_CANVAS)
EVALUATED_TOKENS_A_SECOND = 2481 * 17 / (STEPS_A_CANVAS + 1)  # BF16 on that GPU, at so many steps


@dataclass(frozen=True)
class StageRow:
    """What one stage of a run takes."""

    stage: str  # its name
    # (low, high) end of evaluation's time; None of another stage, or if the GPU's rates are not known
    seconds: tuple[float, float] | None = None
    candidate: tuple[float, float] | None = (
        None  # what the quantized model alone takes of `seconds`
    )
    gpu: float = 0.0  # bytes of the GPU's memory
    streamed: float = 0.0  # bytes that one pass of all batches in lockstep takes over the link
    host: float = OWN_BYTES  # bytes of host memory that the stage holds for itself
    disk: float = 0.0  # bytes that it writes and leaves
    scratch: float = 0.0  # bytes that it writes and removes again
    lacks: ResourceError | None = None  # set, and all else unset, if the GPU's memory is too small


def planned(
    recipe: Recipe,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    targets: Sequence[Target],
    gpu: Gpu,
    denoising: CanvasWork = AS_REPORTED,
) -> list[StageRow]:
    """Return one row per stage; `config` and `tensors` are the BF16 model's, `targets` its plan.

    Of the GPU's memory all may be used (`gpu_support.planned_gpu`). Answers are denoised as
    `denoising` says.
    """
    stages = _Stages(recipe, config, targets, gpu, denoising)
    return stages.all(needs(recipe, config, tensors, targets, gpu.capability))


@dataclass(frozen=True)
class _Stages:
    """The rows of one recipe on one GPU."""

    recipe: Recipe
    config: Mapping[str, Any]
    targets: Sequence[Target]
    gpu: Gpu
    denoising: CanvasWork

    def all(self, needed: Sequence[Need]) -> list[StageRow]:
        """Return one row for each stage with a `Need` in `needed`, and for convert and verify."""
        by_stage: dict[str, list[Need]] = {}
        for need in needed:
            by_stage.setdefault(need.stage.split()[0], []).append(need)
        rows = {stage: self._made(stage, needs) for stage, needs in by_stage.items()}
        last = [rows.pop("fidelity"), rows.pop("evaluate")]
        _, after = sum_bytes(self.targets)
        files = [
            StageRow("convert", gpu=PIECES_BYTES, host=HOST_BYTES["convert"], disk=after),
            StageRow("verify", gpu=PIECES_BYTES, host=HOST_BYTES["verify"]),
        ]
        return [*rows.values(), *files, *last]

    def _made(self, stage: str, needed: Sequence[Need]) -> StageRow:
        """Return the row that the stage's own method makes, or a row of what the GPU lacks."""
        try:
            return getattr(self, f"_{stage}")(*(self._fit(need) for need in needed))
        except ResourceError as error:
            return StageRow(stage, lacks=error)

    def _fit(self, need: Need) -> MemoryPlan:
        return plan(need, self.config, self.gpu.memory)

    def _row(self, bf16: MemoryPlan, *others: MemoryPlan) -> StageRow:
        """Return the row of a stage that runs models, BF16 first, one after the other."""
        largest, host = max((bf16, *others), key=lambda placed: placed.total), OWN_BYTES
        if (need := largest.need).on_host:
            host += need.lanes * need.batch * cache_bytes(self.config, need.context)
        streamed = bf16.streamed + bf16.moved
        return StageRow(need.stage.split()[0], gpu=largest.total, streamed=streamed, host=host)

    def _calibrate(self, bf16: MemoryPlan) -> StageRow:
        return replace(self._row(bf16), scratch=self._rows_bytes())

    def _rows_bytes(self) -> float:
        """Return the bytes of recorded rows: what enters the first layer at every step and prompt."""
        settings = self.recipe.calibration
        if settings is None or self.recipe.quantization.rounding != "gptq":
            return 0.0
        canvas = self.config["canvas_length"]
        tokens = canvas * calibration_steps(self.recipe) + settings.prompts * (
            settings.max_prompt_tokens + (settings.canvases - 1) * canvas
        )
        return 2.0 * self.config["text_config"]["hidden_size"] * tokens

    def _round(self, bf16: MemoryPlan) -> StageRow:
        before, after = sum_bytes(self.targets)
        return StageRow(
            "round", gpu=bf16.total, streamed=before, host=HOST_BYTES["round"], disk=after,
            scratch=3 * self._rows_bytes(),
        )  # fmt: skip

    def _fidelity(self, bf16: MemoryPlan, quantized: MemoryPlan) -> StageRow:
        settings = self.recipe.calibration if self.recipe.needs_calibration else None
        canvases, row = settings.canvases if settings else 2, self._row(bf16, quantized)
        tokens = replayed_of(self.recipe) * canvases * STEPS * self.config["canvas_length"]
        return replace(row, host=row.host + 2 * tokens * choice_bytes(self.config))

    def _evaluate(self, bf16: MemoryPlan, quantized: MemoryPlan) -> StageRow:
        row = self._row(bf16, quantized)
        if self.gpu.rates is None:
            return row
        both = [self._asked_seconds(placed) for placed in (bf16, quantized)]
        ranges = [(TYPICAL * SEQUENTIAL * most, most) for most in (sum(both), both[1])]
        return replace(row, seconds=ranges[0], candidate=ranges[1])

    def _asked_seconds(self, placed: MemoryPlan) -> float:
        """Return the seconds in which a model gives all answers, each at its limit."""
        need = placed.need
        products = "bf16" if need.stack.name == "BF16" else "stored"
        streamed = (placed.streamed + placed.moved) / need.lanes
        slowest, _ = tokens_a_second(
            self.config, self.targets, self.gpu, need.batch, CONTEXT, products, streamed,
            self.denoising,
        )  # fmt: skip
        return sum(tokens_by_task(self.recipe).values()) / slowest


def least_of(error: ResourceError) -> str:
    """Return the least memory that a stage needs, such as "3.1 GB", as its error's message says."""
    return str(error).partition(" needs ")[2].partition(";")[0]


def calibration_steps(recipe: Recipe) -> int:
    """Return prompts x canvases x steps, the most denoising steps; 0 if nothing is calibrated."""
    settings = recipe.calibration
    return settings.prompts * settings.canvases * STEPS if settings else 0


def tokens_by_task(recipe: Recipe) -> dict[str, int]:
    """Return task -> the most tokens that one model's answers take, for tasks of `known_sizes`."""
    settings = recipe.evaluation
    return {
        task: questions * settings.repeats.get(task, 1) * settings.answer_tokens(task)
        for task, questions in known_sizes(recipe).items()
    }


def known_sizes(recipe: Recipe) -> dict[str, int]:
    """Return task -> number of questions asked, for tasks whose data set has a known size."""
    sizes: dict[str, int] = {}
    for task in recipe.evaluation.tasks:
        if (size := recipe.evaluation.questions(task)) is not None:
            sizes[task] = min(size, recipe.evaluation.limit.get(task, size))
    return sizes


def known_plans(recipe: Recipe) -> dict[str, Plan]:
    """Return task -> what is asked at most, for tasks whose data set has a known size."""
    settings = recipe.evaluation
    return {
        task: Plan(recipe.gate.estimand, questions, settings.repeats.get(task, 1), settings.seed)
        for task, questions in known_sizes(recipe).items()
    }


def evaluation_seconds(recipe: Recipe) -> float:
    """Return evaluate's estimated seconds on an H200 for typical answers and an early verdict."""
    tokens = sum(tokens_by_task(recipe).values())
    return 2 * TYPICAL * SEQUENTIAL * tokens / EVALUATED_TOKENS_A_SECOND


def cannot_pass(recipe: Recipe) -> list[str]:
    """Return a sentence for each task on which the gate cannot PASS, whatever the answers are."""
    sentences = (
        out_of_reach(t, plan, recipe.gate.terms(t)) for t, plan in known_plans(recipe).items()
    )
    return [sentence for sentence in sentences if sentence]
