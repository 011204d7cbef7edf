"""Are routers and norms that are fitted again behind rounded layers nearer BF16, at equal bytes?

    PYTHONPATH=evaluation python -m experiments.realign OUT   (the table of docs/rounding-log.md)

BF16's trajectories on calibration problems go through BF16 and through the quantized model, layer by
layer: every layer reads what the realigned layers before it made. Rows are tokens; a quarter of the
sequences only chooses the ridge, which draws towards the old values. Results are rounded to BF16.

    router   projection: BF16's logits, rows by how near the last chosen expert is to the next one;
             scales of experts: BF16's routing weights
    before   norms of what attention, MLP and experts, and the head read; the router's scale
    after    norms of what attention, MLP and experts add to the rows, and both layer scalars
    all      these three

Models are compared by their KL from BF16 on held-out trajectories, each with its own routers, and by
the steps that they take by themselves. Every seed has problems and noise of its own. A realigned model
is a folder like any other, OUT/VARIANT-ARM-SEED/checkpoint. What is measured is not measured again.
"""

import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from quantize.runtime.record.trajectory import Trajectory, record
from quantize.runtime.sampler.sampler import Sampler
from quantize.runtime.weights.packing import BF16, NORMS, LayerWeights
from quantize.schemes.modes import ActivationMode
from quantize.stages.fidelity.replay import Compared, remember, replay
from quantize.stages.prompts import load_prompts

ARMS: dict[str, frozenset[str]] = {
    "router": frozenset({"router"}),
    "before": frozenset({"before"}),
    "after": frozenset({"after"}),
    "all": frozenset({"router", "before", "after"}),
}
SHIPPED = ("w4a4", "a16dense-gptq", "allfp8", "int8")  # `nvfp4_w4a4`, `nvfp4`, FP8 and INT8 recipes
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)  # of the mean square of a channel
HELD = 4  # every so many sequences, one only chooses the ridge
Change = dict[str, Tensor]  # a tensor's name on disk -> its new value


@dataclass
class Seen:
    """What the passes of one layer read and added, bf16 [M, H] each; `out` leaves the layer."""

    h: list[Tensor] = field(default_factory=list)
    o: list[Tensor] = field(default_factory=list)
    middle: list[Tensor] = field(default_factory=list)  # h after attention
    dense: list[Tensor] = field(default_factory=list)
    sparse: list[Tensor] = field(default_factory=list)
    out: list[Tensor] = field(default_factory=list)


@contextmanager
def showing(seen: Seen) -> Generator[None]:
    """Note in `seen` what the layers add to their rows."""
    after_attention, after_experts = fused.after_attention, fused.after_experts

    def attended(h: Tensor, o: Tensor, *more: Any) -> Any:
        seen.h.append(h)
        seen.o.append(o)
        return after_attention(h, o, *more)

    def routed(h: Tensor, dense: Tensor, outputs: Tensor, *more: Any) -> Any:
        seen.middle.append(h)
        seen.dense.append(dense)
        seen.sparse.append(outputs.float().sum(1).to(h.dtype))
        return after_experts(h, dense, outputs, *more)

    with mock.patch.multiple(fused, after_attention=attended, after_experts=routed):
        yield


def recorded_passes(engine: FusedEngine, trajectories: Sequence[Trajectory]) -> list[Pass]:
    """Return BF16's passes over `trajectories`, as they entered the first layer."""
    passes: list[Pass] = []
    engine.model.on_pass = lambda p: passes.append(replace(p, h=p.h.clone(), whole=True))
    sampler = Sampler.from_checkpoint(CHECKPOINT)
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
    seen, cells = Seen(), (model.cache.keys[index], model.cache.values[index])
    for recorded, rows in zip(passes, h, strict=True):
        x = entered(model, index, layer, rows)
        entering = replace(recorded, h=rows, x=x, inputs=model.inputs, routed=None, cells=cells)
        with showing(seen):
            model.compute.one(partial(model.through, index, layer, entering))
        seen.out.append(entering.h)
    return seen


@dataclass(frozen=True)
class Rows:
    """Which rows of all passes count, int64 [m], and of these: who chooses the ridge, who decodes."""

    index: Tensor
    held: Tensor  # bool [m]
    decoded: Tensor  # bool [m]

    @classmethod
    def of(cls, passes: Sequence[Pass], *, last: bool) -> "Rows":
        """Return the rows that are no padding; in the `last` layer nothing reads the encoder's."""
        index: list[Tensor] = []
        held: list[Tensor] = []
        start = 0
        for p in passes:
            real = torch.arange(len(p.h), device=p.h.device) if p.real is None else p.real
            real = real[real < p.decoded] if last else real
            slots = p.rows.slots.repeat_interleave(p.rows.rows_each)[real]
            index.append(start + real)
            held.append(slots % HELD == HELD - 1)
            start += len(p.h)
        decodes = torch.cat([torch.arange(len(p.h), device=p.h.device) < p.decoded for p in passes])
        rows = torch.cat(index)
        return cls(rows, torch.cat(held), decodes[rows])

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return these rows of all passes' tensors, in float32."""
        return torch.cat(list(tensors))[self.index].float()


def fitted_vector(x: Tensor, y: Tensor, old: Tensor, held: Tensor) -> Tensor:
    """Return w, bf16 as `old` [C], with which x * w is nearest y; x and y are [m, C]."""

    def moments(rows: Tensor) -> tuple[Tensor, Tensor]:
        x_rows, y_rows = x[rows], y[rows] - x[rows] * old.float()
        return tuple((x_rows * t).sum(0, dtype=torch.float64) for t in (x_rows, y_rows))

    (square, cross), (square_held, cross_held) = moments(~held), moments(held)

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

    def moments(rows: Tensor) -> tuple[Tensor, Tensor]:
        weighted = x[rows].double() * near[rows, None]
        return weighted.T @ x[rows].double(), weighted.T @ away[rows].double()

    (square, cross), (square_held, cross_held) = moments(~held), moments(held)

    def loss(new: Tensor) -> float:
        step = new.double() - old.double()
        step = step - step.mean(0)
        return float((step @ square_held * step).sum() - 2 * (step.T * cross_held).sum())

    mean_square = square.diagonal().mean() * torch.eye(len(square), device=x.device)
    steps = [torch.linalg.solve(square + ridge * mean_square, cross).T for ridge in RIDGES]
    return min([old, *((old + step).to(old.dtype) for step in steps)], key=loss)


def realigned_layer(
    index: int, models: tuple[FusedModel, FusedModel], passes: Sequence[Pass], seen: Seen,
    h: Sequence[Tensor], parts: frozenset[str],
) -> tuple[LayerWeights, Seen]:  # fmt: skip
    """Fit the `parts` of the quantized layer that rows `h` enter; return it and what it added.

    `models` are BF16 and the quantized model; `seen` is what BF16's layer read and added.
    """
    bf16, model = models
    ours, layer = bf16.weights.layers[index], model.weights.layers[index]
    rows = Rows.of(passes, last=index + 1 == len(model.weights.layers))
    normed = partial(rms_norm, weight=None, eps=model.eps)
    fitted = partial(fitted_vector, held=rows.held)

    def with_norms(layer: LayerWeights, **changed: Tensor) -> LayerWeights:
        return replace(layer, norms=layer.norms | changed)

    if "before" in parts:
        read = normed(rows(seen.h)) * ours.norms["input"].float()
        layer = with_norms(layer, input=fitted(normed(rows(h)), read, layer.norms["input"]))
    theirs = through(model, index, layer, passes, h)
    middle, target = rows(theirs.middle), rows(seen.middle)
    if "after" in parts:
        added, start = normed(rows(theirs.o)), rows(h)
        post = fitted(added, target - start, layer.norms["post_attention"])
        layer = with_norms(layer, post_attention=post)
        middle = start + added * post.float()
    x, read = normed(middle), normed(target)
    if "before" in parts:
        for name in ("dense", "experts"):
            old = layer.norms[name]
            layer = with_norms(layer, **{name: fitted(x, read * old.float(), old)})
        scale = fitted(x, read * layer.router_scale.float(), layer.router_scale)
        layer = replace(layer, router_scale=scale)
    if "router" in parts:
        layer = _with_router(layer, ours, x, read, rows.held, model.topk)
    theirs = through(model, index, layer, passes, h)
    if "after" in parts:
        layer = _with_sums(layer, ours, theirs, seen, rows, normed)
        theirs = through(model, index, layer, passes, h)
    return layer, theirs


def _with_router(
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

    target = weights(read, ours.router) * ours.per_expert_scale.float()
    scale = fitted_vector(weights(x, router), target, layer.per_expert_scale, held)
    return replace(layer, router=router, per_expert_scale=scale)


def _with_sums(
    layer: LayerWeights, ours: LayerWeights, theirs: Seen, seen: Seen, rows: Rows,
    normed: Callable[[Tensor], Tensor],
) -> LayerWeights:  # fmt: skip
    """Fit the norms of what MLP and experts add, the norm of their sum, and the two scalars."""
    norms, sums = dict(layer.norms), torch.zeros(())
    for name, of in (("post_dense", "dense"), ("post_experts", "sparse")):
        x, target = (normed(rows(getattr(side, of))) for side in (theirs, seen))
        norms[name] = fitted_vector(x, target * ours.norms[name].float(), norms[name], rows.held)
        sums = x * norms[name].float() + sums.to(x.device)
    middle, out, x = rows(theirs.middle), rows(seen.out), normed(sums)
    scalar = torch.where(rows.decoded, ours.decoder_scalar, ours.encoder_scalar).float()[:, None]
    norms["post"] = fitted_vector(x, out / scalar - middle, norms["post"], rows.held)
    before = middle + x * norms["post"].float()
    scalars: dict[str, Tensor] = {}
    for name, of in (("decoder_scalar", rows.decoded), ("encoder_scalar", ~rows.decoded)):
        held = rows.held[of].repeat_interleave(out.shape[1])
        pair = (t[of].flatten()[:, None] for t in (before, out))
        scalars[name] = fitted_vector(*pair, getattr(layer, name), held) if of.any() else scalar[0]
    return replace(layer, norms=norms, **scalars)


def changes_of(
    reference: FusedEngine, quantized: FusedEngine, passes: Sequence[Pass]
) -> dict[str, Change]:
    """Return for each arm what it changes: a tensor's name on disk -> its new value."""
    models = reference.model, quantized.model
    changes: dict[str, Change] = {arm: {} for arm in ARMS}
    h, h_of = [p.h for p in passes], {arm: [p.h for p in passes] for arm in ARMS}
    for index, ours in enumerate(reference.model.weights.layers):
        seen = through(reference.model, index, ours, passes, h)
        for arm, parts in ARMS.items():
            layer, theirs = realigned_layer(index, models, passes, seen, h_of[arm], parts)
            changes[arm] |= tensors_of(index, layer, quantized.model.weights.layers[index])
            h_of[arm] = theirs.out
        h = seen.out
    rows = Rows.of(passes, last=True)
    old = quantized.model.weights.norm
    for arm in ("before", "all"):
        x, target = (rms_norm(rows(t), None, models[1].eps) for t in (h_of[arm], h))
        norm = fitted_vector(x, target * old.float(), old, rows.held)
        changes[arm]["model.decoder.norm.weight"] = norm
    return changes


def tensors_of(index: int, layer: LayerWeights, old: LayerWeights) -> Change:
    """Return the tensors in which a layer differs from `old`, by their names on disk."""
    prefix = f"model.decoder.layers.{index}."
    pairs = {f"{prefix}{NORMS[k]}.weight": (layer.norms[k], old.norms[k]) for k in NORMS}
    pairs |= {
        f"{prefix}router.proj.weight": (layer.router, old.router),
        f"{prefix}router.scale": (layer.router_scale, old.router_scale),
        f"{prefix}router.per_expert_scale": (layer.per_expert_scale, old.per_expert_scale),
        f"{prefix}layer_scalar": (layer.decoder_scalar, old.decoder_scalar),
        f"model.encoder.language_model.layers.{index}.layer_scalar": (
            layer.encoder_scalar, old.encoder_scalar,
        ),
    }  # fmt: skip
    return {name: new for name, (new, before) in pairs.items() if not torch.equal(new, before)}


def write_changed(source: Path, out: Path, changes: Change) -> None:
    """Copy the checkpoint `source` to `out`, with other values for some tensors of the same shape."""
    shutil.copytree(source, out)
    tensors = load_file(source / "model.safetensors")
    for name, new in changes.items():
        tensors[name] = new.to("cpu", tensors[name].dtype).reshape(tensors[name].shape)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def opened(folder: Path, mode: ActivationMode, device: str) -> FusedEngine:
    """Open a checkpoint for short texts."""
    return open(folder, device=device, activations=mode, capacity=BATCH, max_context=1024)


def fit(out: Path, name: str, seed: int, count: int, device: str) -> None:
    """Write OUT/NAME-ARM-SEED/checkpoint for every arm that is not there, fitted on `count` prompts."""
    folders = {arm: out / f"{name}-{arm}-{seed}" / "checkpoint" for arm in ARMS}
    if all(folder.exists() for folder in folders.values()):
        return
    reference = opened(CHECKPOINT, "none", device)
    quantized = opened(out / name / "checkpoint", "per_layer", device)
    given = {"datasets": ["bundled"], "prompts": count, "canvases": CANVASES, "thinking": 0.5}
    settings = Calibration.model_validate(given | {"seed": seed, "batch_size": BATCH})
    prompts, sampler = load_prompts(CHECKPOINT, settings, count), Sampler.from_checkpoint(CHECKPOINT)
    made: list[Trajectory] = []
    for at in range(0, count, BATCH):
        some = prompts[at : at + BATCH]
        seeds = [(seed + 1 << 40) + at + row for row in range(len(some))]
        made += record(reference, some, seeds, sampler=sampler, canvases=CANVASES, held_out=False)
    with torch.no_grad():
        changes = changes_of(reference, quantized, recorded_passes(reference, made))
    for arm, folder in folders.items():
        shutil.rmtree(folder, ignore_errors=True)
        write_changed(out / name / "checkpoint", folder, changes[arm])


def measure(out: Path, name: str, seed: int, count: int, device: str) -> None:
    """Write OUT/realigned/NAME-ARM-SEED.json for the unmended checkpoint (arm `none`) and the arms."""
    models = {"none": out / name} | {arm: out / f"{name}-{arm}-{seed}" for arm in ARMS}
    paths = {arm: out / "realigned" / f"{name}-{arm}-{seed}.json" for arm in models}
    if all(path.exists() for path in paths.values()):
        return
    paths["none"].parent.mkdir(exist_ok=True)
    reference = opened(CHECKPOINT, "none", device)
    engines = [opened(folder / "checkpoint", "per_layer", device) for folder in models.values()]
    sampler, trajectories = Sampler.from_checkpoint(CHECKPOINT), recorded(reference, count, seed)
    compared = [Compared(engine) for engine in engines]
    measured = replay(reference, compared, trajectories, sampler, batch_size=BATCH)
    own = [trajectories, *(recorded(engine, count, seed) for engine in engines)]
    steps = [[mean(map(len, made.steps)) for made in of_model] for of_model in own]
    for arm, distances, taken in zip(models, measured, steps[1:], strict=True):
        overlap = torch.stack([d.routing.overlap for d in distances]).mean(0).tolist()
        flips = 1 - mean(d.agrees.float().mean().item() for d in distances)
        kl = kl_by_trajectory(distances)
        facts = {"kl": kl, "flips": flips, "overlap": overlap, "steps": taken, "bf16": steps[0]}
        write_json(paths[arm], facts)


def realigned_table(out: Path, names: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Return Markdown with a row for each checkpoint and arm, over all trajectories of all seeds."""
    lines = [
        "| checkpoint | realigned | KL x 1000 | of w4a4 | minus none | flips, % | overlap by layer | steps |",
        "|---|---|---:|---|---|---:|---|---:|",
    ]

    def read(name: str, arm: str) -> dict[str, Any]:
        facts = [read_json(out / "realigned" / f"{name}-{arm}-{seed}.json") for seed in seeds]
        joined = {key: [v for f in facts for v in f[key]] for key in ("kl", "steps", "bf16")}
        layers = zip(*(f["overlap"] for f in facts), strict=True)
        return joined | {
            "flips": mean(f["flips"] for f in facts),
            "overlap": list(map(mean, layers)),
        }

    plain = read("w4a4", "none")["kl"]
    for name in names:
        base = read(name, "none")["kl"]
        for arm in ("none", *ARMS):
            facts = read(name, arm)
            overlap = ", ".join(f"{share:.4f}" for share in facts["overlap"])
            steps = mean(facts["steps"]) / mean(facts["bf16"]) - 1
            lines.append(
                f"| {name} | {arm} | {1000 * mean(facts['kl']):.2f} | {mean(facts['kl']) / mean(plain):.3f} | "
                f"{differing(facts['kl'], base, 1000)} | {100 * facts['flips']:.2f} | {overlap} | {steps:+.1%} |"
            )
    return lines


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--only", "names", multiple=True, type=click.Choice(SHIPPED), default=SHIPPED)
@click.option("--seed", "seeds", multiple=True, type=int, default=(0, 1, 2), show_default=True)
@click.option("--prompts", default=256, show_default=True, help="Of the recipes' calibration.")
@click.option("--fit", "fitted_on", default=256, show_default=True, help="Trajectories a seed.")
@click.option("--trajectories", default=320, show_default=True, help="Held out, a seed.")
@click.option("--answers", multiple=True, help="BF16, or a folder of OUT, that answers 2,000 x 4.")
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
    if answers:
        print("\n".join(table(out)))


if __name__ == "__main__":
    main()
