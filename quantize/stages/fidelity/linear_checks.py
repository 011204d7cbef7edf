"""Checks each quantized Linear and each input range by itself, on the inputs that BF16 gives it.

A replay's logits average over all experts and layers. One expert in another's place moves the
logits less than rounding does. Here BF16 reads held-out prompts and one step of their first canvas.
Each Linear's input x is multiplied by its BF16 weight W and by its quantized weight W':

    error    |x W^T - x W'^T| / |x W^T| over those tokens of the first canvas that reached the Linear
    range    largest |x| in prompts and canvas, against the range 6 * 448 / input_global_scale
    clipped  share of the values beyond this calibrated range

Rounded weights give an error near their own relative error (0.1 for NVFP4, 0.03 for FP8). The
weights of another expert give an error of about 1.4. A range is at fault only if it differs from
the largest |x| by more than a factor of 8, or if over 1 % of values are clipped. The limits are so
wide since calibration saw other activations. In the bundled model a sound range was at most 6.5 times
the largest |x| of an expert that ENOUGH tokens or more reached (3,132 ranges), and up to 30 times where
fewer did. Such a range is reported as unchecked, if not even its layer's largest |x| puts it at fault.
An expert may also have a range that another of its layer has: calibration gives experts with few tokens
their layer's largest.

The router's tensors stay in BF16 and must equal BF16's: equal routers choose equal experts.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantize.checkpoints.layout import schemes_by_module
from quantize.checkpoints.load import read_input_schemes, read_modules
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import module_class
from quantize.runtime.engine.interface import BatchEngine
from quantize.runtime.record.trajectory import Trajectory
from quantize.schemes.rounding import E2M1_MAX, FP8_MAX

ERRORS_ALLOWED = 3.0  # limit of an error, as a multiple of the scheme's largest error of weights
RANGE_FACTOR = 8.0
ENOUGH = 64  # tokens of an expert from which its own largest |x| tells whether a range is too wide
MAX_CLIPPED = 0.01
TOGETHER = 8  # experts of a layer whose weights are read and dequantized at once
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj")


def check_linears(
    reference: BatchEngine,
    source: Path,
    artifact: Path,
    trajectories: Sequence[Trajectory],
    fine_tuned: bool = False,
) -> tuple[dict[str, Any], list[str]]:
    """Return fidelity.json's entry on the quantized Linears, and one sentence per fault found.

    `trajectories` are one batch, of at most `reference.capacity`. If the model is `fine_tuned`, only
    ranges can be at fault.
    """
    errors = Errors(Checkpoint.open(source), Checkpoint.open(artifact))
    ranges = InputRanges(errors.artifact)
    canvas = torch.stack([item.steps[0][-1] for item in trajectories])
    with reference.watching(ranges.see):
        passes = reference.passes([item.prompt.ids for item in trajectories])
    with reference.watching(ranges.see, errors.see):
        passes.decode(list(range(len(trajectories))), canvas.to(passes.device), None)
    routers = [
        f"{name}: {fault}"
        for name in errors.source.tensors
        if module_class(name) == "router"
        and (fault := router_fault(errors.source.read(name), errors.artifact.read(name)))
    ]
    summaries = {"error": errors.summary(), "ranges": ranges.summary()}
    of_weights = [] if fine_tuned else [*errors.faults(), *routers]
    return summaries, [*of_weights, *ranges.faults()]


def router_fault(ours: Tensor, theirs: Tensor) -> str | None:
    """Return how a router's tensor differs from BF16's (`ours`); None if it is equal."""
    if torch.equal(ours, theirs):
        return None
    if ours.shape == theirs.shape and ours.dim() == 2:
        places = (theirs[:, None] == ours).all(-1)  # [E, E], BF16's rows that each row equals
        if places.any(1).all() and places.any(0).all():
            moved = int((~places.diagonal()).sum())
            return (
                f"{moved} of its {len(ours)} rows are BF16's in another order; overlap compares "
                "experts by index, so experts that moved with their rows count as others"
            )
    return "differs from BF16's, so experts are chosen or weighed otherwise"


class Errors:
    """Measures each quantized Linear's error, |x W^T - x W'^T| / |x W^T|, on BF16's inputs x."""

    def __init__(self, source: Checkpoint, artifact: Checkpoint) -> None:
        self.source, self.artifact = source, artifact
        self.schemes = schemes_by_module(artifact.config)
        self._errors: dict[str, Tensor] = {}
        threads = min(8, len(os.sched_getaffinity(0)))  # more would wait for the interpreter
        self._pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def see(self, name: str, rows: Tensor, experts: Tensor | None) -> None:
        """Note the errors of the Linears that read `rows` [N, in], the input of module `name`.

        `experts` [N, k] has the indices of each row's experts, None if no expert reads the rows.
        """
        x = rows.flatten(0, -2)
        if experts is None:
            self._compare([name], [x], self.source.read(f"{name}.weight")[None])
            return
        layer, projections = name.rpartition(".")[0], PROJECTIONS[name.rpartition(".")[2]]
        count = self.source.tensors[name].shape[0]
        by_expert = experts.flatten().argsort(stable=True) // experts.shape[1]
        reached = by_expert.split(experts.flatten().bincount(minlength=count).tolist())

        def compare(start: int) -> None:
            together = range(start, min(start + TOGETHER, count))
            there = [expert for expert in together if len(reached[expert])]
            if not there:
                return
            fused = self.source.read_rows(name, start, together.stop, pinned=x.is_cuda)
            fused = fused.to(x.device)[[expert - start for expert in there]]
            inputs = [x[reached[expert]] for expert in there]
            for part, weights in zip(projections, fused.chunk(len(projections), 1), strict=True):
                self._compare([f"{layer}.{expert}.{part}" for expert in there], inputs, weights)

        for _ in self._pool.map(compare, range(0, count, TOGETHER)):
            pass  # an error is raised here

    def _compare(self, modules: Sequence[str], inputs: Sequence[Tensor], weights: Tensor) -> None:
        """Note the errors of a layer's Linears, each on its rows; `weights` are [n, out, in]."""
        if modules[0] not in self.schemes:
            return
        device = inputs[0].device
        quantized = read_modules(self.artifact, modules, self.schemes[modules[0]], device)
        ours = zip(modules, inputs, weights.to(device), quantized, strict=True)
        for module, rows, weight, mine in ours:
            x, weight = rows.float(), weight.float()
            distance, norm = (x @ (weight - mine.float()).T).norm(), (x @ weight.T).norm()
            self._errors[module] = torch.where(norm > 0, distance / norm, distance)

    @cached_property
    def found(self) -> dict[str, float]:
        """Name -> error of every Linear that was reached, sorted; to be read after all inputs."""
        names = sorted(self._errors)
        errors = torch.stack([self._errors[name] for name in names]).tolist() if names else []
        return dict(zip(names, errors, strict=True))

    def summary(self) -> dict[str, float]:
        """Return name -> error; for a layer's experts only the largest error of each projection."""
        largest: dict[str, float] = {}
        for module, error in self.found.items():
            name = EXPERT.sub(r"\1.\3_proj", module)
            largest[name] = max(largest.get(name, 0.0), float(f"{error:.4g}"))
        return largest

    def faults(self) -> list[str]:
        """Return one sentence for every Linear whose error is larger than rounding explains."""
        return [
            f"{module}: its products on BF16's inputs are {error:.3g} away, above {limit:.3g}"
            for module, error in self.found.items()
            for limit in [ERRORS_ALLOWED * self.schemes[module].max_relative_error]
            if not error <= limit
        ]


class InputRanges:
    """Compares each calibrated Linear's inputs with the range 6 * 448 / its input_global_scale."""

    def __init__(self, artifact: Checkpoint) -> None:
        scales = read_input_schemes(artifact).items()
        self._ranges = {
            m: FP8_MAX * E2M1_MAX / scale for m, (_, scale) in scales if scale is not None
        }
        self._experts: int = artifact.config["text_config"]["num_experts"]
        # Modules that read the same rows -> [4, E]: range, largest |x|, values seen, values beyond.
        self._figures: dict[tuple[str, ...], Tensor] = {}
        self._widths: dict[str, int] = {}  # module -> how many values one of its rows has

    def see(self, name: str, rows: Tensor, experts: Tensor | None) -> None:
        """Note the largest |x| of `rows` [N, in] and values out of range; see `Errors.see`."""
        x = rows.flatten(0, -2).abs()
        if experts is None:
            self._note((name,), x, torch.zeros(len(x), 1, dtype=torch.long, device=x.device))
            return
        layer, projection = name.rsplit(".", 1)
        for part in PROJECTIONS[projection]:
            modules = tuple(f"{layer}.{expert}.{part}" for expert in range(self._experts))
            self._note(modules, x, experts)

    def _note(self, modules: tuple[str, ...], magnitude: Tensor, owners: Tensor) -> None:
        """Count rows [N, K]; each row enters the modules whose indices `owners` [N, k] has."""
        if modules not in self._figures:
            ranges = [self._ranges.get(module, math.inf) for module in modules]
            figures = torch.zeros(4, len(modules), dtype=torch.float64, device=magnitude.device)
            figures[0] = torch.tensor(ranges, dtype=torch.float64)
            self._figures[modules] = figures
            self._widths |= dict.fromkeys(modules, magnitude.shape[1])
        ranges, amax, count, clipped = self._figures[modules]
        largest = magnitude.amax(-1).double()
        for of_owner in owners.T:  # no row names an expert twice
            beyond = magnitude > ranges[of_owner][:, None]
            amax.scatter_reduce_(0, of_owner, largest, "amax")
            count.index_add_(0, of_owner, torch.full_like(largest, magnitude.shape[1]))
            clipped.index_add_(0, of_owner, beyond.sum(-1).double())

    @cached_property
    def _seen(self) -> dict[str, tuple[float, float, float, float]]:
        """Calibrated module that was reached -> its range, largest |x|, values seen, values beyond."""
        return {
            module: (limit, amax, count, clipped)
            for modules, figures in self._figures.items()
            for module, (limit, amax, count, clipped) in zip(
                modules, figures.T.tolist(), strict=True
            )
            if count and module in self._ranges
        }

    def _has_enough(self, module: str) -> bool:
        """Return whether an expert was reached by ENOUGH tokens; every token reaches other Linears."""
        if module not in self._seen:
            return False
        values = self._seen[module][2]
        return not EXPERT.fullmatch(module) or values >= ENOUGH * self._widths[module]

    def summary(self) -> dict[str, Any]:
        """Return fidelity.json's entry: how many ranges were checked, and the names of the others."""
        unchecked = sorted(module for module in self._ranges if not self._has_enough(module))
        return {"checked": len(self._ranges) - len(unchecked), "unchecked": unchecked}

    def faults(self) -> list[str]:
        """Return one sentence for each range that clips too much or is far from the largest |x|."""
        layers: dict[str, float] = {}  # an expert may have the range of its layer's largest
        for module, (_, amax, _, _) in self._seen.items():
            layers[_kind(module)] = max(layers.get(_kind(module), 0.0), amax)
        # how many experts of a layer have exactly the same range for a projection
        alike = Counter((_kind(module), limit) for module, limit in self._ranges.items())
        faults: list[str] = []
        for module, (limit, amax, count, clipped) in self._seen.items():
            of_its_own = self._has_enough(module) and alike[_kind(module), limit] == 1
            largest = amax if of_its_own else layers[_kind(module)]
            if clipped / count > MAX_CLIPPED:
                faults.append(
                    f"{module}: its input scale clips {clipped / count:.2%} of held-out activations, "
                    f"above {MAX_CLIPPED:.2%}"
                )
            elif not amax / RANGE_FACTOR <= limit <= largest * RANGE_FACTOR:
                faults.append(
                    f"{module}: its input scale stands for a range of {limit:.4g}, and held-out "
                    f"activations reach {amax:.4g}; calibrate again"
                )
        return faults


def _kind(module: str) -> str:
    """Return a module's name without the expert's index: what one layer's experts share."""
    return EXPERT.sub(r"\1.\3", module)
