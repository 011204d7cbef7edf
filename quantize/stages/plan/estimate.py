"""Estimates each stage's memory on a GPU, streamed bytes and disk, by arithmetic, and the passes' time.

    seconds = the larger of  passes x a forward's likely seconds x factor  and  STREAMED x bytes / link

A forward's seconds are those of `gpu_support`. Only what runs the model is timed: calibrate, fidelity
and evaluate. `quantize rehearse` measures every stage on the machine itself. Calibrate's time is an
upper bound, with all steps of each canvas. Evaluate's time is a range: from typical answer lengths and
an early verdict to all answers at their limits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quantize.checkpoints.reader import TensorInfo
from quantize.checkpoints.targets import Target, sum_bytes
from quantize.errors import ResourceError
from quantize.recipe.sections import Recipe
from quantize.recovery.sequential import Plan, out_of_reach
from quantize.runtime.gpu.memory import Need, cache_bytes, plan
from quantize.stages.memory_needs import HELD_OUT, REPLAYED, choice_bytes, needs
from quantize.stages.plan.gpu_support import CONTEXT, forward_seconds

if TYPE_CHECKING:
    from quantize.runtime.gpu.gpus import Gpu

STEPS = 48  # denoising steps of a canvas, at most
# Measured on one H200 (docs/first-26b-run.md): 64 prompts x 2 canvases x 48 steps were calibrated in
# 94.6 s, which is OBSERVING times their forwards and the loading of weights. A pass in lockstep that
# streams 72.6 GB took 1.96 s, STREAMED times what the link's stated rate allows.
OBSERVING, STREAMED = 1.7, 1.7
# Seconds per GB of opened checkpoints; fidelity also checks every Linear.
LOADING_SECONDS, CALIBRATE_SECONDS, CHECKING_SECONDS = 0.12, 0.2, 0.8
# The most host memory that stages held for themselves on that machine, without the rows of GPTQ.
HOST_BYTES = {"convert": 1.6e9, "verify": 1.8e9, "round": 3.6e9}
OWN_BYTES = 3.0e9
# GPU memory by arithmetic: the CUDA context and a few pieces of weights.
PIECES_BYTES = 3.6e9
# Evaluation, docs/evaluation.md: steps of a canvas in a public report; the share of tokens used, 58 M
# of 168 M that AIME and GPQA allow; the simulated share of answers that a run without loss asks for.
STEPS_A_CANVAS, TYPICAL, SEQUENTIAL = 26, 0.35, 0.66
EVALUATED_TOKENS_A_SECOND = 2481 * 17 / (STEPS_A_CANVAS + 1)  # BF16 on that GPU, at so many steps


@dataclass(frozen=True)
class StageRow:
    """What one stage of a run takes."""

    stage: str  # its name
    # (low, high) end of the estimate; None if it is not timed, or the GPU's rates are not known.
    seconds: tuple[float, float] | None = None
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
    gpu: "Gpu",
) -> list[StageRow]:
    """Return one row per stage; `config` and `tensors` are the BF16 model's, `targets` its plan.

    Of the GPU's memory all may be used (`gpu_support.planned_gpu`).
    """
    stages = _Stages(recipe, config, targets, gpu)
    return stages.all(needs(recipe, config, tensors, targets, gpu.capability))


class _Stages:
    """The rows of one recipe on one GPU."""

    def __init__(
        self, recipe: Recipe, config: Mapping[str, Any], targets: Sequence[Target], gpu: "Gpu"
    ) -> None:
        self._recipe, self._config, self._targets, self._gpu = recipe, config, targets, gpu
        self._before, self._after = sum_bytes(targets)

    def all(self, needed: Sequence[Need]) -> list[StageRow]:
        """Return one row for each stage with a `Need` in `needed`, and for convert and verify."""
        by_stage: dict[str, list[Need]] = {}
        for need in needed:
            by_stage.setdefault(need.stage.split()[0], []).append(need)
        rows = {stage: self._made(stage, needs) for stage, needs in by_stage.items()}
        last = [rows.pop("fidelity"), rows.pop("evaluate")]
        files = [
            StageRow("convert", gpu=PIECES_BYTES, host=HOST_BYTES["convert"], disk=self._after),
            StageRow("verify", gpu=PIECES_BYTES, host=HOST_BYTES["verify"]),
        ]
        return [*rows.values(), *files, *last]

    def _made(self, stage: str, needed: Sequence[Need]) -> StageRow:
        """Return the row that the stage's own method makes, or a row of what the GPU lacks."""
        try:
            return getattr(self, f"_{stage}")(*needed)
        except ResourceError as error:
            return StageRow(stage, lacks=error)

    def _passes(self, need: Need, count: float) -> StageRow:
        """Return a row with the seconds that `count` passes compute, or stream if that takes longer."""
        placed = plan(need, self._config, self._gpu.memory)
        count *= need.batch / placed.need.batch
        carried, host = placed.streamed + placed.moved, OWN_BYTES
        if placed.need.on_host:
            host += placed.need.lanes * placed.need.batch * cache_bytes(self._config, need.context)
        row = StageRow(need.stage.split()[0], gpu=placed.total, streamed=carried, host=host)
        if (rates := self._gpu.rates) is None:
            return row
        products = "bf16" if need.stack.name == "BF16" else "stored"
        shape = placed.need.batch, CONTEXT
        _, forward = forward_seconds(self._config, self._targets, rates, *shape, products)
        streaming = STREAMED * carried / placed.need.lanes / self._gpu.link if carried else 0.0
        return replace(row, seconds=(count * max(forward, streaming),) * 2)

    def _calibrate(self, need: Need) -> StageRow:
        settings = self._recipe.calibration
        assert settings is not None
        row = self._passes(need, OBSERVING * need.batches * settings.canvases * STEPS)
        return replace(
            self._later(row, CALIBRATE_SECONDS, self._before), scratch=self._rows_bytes()
        )

    @staticmethod
    def _later(row: StageRow, opening: float, nbytes: float, least: float = 1.0) -> StageRow:
        """Return `row`, its low end times `least`, with `opening` seconds per GB on both ends."""
        if row.seconds is None:
            return row
        opened, (low, high) = opening * nbytes / 1e9, row.seconds
        return replace(row, seconds=(opened + least * low, opened + high))

    def _rows_bytes(self) -> float:
        """Return the bytes of recorded rows: what enters the first layer at every step and prompt."""
        settings = self._recipe.calibration
        if settings is None or self._recipe.quantization.rounding != "gptq":
            return 0.0
        canvas = self._config["canvas_length"]
        tokens = canvas * calibration_steps(self._recipe) + settings.prompts * (
            settings.max_prompt_tokens + (settings.canvases - 1) * canvas
        )
        return 2.0 * self._config["text_config"]["hidden_size"] * tokens

    def _round(self, need: Need) -> StageRow:
        return StageRow(
            "round", gpu=plan(need, self._config, self._gpu.memory).total, streamed=self._before,
            host=HOST_BYTES["round"], disk=self._after, scratch=3 * self._rows_bytes(),
        )  # fmt: skip

    def _fidelity(self, bf16: Need, quantized: Need) -> StageRow:
        settings = self._recipe.calibration if self._recipe.needs_calibration else None
        canvases = settings.canvases if settings else 2
        passes = canvases * STEPS * -(-HELD_OUT // REPLAYED)
        modes = {"none", self._recipe.evaluation.activations, *self._recipe.gate.replayed}
        # Each model also takes the other's choices. BF16 records first where nothing was calibrated.
        needed = {bf16: passes * (2 if settings else 4), quantized: passes * (len(modes) + 2)}
        row = self._later(self._both(needed, CHECKING_SECONDS), LOADING_SECONDS, self._before)
        tokens = HELD_OUT * canvases * STEPS * self._config["canvas_length"]
        return replace(row, host=row.host + 2 * tokens * choice_bytes(self._config))

    def _evaluate(self, bf16: Need, quantized: Need) -> StageRow:
        tokens = sum(tokens_by_task(self._recipe).values())
        count = tokens / self._config["canvas_length"] / bf16.batch * (STEPS_A_CANVAS + 1)
        return self._both({bf16: count, quantized: count}, LOADING_SECONDS, TYPICAL * SEQUENTIAL)

    def _both(self, needed: Mapping[Need, float], opening: float, least: float = 1.0) -> StageRow:
        """Return the row of a stage that runs both models for so many passes, BF16 first."""
        rows = [self._passes(need, count) for need, count in needed.items()]
        seconds = sum(row.seconds[1] for row in rows if row.seconds is not None)
        largest = max(rows, key=lambda row: row.gpu)
        row = replace(largest, streamed=rows[0].streamed)
        row = replace(row, seconds=(seconds,) * 2) if self._gpu.rates else row
        return self._later(row, opening, self._before + self._after, least)


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


def evaluation_seconds(recipe: Recipe) -> float:
    """Return evaluate's estimated seconds on an H200 for typical answers and an early verdict."""
    tokens = sum(tokens_by_task(recipe).values())
    return 2 * TYPICAL * SEQUENTIAL * tokens / EVALUATED_TOKENS_A_SECOND


def cannot_pass(recipe: Recipe) -> list[str]:
    """Return a sentence for each task on which the gate cannot PASS, whatever the answers are."""
    sentences: list[str | None] = []
    for task, questions in known_sizes(recipe).items():
        repeats = recipe.evaluation.repeats.get(task, 1)
        looks_plan = Plan(recipe.gate.estimand, questions, repeats, 0)
        sentences.append(out_of_reach(task, looks_plan, recipe.gate.terms(task)))
    return [sentence for sentence in sentences if sentence]
