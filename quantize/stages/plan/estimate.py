"""Estimates what each stage of a run takes on a GPU: seconds, memory, streamed bytes, disk.

    seconds = the larger of  passes x floor x factor  and  STREAMED x streamed bytes / rate of the link

A pass' floor, its least time, follows from the rates that a GPU's maker states (`gpu_support.floor`).
Factors and STREAMED were measured on one H200 at the 26B shape, and are assumed to hold elsewhere.
Calibrate's time is an upper bound: the sum of both terms, with all steps of each canvas. Evaluate's
time is a range: from typical answer lengths and an early verdict to all answers at their limits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

from quantize.checkpoints.reader import TensorInfo
from quantize.checkpoints.targets import Target, sum_bytes
from quantize.errors import ResourceError
from quantize.recipe.sections import Recipe
from quantize.recovery.sequential import Plan, out_of_reach
from quantize.runtime.gpu.memory import Need, cache_bytes, plan
from quantize.stages.memory_needs import HELD_OUT, REPLAYED, needs
from quantize.stages.plan.gpu_support import CONTEXT, floor

if TYPE_CHECKING:
    from quantize.runtime.gpu.gpus import Gpu

STEPS = 48  # denoising steps of a canvas, at most
# What follows was measured on one H200 with 16 cores, files in memory; docs/first-26b-run.md.
# Factors over the floor, from 64 prompts x 2 canvases x 48 steps calibrated in 81.3 s, and from BF16
# evaluated in 16 slots at 2,481 tokens/s, 16 steps per canvas.
CALIBRATING, DENOISING = 3.3, 2.4
# Link: 53 GB/s of 63 from pinned memory. BF16 evaluated at 22 GB, 128 canvases in lockstep, took 1.96 s
# per pass, which streams 72.6 GB.
LINK_REACHED, STREAMED = 53 / 63, 1.4
# GPTQ: six layers were rounded in 12.0 s; the passes of 64 prompts took 2.6 s per layer; 11.7 s of the
# 131.0 s that 16 prompts took went to reads and writes.
ROUNDING_LAYER_SECONDS, ROUNDING_FILES_SECONDS = 12.0 / 6, 11.7
HESSIAN_STEP_SECONDS = 2.6 * 30 / 6144
# Seconds per GB of BF16: convert, verify after it, loading, loading for a calibration with what it
# writes last. Fidelity opens both models and checks every Linear: 55 of the 67 s that 16 steps of 16
# canvases took.
CONVERT_SECONDS, VERIFY_SECONDS, LOADING_SECONDS = 19.0 / 51.65, 10.6 / 51.65, 0.12
CALIBRATE_SECONDS, CHECKING_SECONDS = 0.2, 0.8
BF16_FLOP = 989e12  # FLOP/s of that GPU; GPTQ's time is taken to be inversely proportional
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
class GpuMachine:
    """The GPU, and the rates of its link and disk, for which a run is planned."""

    gpu: "Gpu"  # if its rates are unknown, no times are estimated
    budget: float  # bytes of the GPU's memory that may be used
    # Bytes/s from the host; None for the reachable share of what the GPU's maker states.
    link: float | None = None
    disk: float = inf  # bytes/s of the disk; infinite if unknown: files are taken to be in memory

    @classmethod
    def of(cls, gpu: "Gpu | None", gpu_memory: float | None) -> "GpuMachine":
        """Return a machine that uses `gpu_memory` bytes (None: all) of `gpu` (None: an H200)."""
        from quantize.runtime.gpu.gpus import GPUS

        gpu = gpu or GPUS["h200"]
        return cls(gpu, gpu_memory or gpu.memory)

    @property
    def link_rate(self) -> float:
        """Bytes/s at which weights are streamed; 0 if unknown."""
        return self.link or self.gpu.link * LINK_REACHED


@dataclass(frozen=True)
class StageRow:
    """What one stage of a run takes."""

    stage: str  # its name
    # (low, high) end of the estimate; None if the GPU's rates are not known.
    seconds: tuple[float, float] | None = None
    bound: str = ""  # what limits the speed: "compute", "link", "disk" or "host"
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
    machine: GpuMachine,
) -> list[StageRow]:
    """Return one row per stage; `config` and `tensors` are the BF16 model's, `targets` its plan."""
    stages = _Stages(recipe, config, targets, machine)
    return stages.all(needs(recipe, config, tensors, targets, machine.gpu.capability))


class _Stages:
    """The rows of one recipe on one machine."""

    def __init__(
        self,
        recipe: Recipe,
        config: Mapping[str, Any],
        targets: Sequence[Target],
        machine: GpuMachine,
    ) -> None:
        self._recipe, self._config, self._targets = recipe, config, targets
        self._machine = machine
        self._before, self._after = sum_bytes(targets)

    def all(self, needed: Sequence[Need]) -> list[StageRow]:
        """Return one row for each stage with a `Need` in `needed`, and for convert and verify."""
        own: dict[str, list[Need]] = {}
        for need in needed:
            own.setdefault(need.stage.split()[0], []).append(need)
        rows = {stage: self._made(stage, each) for stage, each in own.items()}
        last = [rows.pop("fidelity"), rows.pop("evaluate")]
        files = [self._files("convert", CONVERT_SECONDS), self._files("verify", VERIFY_SECONDS)]
        return [*rows.values(), *files, *last]

    def _made(self, stage: str, needed: Sequence[Need]) -> StageRow:
        """Return the row that the stage's own method makes, or a row of what the GPU lacks."""
        try:
            return getattr(self, f"_{stage}")(*needed)
        except ResourceError as error:
            return StageRow(stage, lacks=error)

    def _passes(self, need: Need, count: float, factor: float) -> tuple[StageRow, float, float]:
        """Return a row without seconds, and the seconds that `count` passes compute and stream."""
        found = plan(need, self._config, self._machine.budget)
        count *= need.batch / found.need.batch
        carried, host = found.streamed + found.moved, OWN_BYTES
        if found.need.on_host:
            host += found.need.lanes * found.need.batch * cache_bytes(self._config, need.context)
        row = StageRow(need.stage.split()[0], gpu=found.total, streamed=carried, host=host)
        if (rates := self._machine.gpu.rates) is None:
            return row, 0.0, 0.0
        is_bf16 = need.stack.name == "BF16"
        least = floor(self._config, self._targets, rates, found.need.batch, CONTEXT, bf16=is_bf16)
        streamed = STREAMED * count / found.need.lanes * carried / self._machine.link_rate
        return row, count * factor * sum(least.values()), streamed

    def _timed(
        self, row: StageRow, fixed: float, *parts: tuple[str, float], least: float = 1.0
    ) -> StageRow:
        """Return `row` with seconds: the longest of `parts`, at best times `least`, plus `fixed`."""
        bound, longest = max(parts, key=lambda part: part[1])
        if self._machine.gpu.rates is None:
            return row
        return replace(row, seconds=(fixed + longest * least, fixed + longest), bound=bound)

    def _read(self, nbytes: float, fast: float) -> float:
        """Return the seconds of reading files: `fast` from memory, or more from a slow disk."""
        return max(fast, nbytes / self._machine.disk)

    def _calibrate(self, need: Need) -> StageRow:
        settings = self._recipe.calibration
        assert settings is not None
        count = need.batches * settings.canvases * STEPS
        row, compute, link = self._passes(need, count, CALIBRATING)
        loading = self._read(self._before, CALIBRATE_SECONDS * self._before / 1e9)
        bound = "link" if link > compute else "compute"  # a layer's passes wait for its weights
        row = replace(row, scratch=self._rows_bytes())
        return self._timed(row, loading, (bound, compute + link))

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
        gpu = plan(need, self._config, self._machine.budget).total
        rates, layers = self._machine.gpu.rates, self._config["text_config"]["num_hidden_layers"]
        slower = BF16_FLOP / rates.bf16 if rates else 0.0
        rounding = slower * layers * ROUNDING_LAYER_SECONDS
        passes = slower * calibration_steps(self._recipe) * HESSIAN_STEP_SECONDS
        moved = 2 * layers * self._rows_bytes() if rates else 0.0  # to the GPU and back, by layer
        row = StageRow(
            "round", gpu=gpu, streamed=self._before, host=HOST_BYTES["round"],
            disk=self._after, scratch=3 * self._rows_bytes(),
        )  # fmt: skip
        link, disk = moved / (self._machine.link_rate or 1), moved / self._machine.disk
        parts = ("compute", rounding + passes), ("link", link), ("disk", disk)
        return self._timed(row, self._read(self._before, ROUNDING_FILES_SECONDS), *parts)

    def _files(self, stage: str, seconds: float) -> StageRow:
        """Return the row of a stage that reads and writes files, a piece at a time."""
        fast = seconds * self._before / 1e9
        link = 2 * self._before / self._machine.link_rate if self._machine.link_rate else 0.0
        disk = (self._before + self._after) / self._machine.disk
        written = self._after if stage == "convert" else 0.0
        row = StageRow(stage, gpu=PIECES_BYTES, host=HOST_BYTES[stage], disk=written)
        return self._timed(row, 0.0, ("host", fast), ("link", link), ("disk", disk))

    def _fidelity(self, bf16: Need, quantized: Need) -> StageRow:
        settings = self._recipe.calibration if self._recipe.needs_calibration else None
        canvases = settings.canvases if settings else 2
        passes = canvases * STEPS * -(-HELD_OUT // REPLAYED)
        modes = {"none", self._recipe.evaluation.activations, *self._recipe.gate.max_kl_nats}
        # BF16 records first where nothing was calibrated.
        needed = {bf16: passes * (1 if settings else 3), quantized: passes * (len(modes) + 1)}
        return self._both(needed, CHECKING_SECONDS)

    def _evaluate(self, bf16: Need, quantized: Need) -> StageRow:
        tokens = sum(tokens_by_task(self._recipe).values())
        count = tokens / self._config["canvas_length"] / bf16.batch * (STEPS_A_CANVAS + 1)
        return self._both({bf16: count, quantized: count}, LOADING_SECONDS, TYPICAL * SEQUENTIAL)

    def _both(self, needed: Mapping[Need, float], opening: float, least: float = 1.0) -> StageRow:
        """Return the row of a stage that runs both models for so many passes, BF16 first."""
        found = [self._passes(need, count, DENOISING) for need, count in needed.items()]
        largest, _, _ = max(found, key=lambda each: each[0].gpu)
        row = replace(largest, streamed=found[0][0].streamed)
        seconds = sum(max(times) for _, *times in found)
        compute, link = (sum(each) for each in zip(*(times for _, *times in found), strict=True))
        bound = "link" if link > compute else "compute"
        nbytes = self._before + self._after
        opened = self._read(nbytes, opening * nbytes / 1e9)
        return self._timed(row, opened, (bound, seconds), least=least)


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
    found: dict[str, int] = {}
    for task in recipe.evaluation.tasks:
        if (size := recipe.evaluation.questions(task)) is not None:
            found[task] = min(size, recipe.evaluation.limit.get(task, size))
    return found


def evaluation_seconds(recipe: Recipe) -> float:
    """Return evaluate's estimated seconds on an H200 for typical answers and an early verdict."""
    tokens = sum(tokens_by_task(recipe).values())
    return 2 * TYPICAL * SEQUENTIAL * tokens / EVALUATED_TOKENS_A_SECOND


def cannot_pass(recipe: Recipe) -> list[str]:
    """Return a sentence for each task on which the gate cannot PASS, whatever the answers are."""
    found: list[str | None] = []
    for task, questions in known_sizes(recipe).items():
        repeats = recipe.evaluation.repeats.get(task, 1)
        own = Plan(recipe.gate.estimand, questions, repeats, 0)
        found.append(out_of_reach(task, own, recipe.gate.terms(task)))
    return [sentence for sentence in found if sentence]
