"""Are routers and norms that are fitted again behind rounded layers nearer BF16, at equal bytes?

    PYTHONPATH=evaluation python -m experiments.realign OUT   (the table of docs/rounding-log.md)

BF16's trajectories on calibration problems go through BF16 and through the quantized model, layer by
layer: every layer reads what the realigned layers before it made. A quarter of the sequences only
chooses the ridge, which draws towards the old values. Results are rounded to BF16.

    router   projection: BF16's logits, rows by how near the last chosen expert is to the next one;
             scales of experts: BF16's routing weights
    before   norms of what attention, MLP and experts, and the head read; the router's scale
    after    norms of what attention, MLP and experts add to the rows, and both layer scalars
    all      these three

Models are compared by their KL from BF16 on held-out trajectories, and by the steps that they take by
themselves. A realigned model is a folder like any other, OUT/VARIANT-ARM-SEED/checkpoint. What is
measured is not measured again.
"""

import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import click
import fused_dequant as fused
import torch
from fused_dequant import Activation
from fused_dequant.reference import rms_norm
from safetensors.torch import load_file, save_file
from torch import Tensor

from experiments.rounding import VARIANTS, answer, differing, make, table
from experiments.routing import BATCH, CANVASES, kl_by_trajectory, recorded
from quantize.bundled import CHECKPOINT
from quantize.host.files import read_json, write_json
from quantize.recipe.sections import Calibration
from quantize.runtime import open
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.model.passes import Pass
from quantize.runtime.model.text_stack import FusedModel
from quantize.runtime.record.trajectory import Trajectory, record_all
from quantize.runtime.sampler.sampler import Sampler
from quantize.runtime.weights.packing import BF16, NORMS, LayerWeights
from quantize.schemes.modes import ActivationMode
from quantize.stages.fidelity.replay import Compared, remember, replay
from quantize.stages.prompts import load_prompts

ARMS = {name: {name} for name in ("router", "before", "after")}
ARMS["all"] = set(ARMS)
SHIPPED = ("w4a4", "a16dense-gptq", "allfp8", "int8")  # `nvfp4_w4a4`, `nvfp4`, FP8 and INT8 recipes
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)  # of the mean square of a channel
HELD = 4  # every so many sequences, one only chooses the ridge
Seen = dict[str, list[Tensor]]  # h, o, middle, dense, sparse, out -> of each pass bf16 [M, H]


@contextmanager
def showing(seen: Seen) -> Generator[None]:
    """Note in `seen` the rows that layers read (h; after attention `middle`), and what they add."""
    after_attention, after_experts = fused.after_attention, fused.after_experts

    def attended(h: Tensor, o: Tensor, *more: Any) -> Any:
        seen["h"].append(h)
        seen["o"].append(o)
        return after_attention(h, o, *more)

    def routed(h: Tensor, dense: Tensor, outputs: Tensor, *more: Any) -> Any:
        sparse = outputs.float().sum(1).to(h.dtype)
        for name, rows in (("middle", h), ("dense", dense), ("sparse", sparse)):
            seen[name].append(rows)
        return after_experts(h, dense, outputs, *more)

    with mock.patch.multiple(fused, after_attention=attended, after_experts=routed):
        yield


def recorded_passes(
    engine: FusedEngine, trajectories: Sequence[Trajectory], sampler: Sampler
) -> list[Pass]:
    """Return BF16's passes over `trajectories`, as they entered the first layer."""
    passes: list[Pass] = []
    engine.model.on_pass = lambda p: passes.append(replace(p, h=p.h.clone(), whole=True))
    remember(engine, trajectories, sampler, batch_size=engine.capacity)
    engine.model.on_pass = lambda _: None
    return passes


def entered(model: FusedModel, index: int, layer: LayerWeights, h: Tensor) -> Activation:
    """Return rows h bf16 [M, H] as layer `index` reads them."""
    read = BF16 if model.inputs and model.inputs.bf16 else model.weights.entrances[index][1]
    none, one = h.new_zeros(len(h), model.topk, h.shape[1]), h.new_ones(1)
    norms = (*[h.new_ones(h.shape[1])] * 3, layer.norms["input"])
    given = none[:, 0].contiguous(), none, norms, (one, one), len(h)
    return fused.after_experts(h, *given, read[0], model.eps, read[1])[1]


def through(
    model: FusedModel, index: int, layer: LayerWeights, passes: Sequence[Pass], h: Sequence[Tensor]
) -> Seen:
    """Take passes, whose rows are now `h`, through a layer; return what it read and added."""
    seen: Seen = {name: [] for name in ("h", "o", "middle", "dense", "sparse", "out")}
    cells = model.cache.keys[index], model.cache.values[index]
    for of_pass, rows in zip(passes, h, strict=True):
        x = entered(model, index, layer, rows)
        entering = replace(of_pass, h=rows, x=x, inputs=model.inputs, routed=None, cells=cells)
        with showing(seen):
            model.compute.one(partial(model.through, index, layer, entering))
        seen["out"].append(entering.h)
    return seen


@dataclass(frozen=True)
class Rows:
    """Which rows of all passes count, int64 [m]; of these, bool [m]: who chooses the ridge, decodes."""

    index: Tensor
    held: Tensor
    decoded: Tensor

    @classmethod
    def of(cls, passes: Sequence[Pass], *, last: bool) -> "Rows":
        """Return the rows that are no padding; in the `last` layer nothing reads the encoder's."""
        of_pass: list[tuple[Tensor, Tensor, Tensor]] = []
        start = 0
        for p in passes:
            real = torch.arange(len(p.h), device=p.h.device) if p.real is None else p.real
            real = real[real < p.decoded] if last else real
            slots = p.rows.slots.repeat_interleave(p.rows.rows_each)[real]
            of_pass.append((start + real, slots % HELD == HELD - 1, real < p.decoded))
            start += len(p.h)
        return cls(*map(torch.cat, zip(*of_pass, strict=True)))

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return these rows of all passes' tensors, in float32."""
        return torch.cat(list(tensors))[self.index].float()


def fitted_vector(x: Tensor, y: Tensor, old: Tensor, held: Tensor) -> Tensor:
    """Return w, bf16 as `old` [C], with which x * w is nearest y; x and y are [m, C]."""
    away = y - x * old.float()
    (square, cross), (square_held, cross_held) = (
        [(x[rows] * t[rows]).sum(0, dtype=torch.float64) for t in (x, away)]
        for rows in (~held, held)
    )

    def loss(new: Tensor) -> float:
        step = new.double() - old.double()
        return float((square_held * step.square() - 2 * cross_held * step).sum())

    steps = [cross / (square + ridge * square.mean()) for ridge in RIDGES]
    return min([old, *((old + step).to(old.dtype) for step in steps)], key=loss)


def fitted_router(x: Tensor, logits: Tensor, old: Tensor, held: Tensor, topk: int) -> Tensor:
    """Return the projection, bf16 as `old` [E, H], whose logits of x [m, H] are nearest `logits`.

    A logit that all experts of a token have in common counts for nothing: softmax drops it.
    """
    highest = logits.topk(topk + 1, -1).values
    margin = highest[:, -2] - highest[:, -1]
    near = 1 / (1 + (margin / margin.median()).square())
    away = logits - x @ old.float().T
    away = away - away.mean(-1, keepdim=True)
    (square, cross), (square_held, cross_held) = (
        [(x[rows] * near[rows, None]).double().T @ t[rows].double() for t in (x, away)]
        for rows in (~held, held)
    )

    def loss(new: Tensor) -> float:
        step = new.double() - old.double()
        step = step - step.mean(0)
        return float((step @ square_held * step).sum() - 2 * (step.T * cross_held).sum())

    mean_square = square.diagonal().mean() * torch.eye(len(square), device=x.device)
    steps = [torch.linalg.solve(square + ridge * mean_square, cross).T for ridge in RIDGES]
    return min([old, *((old + step).to(old.dtype) for step in steps)], key=loss)


def realigned_layer(
    index: int, models: tuple[FusedModel, FusedModel], passes: Sequence[Pass], seen: Seen,
    h: Sequence[Tensor], parts: set[str],
) -> tuple[LayerWeights, Seen]:  # fmt: skip
    """Fit the `parts` of the quantized layer that rows `h` enter; return it and what it added.

    `models` are BF16 and the quantized model; `seen` is what BF16's layer read and added.
    """
    ours, model = models[0].weights.layers[index], models[1]
    rows = Rows.of(passes, last=index + 1 == len(model.weights.layers))
    layer = model.weights.layers[index]
    norms = dict(layer.norms)
    layer = replace(layer, norms=norms)  # which are changed in place
    normed = partial(rms_norm, weight=None, eps=model.eps)

    def fit_norm(name: str, x: Tensor, target: Tensor) -> Tensor:
        norms[name] = fitted_vector(x, target, norms[name], rows.held)
        return x * norms[name].float()

    if "before" in parts:
        fit_norm("input", normed(rows(h)), normed(rows(seen["h"])) * ours.norms["input"])
    theirs = through(model, index, layer, passes, h)
    middle, target = rows(theirs["middle"]), rows(seen["middle"])
    if "after" in parts:
        added = fit_norm("post_attention", normed(rows(theirs["o"])), target - rows(h))
        middle = rows(h) + added
    x, read = normed(middle), normed(target)
    if "before" in parts:
        for name in ("dense", "experts"):
            fit_norm(name, x, read * ours.norms[name])
        scale = fitted_vector(x, read * ours.router_scale, layer.router_scale, rows.held)
        layer = replace(layer, router_scale=scale)
    if "router" in parts:
        layer = with_router(layer, ours, x, read, rows.held, model.topk)
    theirs = through(model, index, layer, passes, h)
    if "after" not in parts:
        return layer, theirs
    both, out = torch.zeros_like(x), rows(seen["out"])
    for name, of in (("post_dense", "dense"), ("post_experts", "sparse")):
        both += fit_norm(name, normed(rows(theirs[of])), normed(rows(seen[of])) * ours.norms[name])
    scalar = torch.where(rows.decoded, ours.decoder_scalar, ours.encoder_scalar).float()[:, None]
    middle = rows(theirs["middle"])
    before = middle + fit_norm("post", normed(both), out / scalar - middle)
    for name, of in (("decoder_scalar", rows.decoded), ("encoder_scalar", ~rows.decoded)):
        if of.any():
            held = rows.held[of].repeat_interleave(out.shape[1])
            pair = (t[of].flatten()[:, None] for t in (before, out))
            fitted = fitted_vector(*pair, getattr(layer, name), held)
            layer = replace(layer, **{name: fitted})
    return layer, through(model, index, layer, passes, h)


def with_router(
    layer: LayerWeights, ours: LayerWeights, x: Tensor, read: Tensor, held: Tensor, topk: int
) -> LayerWeights:
    """Fit the projection and the scales of experts; x and `read` are the two models' normed rows."""
    x, read = (
        (rows.bfloat16() * of.router_scale * x.shape[1] ** -0.5).float()
        for rows, of in ((x, layer), (read, ours))
    )
    router = fitted_router(x, read @ ours.router.float().T, layer.router, held, topk)

    def weights(rows: Tensor, projection: Tensor) -> Tensor:
        one = torch.ones_like(layer.per_expert_scale)
        ids, chosen = fused.choose_experts(rows.bfloat16(), projection, one, topk)
        return rows.new_zeros(len(rows), len(one)).scatter(1, ids.long(), chosen)

    target = weights(read, ours.router) * ours.per_expert_scale
    scale = fitted_vector(weights(x, router), target, layer.per_expert_scale, held)
    return replace(layer, router=router, per_expert_scale=scale)


def changes_of(
    models: tuple[FusedModel, FusedModel], passes: Sequence[Pass]
) -> dict[str, dict[str, Tensor]]:
    """Return each arm's changes to the second of `models`, name on disk -> new value; BF16 is first."""
    bf16, quantized = models
    changes: dict[str, dict[str, Tensor]] = {arm: {} for arm in ARMS}
    h, h_of = [p.h for p in passes], {arm: [p.h for p in passes] for arm in ARMS}
    for index, ours in enumerate(bf16.weights.layers):
        seen = through(bf16, index, ours, passes, h)
        for arm, parts in ARMS.items():
            layer, theirs = realigned_layer(index, models, passes, seen, h_of[arm], parts)
            changes[arm] |= changed_tensors(index, layer, quantized.weights.layers[index])
            h_of[arm] = theirs["out"]
        h = seen["out"]
    rows, old = Rows.of(passes, last=True), quantized.weights.norm
    for arm in ("before", "all"):
        x, target = (rms_norm(rows(t), None, bf16.eps) for t in (h_of[arm], h))
        norm = fitted_vector(x, target * old, old, rows.held)
        changes[arm] |= {} if torch.equal(norm, old) else {"model.decoder.norm.weight": norm}
    return changes


def changed_tensors(index: int, layer: LayerWeights, old: LayerWeights) -> dict[str, Tensor]:
    """Return the tensors in which a layer differs from `old`, by their names on disk."""
    prefix = f"model.decoder.layers.{index}."
    names = {
        "router": f"{prefix}router.proj.weight", "router_scale": f"{prefix}router.scale",
        "per_expert_scale": f"{prefix}router.per_expert_scale",
        "decoder_scalar": f"{prefix}layer_scalar",
        "encoder_scalar": f"model.encoder.language_model.layers.{index}.layer_scalar",
    }  # fmt: skip
    pairs = {name: (getattr(layer, k), getattr(old, k)) for k, name in names.items()}
    pairs |= {f"{prefix}{NORMS[k]}.weight": (layer.norms[k], old.norms[k]) for k in NORMS}
    return {name: new for name, (new, before) in pairs.items() if not torch.equal(new, before)}


def write_changed(source: Path, out: Path, changes: dict[str, Tensor]) -> None:
    """Copy the checkpoint `source` to `out`, with other values of some tensors."""
    shutil.copytree(source, out)
    tensors = load_file(source / "model.safetensors")
    for name, new in changes.items():
        tensors[name] = new.to("cpu", tensors[name].dtype).reshape(tensors[name].shape)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def opened(folder: Path, mode: ActivationMode, device: str) -> FusedEngine:
    """Open a checkpoint for short texts."""
    return open(folder, device=device, activations=mode, capacity=BATCH, max_context=1024)


def fit(out: Path, name: str, seed: int, count: int, device: str) -> None:
    """Write each arm's OUT/NAME-ARM-SEED/checkpoint, fitted on `count` prompts, unless it is there."""
    folders = {arm: out / f"{name}-{arm}-{seed}" / "checkpoint" for arm in ARMS}
    if all(folder.exists() for folder in folders.values()):
        return
    reference = opened(CHECKPOINT, "none", device)
    models = reference.model, opened(out / name / "checkpoint", "per_layer", device).model
    settings = Calibration(
        datasets=["bundled"], prompts=count, canvases=CANVASES, thinking=0.5, seed=seed,
        batch_size=BATCH,
    )  # fmt: skip
    prompts, sampler = (
        load_prompts(CHECKPOINT, settings, count),
        Sampler.from_checkpoint(CHECKPOINT),
    )
    made = record_all(reference, prompts, settings, sampler, title="recording")
    with torch.no_grad():
        changes = changes_of(models, recorded_passes(reference, made, sampler))
    for arm, folder in folders.items():
        shutil.rmtree(folder, ignore_errors=True)
        write_changed(out / name / "checkpoint", folder, changes[arm])


def measure(out: Path, name: str, seed: int, count: int, device: str) -> None:
    """Write OUT/realigned/NAME-ARM-SEED.json for the arms and `none`, the checkpoint as it was."""
    models = {"none": out / name} | {arm: out / f"{name}-{arm}-{seed}" for arm in ARMS}
    paths = {arm: out / "realigned" / f"{name}-{arm}-{seed}.json" for arm in models}
    if all(path.exists() for path in paths.values()):
        return
    paths["none"].parent.mkdir(exist_ok=True)
    reference = opened(CHECKPOINT, "none", device)
    engines = [opened(folder / "checkpoint", "per_layer", device) for folder in models.values()]
    sampler, ours = Sampler.from_checkpoint(CHECKPOINT), recorded(reference, count, seed)
    measured = replay(reference, list(map(Compared, engines)), ours, sampler, batch_size=BATCH)
    for arm, engine, distances in zip(models, engines, measured, strict=True):
        theirs = recorded(engine, count, seed)
        steps, bf16 = (
            [mean(map(len, made.steps)) for made in of_model] for of_model in (theirs, ours)
        )
        overlap = torch.stack([d.routing.overlap for d in distances]).mean(0).tolist()
        flips = 1 - mean(d.agrees.float().mean().item() for d in distances)
        facts = {"kl": kl_by_trajectory(distances), "flips": flips, "overlap": overlap}
        write_json(paths[arm], facts | {"steps": steps, "bf16": bf16})


def realigned_table(out: Path, names: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Return Markdown with a row for each checkpoint and arm, over all trajectories of all seeds."""
    lines = [
        "| checkpoint | realigned | KL x 1000 | of w4a4 | minus none | flips, % | overlap | steps |",
        "|---|---|---:|---:|---|---:|---|---:|",
    ]

    def read(name: str, arm: str) -> dict[str, list[Any]]:
        facts = [read_json(out / "realigned" / f"{name}-{arm}-{seed}.json") for seed in seeds]
        joined = {key: [v for f in facts for v in f[key]] for key in ("kl", "steps", "bf16")}
        layers = zip(*(f["overlap"] for f in facts), strict=True)
        return joined | {"flips": [f["flips"] for f in facts], "overlap": list(map(mean, layers))}

    plain = mean(read("w4a4", "none")["kl"])
    for name in names:
        base = read(name, "none")["kl"]
        for arm in ("none", *ARMS):
            facts = read(name, arm)
            kl, overlap = facts["kl"], ", ".join(f"{share:.4f}" for share in facts["overlap"])
            steps = mean(facts["steps"]) / mean(facts["bf16"]) - 1
            lines.append(
                f"| {name} | {arm} | {1000 * mean(kl):.2f} | {mean(kl) / plain:.3f} | "
                f"{differing(kl, base, 1000)} | {100 * mean(facts['flips']):.2f} | {overlap} | "
                f"{steps:+.1%} |"
            )
    return lines


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--only", "names", multiple=True, type=click.Choice(SHIPPED), default=SHIPPED)
@click.option("--seed", "seeds", multiple=True, type=int, default=(0, 1, 2), show_default=True)
@click.option("--prompts", default=256, show_default=True, help="Of the recipes' calibration.")
@click.option("--fit", "fitted_on", default=256, show_default=True, help="Trajectories a seed.")
@click.option("--trajectories", default=320, show_default=True, help="Held out, a seed.")
@click.option("--answers", multiple=True, help="bf16, or a folder of OUT, that answers 2,000 x 4.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
def main(
    out: Path, names: tuple[str, ...], seeds: tuple[int, ...], prompts: int, fitted_on: int,
    trajectories: int, answers: tuple[str, ...], device: str,
) -> None:  # fmt: skip
    """Fit and measure; print the tables."""
    out.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(("w4a4", *names)):
        make(out / name, VARIANTS[name], prompts, device)
        for seed in seeds:
            fit(out, name, seed, fitted_on, device)
            measure(out, name, seed, trajectories, device)
    print("\n".join(realigned_table(out, names, seeds)), flush=True)
    for name in answers:
        answer(out, name, "none" if name == "bf16" else "per_layer", 2000, 4, device)
    print("\n".join(table(out)) if answers else "")


if __name__ == "__main__":
    main()
