"""KL of a quantized bundled model from BF16 on recorded trajectories, as a function with a gradient.

Teacher-forced, every denoising step reads the recorded canvas behind committed tokens, conditioned on
BF16's logits of the step before. So steps do not depend on each other, and `Rows` holds all steps of
many trajectories as one batch: a replay is one encoder pass and one decoder pass. The model is
`bundled.forward`'s in float32, whose Linears' inputs pass through `Model.reads`, where they are rounded
as W4A4 serves them (a scale a layer) or watched. Gradients go straight through every rounding.

Tests hold it to `quantize.stages.fidelity.replay`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from fused_dequant.formats import round_groups
from torch import Tensor

from experiments.bundled.forward import (
    KeysValues,
    Rope,
    TrainingForward,
    head,
    rms_norm,
    rotate,
    route,
)
from quantize.checkpoints.load import load, read_input_schemes
from quantize.checkpoints.reader import Checkpoint
from quantize.runtime.record.trajectory import Trajectory
from quantize.runtime.sampler.sampler import Sampler, accepted
from quantize.schemes.records import Scheme

POSITIONS = 512  # the sliding window, which no sequence of the bundled model reaches
CHUNK = 16  # trajectories at once, about 300 steps
WHOLE = ("tokens", "lengths")  # one a trajectory, not one a step
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Chosen:
    """Which of T tokens chose which experts: P pairs, ordered by expert.

    Attributes:
        tokens: [P].
        counts: tokens of each expert.
        gates: [P] routing weights.
        total: T.
    """

    tokens: Tensor
    counts: list[int]
    gates: Tensor
    total: int

    @classmethod
    def by(cls, routing: Tensor) -> "Chosen":
        """Return the pairs (token, expert) whose routing weight, in `routing` [T, E], is not 0."""
        experts, tokens = routing.T.nonzero(as_tuple=True)
        counts = (routing != 0).sum(0).tolist()
        return cls(tokens, counts, routing[tokens, experts], len(routing))

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply pairs [P, K] with their experts' weights [E, out, K]."""
        both = zip(x.split(self.counts), weight.unbind(), strict=True)
        return torch.cat([F.linear(own, each) for own, each in both])

    def down(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the weighted sums [T, H] of the experts' down projections of x [P, I]."""
        y = self.linear(x * self.gates[:, None], weight)
        return y.new_zeros(self.total, y.shape[1]).index_add(0, self.tokens, y)


# (layer, name of the first Linear that reads it, input, who chose experts or None) -> input; the
# experts' down projections read [P, I], everything else [..., K] of all tokens
Reads = Callable[[int, str, Tensor, Chosen | None], Tensor]


def read_rows(
    name: str, x: Tensor, weights: Tensor, chosen: Chosen | None
) -> tuple[Tensor, Tensor, list[int]]:
    """Return the rows [P, K] of x that Linear `name` reads, their weights [P], and rows per expert."""
    if chosen is None:
        return x.flatten(0, -2), weights, [len(weights)]
    own = x if name == "experts.down_proj" else x[chosen.tokens]
    return own, weights[chosen.tokens], chosen.counts


@dataclass
class Rows:
    """N trajectories and their R denoising steps, which are independent; a canvas has C positions.

    Attributes:
        tokens: [N, S] prompt and all committed canvases but the last one, padded on the right.
        lengths: [N] number of tokens without padding.
        of: [R] index of the step's trajectory.
        start: [R] how many of the trajectory's `tokens` the step sees.
        canvas: [R, C] token ids that the decoder reads.
        soft: [R, C, H] soft embedding of BF16's logits at the step before; 0 at a canvas' first step.
        temperature: [R] the sampler's at the step.
        committed: [R, C] BF16's argmax at the last step of the same canvas.
        last: [R] whether the step is the last one of its canvas.
        progress: [R] number of the step divided by the canvas' number of steps, in (0, 1].
        target: [R, C, V] BF16's log-probabilities under the temperature; empty until known.
    """

    tokens: Tensor
    lengths: Tensor
    of: Tensor
    start: Tensor
    canvas: Tensor
    soft: Tensor
    temperature: Tensor
    committed: Tensor
    last: Tensor
    progress: Tensor
    target: Tensor

    def members(self, trajectories: Tensor) -> tuple[Tensor, Tensor]:
        """Return the steps of `trajectories`, and for each step its index into `trajectories`."""
        places = torch.full((len(self.tokens),), -1, device=self.of.device)
        places[trajectories] = torch.arange(len(trajectories), device=self.of.device)
        kept = (places[self.of] >= 0).nonzero().flatten()
        return kept, places[self.of[kept]]

    def select(
        self, trajectories: Tensor, count: int = 0, generator: torch.Generator | None = None
    ) -> "Rows":
        """Return `trajectories` with all steps or, if `count` > 0, up to `count` random steps each."""
        kept, of = self.members(trajectories)
        if count:
            order = (of + torch.rand(len(of), generator=generator).to(of.device)).argsort()
            ranks = torch.arange(len(of), device=of.device) - torch.searchsorted(
                of[order], of[order]
            )
            kept, of = kept[order][ranks < count], of[order][ranks < count]
        own = {f.name: getattr(self, f.name)[kept] for f in fields(self) if f.name not in WHOLE}
        lengths = self.lengths[trajectories]
        tokens = self.tokens[trajectories, : int(lengths.max())]
        return Rows(**own | {"of": of, "tokens": tokens, "lengths": lengths})

    def chunks(self, size: int = CHUNK) -> Iterator["Rows"]:
        """Yield all trajectories in order, `size` at a time."""
        for each in torch.arange(len(self.tokens), device=self.of.device).split(size):
            yield self.select(each)

    def entropy(self) -> Tensor:
        """Return BF16's entropy of each position in nats, [R, C]."""
        return -(self.target.exp() * self.target).sum(-1)


class Model:
    """The bundled model in float32, with a checkpoint's weights, which may be replaced.

    Args:
        folder: a checkpoint, BF16 or quantized.
        device: where it computes.

    Attributes:
        layers: for each layer, name -> weight; a name is, for example, `mlp.gate_proj.weight`.
        roundings: (layer, first Linear that reads an input) -> function that rounds this input.
        scales: input global scales, by the same keys.
    """

    def __init__(self, folder: Path, device: str) -> None:
        model = load(folder, dtype=torch.float32, device=device)
        self._forward = TrainingForward(model, torch.float32, POSITIONS)
        self.outside, layers = self._forward.weights()
        self.outside = {k: v.detach() for k, v in self.outside.items()}
        self.layers: list[Weights] = [{k: v.detach() for k, v in own.items()} for own in layers]
        self.types, self.device = self._forward.types, torch.device(device)
        self.roundings: dict[tuple[int, str], Callable[[Tensor], Tensor]] = {}
        self.scales: dict[tuple[int, str], float] = {}
        for module, (scheme, scale) in read_input_schemes(Checkpoint.open(folder)).items():
            self._round(module, scheme, scale)

    def _round(self, module: str, scheme: Scheme, scale: float | None) -> None:
        """Round a module's input; a layer's experts share the smallest of their scales."""
        layer, name = module.removeprefix("model.decoder.layers.").split(".", 1)
        if name.startswith("experts."):
            name = "experts." + ("down_proj" if name.endswith("down_proj") else "gate_up_proj")
        key = int(layer), name
        if scale is not None:
            scale = self.scales[key] = min(scale, self.scales.get(key, scale))
        self.round(key, scheme, scale)

    def round(self, key: tuple[int, str], scheme: Scheme, scale: float | None) -> None:
        """Make the model round the input `key` as `scheme` does, under input global scale `scale`."""
        if (own := scheme.round_activations) is None:
            return
        self.roundings[key] = (
            (lambda x: own(x, None)) if scale is None else rounding(scale, self.device)
        )

    def reads(self, layer: int, name: str, x: Tensor, _: Chosen | None) -> Tensor:
        """Return the input x rounded as its Linears read it; gradients pass straight through to x."""
        found = self.roundings.get((layer, name))
        return x if found is None else x + (found(x.detach()) - x.detach())

    def encode(self, rows: Rows, reads: Reads | None = None) -> list[KeysValues]:
        """Return every layer's keys and values of all trajectories' tokens."""
        x, cache = self.embed(rows.tokens), list[KeysValues]()
        for index in range(len(self.layers)):
            x, own = self.encode_layer(index, x, reads)
            cache.append(own)
        return cache

    def encode_layer(
        self, index: int, x: Tensor, reads: Reads | None = None
    ) -> tuple[Tensor, KeysValues]:
        """Run tokens [N, S, H] causally through a layer; return its output, keys and values."""
        cos, sin = self._forward.rope[self.types[index]]
        rope = cos[None, : x.shape[1]], sin[None, : x.shape[1]]
        return self._layer(index, x, rope, None, None, reads)

    def decode_layer(
        self, index: int, x: Tensor, rows: Rows, own: KeysValues, reads: Reads | None = None
    ) -> Tensor:
        """Run canvases [R, C, H] through a layer; they also see `own`, keys and values of prefixes."""
        at = rows.start[:, None] + torch.arange(x.shape[1], device=x.device)
        cos, sin = self._forward.rope[self.types[index]]
        rope = cos[at], sin[at]
        seen = torch.arange(own[0].shape[2], device=x.device) < rows.start[:, None]
        mask = torch.cat((seen, torch.ones_like(rows.canvas, dtype=torch.bool)), 1)[:, None, None]
        prefix = own[0][rows.of], own[1][rows.of]
        return self._layer(index, x, rope, prefix, mask, reads)[0]

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the scaled embeddings of tokens."""
        return self._forward.embed(tokens, self.outside)

    def entered(self, rows: Rows) -> Tensor:
        """Return the decoder's first input [R, C, H]: embedded canvases with self-conditioning."""
        return self._forward.condition(self.embed(rows.canvas), rows.soft, self.outside)

    def logits(self, x: Tensor) -> Tensor:
        """Return soft-capped logits of the last layer's output."""
        return head(x, self.outside["norm.weight"], self.outside["embed_tokens.weight"])

    def soft(self, logits: Tensor) -> Tensor:
        """Return the soft embedding of temperature-divided logits."""
        return self._forward.soft_embeddings(logits, self.outside["embed_tokens.weight"])

    def __call__(
        self, rows: Rows, cache: Sequence[KeysValues] | None = None, reads: Reads | None = None
    ) -> Tensor:
        """Return the logits [R, C, V] of all steps, behind `cache` or what encoding makes."""
        cache = self.encode(rows, reads) if cache is None else cache
        x = self.entered(rows)
        for index, own in enumerate(cache):
            x = self.decode_layer(index, x, rows, own, reads)
        return self.logits(x)

    def inner(self, index: int, x: Tensor, chosen: Chosen) -> Tensor:
        """Return the down_proj input [P, I] of a layer's experts, given the experts' input x [T, H]."""
        gate_up = self.layers[index]["experts.gate_up_proj"]
        gate, up = chosen.linear(x[chosen.tokens], gate_up).chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    def _layer(
        self,
        index: int,
        x: Tensor,
        rope: Rope,
        prefix: KeysValues | None,
        mask: Tensor | None,
        watch: Reads | None,
    ) -> tuple[Tensor, KeysValues]:
        """Return a layer's output and its own keys and values; `forward.layer` with inputs read."""
        w, norm = self.layers[index], lambda name, y: rms_norm(y, w[f"{name}_layernorm.weight"])

        def read(name: str, y: Tensor, chosen: Chosen | None = None) -> Tensor:
            return (watch or self.reads)(index, name, y, chosen)

        h = read("self_attn.q_proj", norm("input", x))

        def heads(name: str) -> Tensor:
            projected = F.linear(h, w[f"self_attn.{name}_proj.weight"])
            return projected.unflatten(-1, (-1, w["self_attn.q_norm.weight"].numel()))

        raw = heads("k")
        values = heads("v") if "self_attn.v_proj.weight" in w else raw
        q = rotate(rms_norm(heads("q"), w["self_attn.q_norm.weight"]), rope).transpose(1, 2)
        k = rotate(rms_norm(raw, w["self_attn.k_norm.weight"]), rope).transpose(1, 2)
        own = k, rms_norm(values).transpose(1, 2)
        keys, values = (
            own
            if prefix is None
            else (torch.cat(both, 2) for both in zip(prefix, own, strict=True))
        )
        each = q.shape[1] // keys.shape[1]
        out = F.scaled_dot_product_attention(
            q, keys.repeat_interleave(each, 1), values.repeat_interleave(each, 1),
            attn_mask=mask, is_causal=prefix is None, scale=1.0,
        ).transpose(1, 2).flatten(2)  # fmt: skip
        x = x + norm(
            "post_attention", F.linear(read("self_attn.o_proj", out), w["self_attn.o_proj.weight"])
        )
        h = read("mlp.gate_proj", norm("pre_feedforward", x))
        h = F.gelu(F.linear(h, w["mlp.gate_proj.weight"]), approximate="tanh") * F.linear(
            h, w["mlp.up_proj.weight"]
        )
        dense = F.linear(read("mlp.down_proj", h), w["mlp.down_proj.weight"])
        flat = x.flatten(0, 1)
        chosen = Chosen.by(route(flat, w)[0])
        h = read(
            "experts.gate_up_proj", rms_norm(flat, w["pre_feedforward_layernorm_2.weight"]), chosen
        )
        h = read("experts.down_proj", self.inner(index, h, chosen), chosen)
        routed = chosen.down(h, w["experts.down_proj"])
        both = norm(
            "post_feedforward",
            rms_norm(dense, w["post_feedforward_layernorm_1.weight"])
            + rms_norm(routed.view_as(x), w["post_feedforward_layernorm_2.weight"]),
        )
        return (x + both) * w["layer_scalar"], own


def rounding(scale: float, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that rounds activations to NVFP4 under the input global scale `scale`."""
    shared = torch.tensor([scale], dtype=torch.float32, device=device)

    def rounded(x: Tensor) -> Tensor:
        codes, found = round_groups(x, shared)
        return (codes * (found / shared)[..., None]).flatten(-2)

    return rounded


@torch.no_grad()
def rows_of(bf16: Model, trajectories: Sequence[Trajectory], sampler: Sampler) -> Rows:
    """Return the `Rows` of trajectories; BF16 is run to compute `soft`, `committed` and `target`."""
    prefixes = [[*t.prompt.ids, *t.committed[:-1].flatten().tolist()] for t in trajectories]
    lengths = torch.tensor([len(own) for own in prefixes])
    tokens = torch.zeros(len(prefixes), int(lengths.max()), dtype=torch.long)
    for row, own in zip(tokens, prefixes, strict=True):
        row[: len(own)] = torch.tensor(own)
    found: Mapping[str, list[Tensor]] = {
        name: [] for name in ("of", "start", "canvas", "temperature", "last", "progress")
    }
    first: list[Tensor] = []
    for index, own in enumerate(trajectories):
        for canvas, read in enumerate(own.steps):
            count = len(read)
            step = torch.arange(1, count + 1)
            found["of"].append(torch.full((count,), index))
            found["start"].append(
                torch.full((count,), len(own.prompt.ids) + canvas * read.shape[1])
            )
            found["canvas"].append(read.long())
            found["temperature"].append(sampler.temperature(step))
            found["last"].append(step == count)
            found["progress"].append(step / count)
            first.append(step)
    joined = {k: torch.cat(v).to(bf16.device) for k, v in found.items()}
    hidden = bf16.outside["embed_tokens.weight"].shape[1]
    soft = torch.zeros(*joined["canvas"].shape, hidden, device=bf16.device)
    rows = Rows(
        tokens.to(bf16.device),
        lengths.to(bf16.device),
        soft=soft,
        target=soft[..., :0],
        committed=joined["canvas"],
        **joined,
    )
    steps = torch.cat(first).to(bf16.device)
    rows.target = torch.empty(
        *rows.canvas.shape, len(bf16.outside["embed_tokens.weight"]), device=bf16.device
    )
    caches = [
        (each, bf16.encode(rows.select(each)))
        for each in torch.arange(len(tokens), device=bf16.device).split(64)
    ]
    for number in range(1, int(steps.max()) + 1):
        for each, cache in caches:
            own = ((steps == number) & torch.isin(rows.of, each)).nonzero().flatten()
            if not len(own):
                continue
            part = replace(
                rows,
                **{k: getattr(rows, k)[own] for k in ("start", "canvas", "soft", "temperature")},
                of=rows.of[own] - each[0],
            )
            scaled = bf16(part, cache) / part.temperature[:, None, None]
            rows.target[own] = scaled.log_softmax(-1)
            following = own[~rows.last[own]] + 1
            rows.soft[following] = bf16.soft(scaled[~rows.last[own]])
    ends = rows.last.nonzero().flatten()
    rows.committed = rows.target.argmax(-1)[
        ends[torch.searchsorted(ends, torch.arange(len(rows.of), device=ends.device))]
    ]
    return rows


@dataclass(frozen=True)
class Stream:
    """Trajectories that become `Rows` one chunk at a time, since each denoising step takes 0.33 MB."""

    bf16: Model
    trajectories: Sequence[Trajectory]
    sampler: Sampler

    def chunks(self, size: int = CHUNK) -> Iterator[Rows]:
        """Yield all trajectories in order, `size` at a time."""
        for at in range(0, len(self.trajectories), size):
            yield rows_of(self.bf16, self.trajectories[at : at + size], self.sampler)

    def rows(self) -> Rows:
        """Return all trajectories at once."""
        return rows_of(self.bf16, self.trajectories, self.sampler)


def kl_of(model: Model, rows: Rows) -> Tensor:
    """Return KL(BF16 || model) of every position, [R, C] nats."""
    log_p = (model(rows) / rows.temperature[:, None, None]).log_softmax(-1)
    return (rows.target.exp() * (rows.target - log_p)).sum(-1)


@torch.no_grad()
def distances(model: Model, rows: Rows, sampler: Sampler) -> dict[str, list[float]]:
    """Return kl, flips, jaccard as means over each trajectory's steps, and commits over its canvases.

    flips: share of positions whose argmax differs from BF16's. jaccard: overlap of the accepted
    positions with BF16's. commits: share of positions whose argmax at the last step is BF16's.
    """
    found: dict[str, list[float]] = {name: [] for name in ("kl", "flips", "jaccard", "commits")}
    for part in rows.chunks():
        log_p = (model(part) / part.temperature[:, None, None]).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        ours, theirs = (accepted(h, sampler.entropy_bound) for h in (part.entropy(), entropy))
        argmax = log_p.argmax(-1)
        values = {
            "kl": (part.target.exp() * (part.target - log_p)).sum(-1).mean(-1),
            "flips": (argmax != part.target.argmax(-1)).float().mean(-1),
            "jaccard": (ours & theirs).sum(-1) / (ours | theirs).sum(-1),
            "commits": (argmax == part.committed).float().mean(-1),
        }
        for name, each in values.items():
            weight = part.last.float() if name == "commits" else torch.ones_like(each)
            zero = torch.zeros(len(part.tokens), device=each.device)
            total = zero.index_add(0, part.of, each * weight)
            found[name] += (total / zero.index_add(0, part.of, weight)).tolist()
    return found
