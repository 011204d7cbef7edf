"""Searches which parts of a model should have which scheme: `quantize search`.

A group is the attention, the dense MLP or the experts of a layer; servers need one scheme per group.
Each group is quantized alone, under every scheme, in the BF16 model. Its damage is the KL from BF16 on
held-out trajectories, with activations rounded as they would be served. A choice of schemes is ranked
by the sum S of its groups' damage. `knapsack` finds the exact choice for the user's bound: least S with
at most N bytes, or fewest bytes with a predicted KL <= X. A model's KL is below S. The prediction is

    log KL = a + b log S

To fit a and b, ANCHORS models are measured whole: the choices of least S at evenly spaced sizes. The
choice for the user's bound is measured whole too, and written as a recipe. Weights are rounded as the
recipe's `rounding` says. Memory holds one BF16 model, and a copy of each layer with a quantized group.
A killed search continues with the same command. NVFP4 takes as many bytes as NVFP4A16, and also rounds
activations to 4 bits. So neither bound favours NVFP4: to use FP4 units, name the schemes (`--scheme`).
"""

import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.table import Table
from safetensors.torch import load_file
from scipy import stats

from quantize.checkpoints.reader import Checkpoint, read_header
from quantize.checkpoints.shards import plan_shards, write_shards
from quantize.checkpoints.targets import QUANTIZABLE, Target, plan_targets, sum_bytes
from quantize.errors import InputError
from quantize.host.files import read_json, write_json, write_text
from quantize.host.progress import console, say, track
from quantize.host.units import size
from quantize.pipeline.knapsack import Knapsack
from quantize.pipeline.run import bf16_model, working_in
from quantize.recipe.reading import load_recipe, resolved
from quantize.recipe.sections import Quantization, Recipe
from quantize.runs.folder import RunDir
from quantize.runs.manifest import fingerprint
from quantize.runtime import Placement
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.gpu.gpus import Gpu
from quantize.runtime.gpu.placement import budget_of
from quantize.runtime.gpu.trust import trust
from quantize.runtime.model.inputs import inputs_of
from quantize.runtime.record.trajectory import Trajectory, load_trajectories, longest
from quantize.runtime.sampler.sampler import Sampler
from quantize.runtime.weights.load import TextWeights, load_packed, with_layers_of
from quantize.schemes.records import SCHEMES
from quantize.stages.calibrate.calibrate import INPUT_SCALE, SCALES, calibrate
from quantize.stages.convert.convert import MAX_SHARD_BYTES, read_rounded
from quantize.stages.convert.shard_pieces import Quantizer
from quantize.stages.fidelity.fidelity import bootstrap_interval, by_trajectory
from quantize.stages.fidelity.reference_cache import Remembered
from quantize.stages.fidelity.replay import Compared, remember, replay
from quantize.stages.memory_needs import REPLAYED
from quantize.stages.plan.gpu_support import floor, gpu_of
from quantize.stages.round_weights.round_weights import round_weights

BF16 = "BF16"
# class -> the part of its modules' names
PATHS = {"attention": "self_attn", "mlp": "mlp", "experts": "experts"}
POINTS = 40  # of the frontier
ANCHORS = 6  # choices that are measured whole to fit the prediction
TINY = 1e-12  # nats, for the log of no KL at all
Group = tuple[int, str]  # index of the layer, module class


@dataclass(frozen=True)
class Option:
    """One scheme for one group, with its cost in bytes and in KL."""

    scheme: str  # a scheme's name, or BF16
    nbytes: int  # bytes of the group's tensors under this scheme
    kl: float  # mean KL from BF16 in nats of the model with only this group quantized


def search(
    recipe_name: str, model: str | None, out: Path, *, nbytes: float | None = None,
    kl: float | None = None, schemes: Sequence[str] = ("NVFP4", "NVFP4A16", "FP8_DYNAMIC"),
    revision: str | None = None, gpu: str | None = None, gpu_memory: float | None = None,
) -> Path:  # fmt: skip
    """Choose and measure each group's scheme; write frontier and recipe; return the recipe's path.

    `recipe_name` gives everything that is not searched; `out` gets the folder `search-RECIPE-HASH`.
    Give one bound: `nbytes`, the most bytes of the checkpoint, or `kl`, the most predicted KL in nats.
    A group gets one of `schemes`, or stays in BF16. Step times are estimated for `gpu`, by default this
    machine's GPU. `gpu_memory` is in bytes, by default all free memory.

    Raises:
        InputError: neither or both of `nbytes` and `kl` are given; a scheme is unknown; no choice
            meets the bound; or the recipe has no calibration section.
    """
    if (nbytes is None) == (kl is None):
        raise InputError("name one bound: --bytes N, or --kl X")
    if unknown := next((name for name in schemes if name not in SCHEMES), None):
        raise InputError(f"no scheme named {unknown!r}; there are: {', '.join(SCHEMES)}")
    recipe = resolved(recipe_name, bundled=model is None)
    source = bf16_model(model, revision)
    folder = RunDir(out / f"search-{recipe.name}-{recipe.digest(fingerprint(source))}")
    with working_in(folder):
        searched = _Search(source, recipe, folder.path, schemes, Placement.here(gpu_memory))
        sack = Knapsack(
            [[(o.nbytes, o.kl) for o in options] for options in searched.options.values()]
        )
        line = searched.fitted(sack)
        most = int(nbytes or 0) - searched.fixed_bytes
        picked = sack.best(most) if kl is None else sack.cheapest(line.damage(kl))
        chosen = searched.choice(picked)
        return _write(searched, load_recipe(recipe_name), chosen, sack, line, gpu_of(gpu))


class KlLine:
    """A straight line fitted to some models: log of a model's KL over log of its groups' summed KL.

    Args:
        sums: for each model, the sum of its groups' KL, in nats; the sums must not all be equal.
        wholes: for each model, the KL from BF16 that was measured, in nats.
    """

    def __init__(self, sums: Sequence[float], wholes: Sequence[float]) -> None:
        x, y = (np.log(np.maximum(values, TINY)) for values in (sums, wholes))
        self._mean, self._count = x.mean(), len(x)
        self._slope = max(0.1, stats.linregress(x, y).slope)  # more damage is never less KL
        self._at_mean, self._square = y.mean(), ((x - self._mean) ** 2).sum()
        residuals = y - self._at_mean - self._slope * (x - self._mean)
        self._error = np.sqrt((residuals**2).sum() / (len(x) - 2))

    def predict(self, damage: float) -> tuple[float, float, float]:
        """Return (KL, low, high) predicted for the sum `damage`, in nats, with a 95 % interval."""
        if not damage:
            return 0.0, 0.0, 0.0
        away = np.log(damage) - self._mean
        spread = self._error * np.sqrt(1 + 1 / self._count + away**2 / self._square)
        reach = stats.t.ppf(0.975, self._count - 2) * spread
        middle = self._at_mean + self._slope * away
        least, kl, most = np.exp([middle - reach, middle, middle + reach]).tolist()
        return kl, least, most

    def damage(self, kl: float) -> float:
        """Return the sum of the groups' KL for which `predict` gives `kl`."""
        away = (np.log(max(kl, TINY)) - self._at_mean) / self._slope
        return float(np.exp(self._mean + away))


class _Search:
    """The groups of a model, the options of each, and the bytes of everything that has no option."""

    def __init__(
        self,
        source: Checkpoint,
        recipe: Recipe,
        folder: Path,
        schemes: Sequence[str],
        place: Placement,
    ) -> None:
        self.source, self.recipe, self.folder, self._place = source, recipe, folder, place
        self._plans = {name: self._plan(name) for name in schemes}
        self._scales, self._trajectories, self._sampler = self._calibrated()
        self._codes = self._rounded()
        groups = self._plans[schemes[0]]
        kl = {name: self._kl(name) for name in schemes}
        self.options: dict[Group, list[Option]] = {}
        for group, targets in groups.items():
            sizes = {name: sum_bytes(self._plans[name][group])[1] for name in schemes}
            options = [Option(name, nbytes, kl[name][group]) for name, nbytes in sizes.items()]
            self.options[group] = [*options, Option(BF16, sum_bytes(targets)[0], 0.0)]
        everything = plan_targets(source.tensors, _only(recipe, schemes[0]))
        searched = {target.name for targets in groups.values() for target in targets}
        self.bf16_bytes = sum_bytes(everything)[0]
        self.fixed_bytes = sum_bytes([t for t in everything if t.name not in searched])[1]

    def _plan(self, scheme: str) -> dict[Group, list[Target]]:
        """Return the targets of every group under one scheme."""
        groups: dict[Group, list[Target]] = {}
        for target in plan_targets(self.source.tensors, _only(self.recipe, scheme)):
            if target.scheme is not None and target.module_class in QUANTIZABLE:
                groups.setdefault(_group(target), []).append(target)
        return groups

    def _calibrated(self) -> tuple[dict[str, float], list[Trajectory], Sampler]:
        """Calibrate every Linear as NVFP4, once; return input scales and held-out trajectories."""
        folder = self.folder / "calibration"
        if not folder.exists():
            every = self.recipe.model_copy(update={"quantization": _only(self.recipe, "NVFP4")})
            calibrate(self.source.folder, every, folder, self._place)
        scales = {
            name.removesuffix(f".{INPUT_SCALE}"): value.item()
            for name, value in load_file(folder / SCALES).items()
        }
        trajectories, sampler = load_trajectories(folder)
        return scales, [trajectory for trajectory in trajectories if trajectory.held_out], sampler

    def _rounded(self) -> dict[str, Checkpoint]:
        """Round all groups with GPTQ if the recipe does; return `Scheme.kernel` -> codes and scales."""
        checkpoints: dict[str, Checkpoint] = {}
        for name, groups in self._plans.items():
            kernel = SCHEMES[name].kernel  # schemes of one kernel have the same codes
            if self.recipe.quantization.rounding == "gptq" and kernel not in checkpoints:
                if not (folder := self.folder / f"rounding-{kernel}").exists():
                    targets = [target for of_group in groups.values() for target in of_group]
                    round_weights(self.source, targets, self.recipe, folder, self._place)
                checkpoints[kernel] = read_rounded(folder)
        return checkpoints

    def _kl(self, scheme: str) -> dict[Group, float]:
        """Return each group's KL if quantized alone; those of an earlier try come from its file."""
        groups = track(
            self._plans[scheme].items(), f"{scheme} alone", unit="groups",
            name=lambda plan: "layer {} {}".format(*plan[0]),
        )  # fmt: skip
        return {
            group: self._known(f"alone-{scheme}", "{}.{}".format(*group), targets)
            for group, targets in groups
        }

    def _known(self, kind: str, name: str, targets: Sequence[Target]) -> float:
        """Return the KL of a model with these targets; an earlier try may have written it to a file."""
        path = self.folder / f"{kind}-{self.recipe.quantization.rounding}.json"
        known: dict[str, float] = read_json(path) if path.exists() else {}
        if name not in known:
            known[name] = fmean(self.measure(targets))
            write_json(path, known)
        return known[name]

    def choice(self, picked: Sequence[int]) -> dict[Group, Option]:
        """Return the options with these indices, one of each group."""
        chosen = zip(self.options.items(), picked, strict=True)
        return {group: options[at] for (group, options), at in chosen}

    def fitted(self, sack: Knapsack) -> KlLine:
        """Measure choices of least damage at ANCHORS sizes; return the line through them."""
        sums, wholes = list[float](), list[float]()
        for budget in track(sack.budgets(ANCHORS + 1)[:-1], "whole models", unit="models"):
            chosen = self.choice(sack.best(budget))
            quantized = [target for target in self.targets_of(chosen) if target.scheme]
            name = " ".join(option.scheme for option in chosen.values())
            sums.append(sum(option.kl for option in chosen.values()))
            wholes.append(self._known("whole", name, quantized))
        return KlLine(sums, wholes)

    def targets_of(self, chosen: Mapping[Group, Option]) -> list[Target]:
        """Return the targets of a choice; those that stay in BF16 have no scheme."""
        kept = next(iter(self._plans.values()))
        return [
            replace(target, scheme=None) if option.scheme == BF16 else target
            for group, option in chosen.items()
            for target in self._plans.get(option.scheme, kept)[group]
        ]

    def measure(self, targets: Sequence[Target]) -> list[float]:
        """Return the KL from BF16 by trajectory, in nats, of the model with these targets quantized."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            engine = self._quantized(targets, Path(name) / "part")  # a record of it lies beside it
        (distances,) = replay(
            self._reference, [Compared(engine)], self._trajectories, self._sampler,
            batch_size=REPLAYED,
        )  # fmt: skip
        return list(by_trajectory(distances, lambda step: step.kl.mean().item()).values())

    def _quantized(self, targets: Sequence[Target], folder: Path) -> FusedEngine:
        checkpoint = partly_quantized(
            self.source, targets, self._scales, self.recipe, folder, self._codes
        )
        mode = self.recipe.evaluation.activations
        layers = {_group(target)[0] for target in targets}
        weights = with_layers_of(self._weights, checkpoint, layers, in_fp8=mode == "fp8")
        return self._engine(weights, checkpoint)

    @cached_property
    def _weights(self) -> TextWeights:
        budget_of(self._place)
        device, mode = torch.device(self._place.device), self.recipe.evaluation.activations
        trust((SCHEMES[name].kernel for name in self._plans), mode, device)
        return load_packed(self.source.folder, self._place.device)

    @cached_property
    def _reference(self) -> Remembered:
        """What BF16 decodes along the trajectories."""
        engine = self._engine(self._weights, self.source)
        return remember(engine, self._trajectories, self._sampler, batch_size=REPLAYED)

    def _engine(self, weights: TextWeights, checkpoint: Checkpoint) -> FusedEngine:
        inputs = inputs_of(checkpoint, weights, self.recipe.evaluation.activations)
        context = longest(self._trajectories)
        return FusedEngine(weights, capacity=REPLAYED, max_context=context, inputs=inputs)


def _group(target: Target) -> Group:
    return int(re.findall(r"layers\.(\d+)\.", target.name)[0]), target.module_class


def _only(recipe: Recipe, scheme: str) -> Quantization:
    """Return the recipe's quantization with one scheme for all that it does not ignore."""
    changes = {"scheme": scheme, "targets": ["Linear"]}
    return recipe.quantization.model_copy(update=changes)


def partly_quantized(
    source: Checkpoint,
    targets: Sequence[Target],
    scales: Mapping[str, float],
    recipe: Recipe,
    folder: Path,
    rounded: Mapping[str, Checkpoint],
) -> Checkpoint:
    """Return `source` with only the weights `targets` quantized; `targets` must be whole groups.

    Quantized tensors are written to `folder`. `scales` maps a module to its input global scale.
    `rounded` maps a `Scheme.kernel`, such as "nvfp4", to GPTQ's codes and scales. Weights of other
    kernels are rounded to nearest.
    """
    observer = recipe.quantization.observer
    kernels = {target: target.scheme.kernel for target in targets if target.scheme}
    pieces = [
        piece
        for kernel in dict.fromkeys(kernels.values())
        for piece in Quantizer(source, observer, scales, rounded.get(kernel)).plan(
            [target for target, kind in kernels.items() if kind == kernel]
        )
    ]
    folder.mkdir(exist_ok=True)
    write_shards(plan_shards(pieces, MAX_SHARD_BYTES), folder, "", what="rounding")
    replaced = {target.name for target in targets}
    tensors = {name: info for name, info in source.tensors.items() if name not in replaced}
    for shard in folder.glob("*.safetensors"):
        tensors |= read_header(shard)
    patterns: dict[str, dict[str, None]] = {}
    for target in targets:
        assert target.scheme is not None
        layer, kind = _group(target)
        pattern = rf"re:model\.decoder\.layers\.{layer}\.{PATHS[kind]}\..*"
        patterns.setdefault(target.scheme.name, {})[pattern] = None
    groups = {
        name: SCHEMES[name].config_group([*names], observer) for name, names in patterns.items()
    }
    stated = {
        "quant_method": "compressed-tensors",
        "config_groups": groups,
        "ignore": list(recipe.quantization.ignore),
    }
    return Checkpoint(source.folder, source.config | {"quantization_config": stated}, tensors)


def _write(
    searched: _Search,
    written: Recipe,
    chosen: Mapping[Group, Option],
    sack: Knapsack,
    line: KlLine,
    gpu: Gpu | None,
) -> Path:
    """Measure the choice; write its recipe, and a JSON file with the frontier; show the table."""
    total = searched.fixed_bytes + sum(option.nbytes for option in chosen.values())
    share = total / searched.bf16_bytes
    name = f"{written.name}_{share * 1000:.0f}"
    recipe = recipe_of(written, chosen, name)
    targets = searched.targets_of(chosen)
    measured = searched.measure([target for target in targets if target.scheme])
    low, high = bootstrap_interval(measured)
    damage = sum(option.kl for option in chosen.values())
    predicted, least, most = line.predict(damage)
    kl = {"sum": damage, "predicted": predicted, "predicted_interval": [least, most]}
    facts = {
        "bytes": total,
        "of_bf16": share,
        "kl_nats": kl | {"measured": fmean(measured), "interval": [low, high]},
        "trajectories": len(measured),
        "schemes": {f"{layer}.{kind}": o.scheme for (layer, kind), o in chosen.items()},
        "estimated_ms": _milliseconds(searched.source.config, targets, gpu),
    }
    points = [
        (100 * (searched.fixed_bytes + nbytes) / searched.bf16_bytes, line.predict(picked)[0])
        for nbytes, picked in sack.frontier(POINTS)
    ]
    write_json(searched.folder / f"{name}.json", facts | {"frontier": points})
    path = searched.folder / f"{name}.yaml"
    write_text(path, recipe.to_yaml())
    console.print(_table(chosen, f"{name}: {size(total)}, {share:.1%} of BF16"))
    say(
        f"KL from BF16: {predicted:.4g} nats [{least:.4g}, {most:.4g}] predicted, "
        f"{fmean(measured):.4g} [{low:.4g}, {high:.4g}] measured on {len(measured)} trajectories"
    )
    if facts["estimated_ms"] is not None and gpu is not None:
        say(
            f"estimate by arithmetic, not measured: the quantized Linears take at least "
            f"{facts['estimated_ms']:.2f} ms a forward of one canvas on {gpu.name}"
        )
    say(f"{path}: the recipe; {name}.json beside it: what other sizes would cost")
    return path


def recipe_of(base: Recipe, chosen: Mapping[Group, Option], name: str) -> Recipe:
    """Return `base` under another name, with the chosen schemes and their limits of verification.

    Raises:
        InputError: every group stays in BF16.
    """
    layers: dict[tuple[str, str], list[int]] = {}
    for (layer, kind), option in chosen.items():
        layers.setdefault((option.scheme, kind), []).append(layer)
    count = Counter(kind for _, kind in chosen)
    scheme: dict[str, list[str]] = {}
    ignore = list(base.quantization.ignore)
    for (scheme_name, kind), indices in layers.items():
        some = "" if len(indices) == count[kind] else rf"\.layers\.({'|'.join(map(str, indices))})"
        pattern = rf"re:.*{some}\.{PATHS[kind]}\..*"
        (ignore if scheme_name == BF16 else scheme.setdefault(scheme_name, [])).append(pattern)
    if not scheme:
        raise InputError("every group stays in BF16 under that bound: there is nothing to quantize")
    stated = base.verification.max_relative_error
    rounding = base.quantization.rounding
    limits = {name: stated.get(name, SCHEMES[name].largest_error(rounding)) for name in scheme}
    fields = base.model_dump(mode="json")
    fields["quantization"] |= {"scheme": scheme, "ignore": ignore}
    changes = {"name": name, "verification": {"max_relative_error": limits}}
    return Recipe.model_validate(fields | changes)


def _milliseconds(
    config: Mapping[str, Any], targets: Sequence[Target], gpu: Gpu | None
) -> float | None:
    """Return the least ms that one canvas takes in the chosen Linears, None without known rates."""
    if gpu is None or gpu.rates is None:
        return None
    least = floor(config, targets, gpu.rates, 1, 0)
    return 1e3 * (least["experts"] + least["dense"])


def _table(chosen: Mapping[Group, Option], title: str) -> Table:
    table = Table("layer", *PATHS, "KL alone x 1000", title=title, title_justify="left")
    for layer in sorted({layer for layer, _ in chosen}):
        schemes = {kind: chosen[layer, kind] for kind in PATHS if (layer, kind) in chosen}
        cells = [schemes[kind].scheme if kind in schemes else BF16 for kind in PATHS]
        alone = ", ".join(f"{1000 * option.kl:.2f}" for option in schemes.values())
        table.add_row(str(layer), *cells, alone)
    return table
