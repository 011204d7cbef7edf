"""DiffusionGemma's text stack on the fused kernels: encoder and decoder over one cache.

Both run the same layers. The encoder is causal, and its keys and values stay in the cache. The decoder
denoises a canvas of L tokens after `context` encoded positions, and writes the canvas' keys and values
into the next cells, where the next pass overwrites them. A row (token) at position p sees positions:

    encoder, full   0 .. p                 encoder, sliding   p - window + 1 .. p
    decoder, full   0 .. context + L - 1   decoder, sliding   context - window + 1 .. context + L - 1

A picture's soft tokens also see the whole picture. Any row sees one range (`fused_dequant.attention`).

One pass may encode and denoise: it encodes canvases that were just committed, and takes a step of the
canvases after them. A layer writes all keys and values before it attends, so the decoder's rows see
the encoder's rows as if an earlier pass had encoded them. The first `decoded` rows are the decoder's.
Only these rows get self-conditioning. In each layer, decoder and encoder have scalars of their own.

The host never waits for a number that is on the device, so a pass of fixed shape can be one CUDA graph.
`part` labels kernels in profiles. Activations are bf16, rounded where transformers' bf16 model rounds.
Logits are bf16 after their softcap; transformers keeps them in float32.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import wraps
from itertools import chain
from typing import Any, Concatenate, ParamSpec, TypeVar

import fused_dequant as fused
import torch
import torch.nn.functional as F
from fused_dequant import Activation, Probabilities, Weight
from fused_dequant.launch.dispatch import launched_as_one_of, sequences_of
from torch import Tensor
from torch.profiler import record_function as part

from quantize.runtime.gpu.cores import compute_of
from quantize.runtime.model.cells import Cache, HostCells
from quantize.runtime.model.choices import Choice, Choices, RoutingLog
from quantize.runtime.model.inputs import ProductInputs
from quantize.runtime.model.passes import Added, Pass, PassRows
from quantize.runtime.prompt.pieces import SoftTokens
from quantize.runtime.weights.load import TextWeights
from quantize.runtime.weights.packing import BF16, Entrance, LayerWeights, Read, Rows, how_read

BESIDE = True  # whether the dense branch has a stream of its own
LOOKING = True  # whether lm_head also stores the sums that sampler and soft embedding need

T = TypeVar("T")
P = ParamSpec("P")
Cells = tuple[Tensor, Tensor]  # keys and values of a lane's slots at a layer


def _alone(
    make: Callable[Concatenate["FusedModel", P], Pass],
) -> Callable[Concatenate["FusedModel", P], Pass]:
    """Let a method compute on one core of a CPU."""

    @wraps(make)
    def made(self: "FusedModel", *given: P.args, **named: P.kwargs) -> Pass:
        return self.compute.one(lambda: make(self, *given, **named))

    return made


class FusedModel:
    """The text stack: encoder and decoder over one cache of keys and values.

    Attributes:
        routed: None, or a list to which every pass appends the choice of each layer's router.
        noted: None, or a log to which every encoder pass appends its choices.
        given: None, or a log from which every pass takes its choices.
        inputs: rounds the rows that enter products, or shows them to observers; None for neither.
        on_pass: called with every pass as it entered the first layer.
        compute: the GPU, or the cores of a CPU, which share the sequences of a pass.
        encodes_alike: on a GPU, whether a sequence's encoding does not depend on others in its pass.
    """

    def __init__(
        self, weights: TextWeights, cache: Cache | HostCells, inputs: ProductInputs | None = None
    ) -> None:
        self.weights, self.cache, self.inputs = weights, cache, inputs
        self.routed: list[Choice] | None = None
        self.noted: RoutingLog | None = None
        self.given: RoutingLog | None = None
        self.on_pass: Callable[[Pass], object] = lambda _: None
        self.compute = compute_of(weights.device)
        self.encodes_alike = False
        on_gpu = weights.device.type == "cuda" and BESIDE
        self._side = torch.cuda.Stream(weights.device) if on_gpu else None
        text = weights.config.text_config
        self.window: int = text.sliding_window
        self.eps: float = text.rms_norm_eps
        self.softcap: float = text.final_logit_softcapping
        self.topk: int = text.top_k_experts
        self.heads: int = text.num_attention_heads
        self.frequencies = _rope_frequencies(text, weights.device)
        # bf16(sqrt(H)), as transformers multiplies embeddings
        self.embed_scale = torch.tensor(text.hidden_size**0.5, dtype=torch.bfloat16).item()

    def encode(self, tokens: Tensor, slots: Tensor, start: Tensor) -> None:
        """Encode tokens [B, n] and append them in `slots` [B], from positions `start` [B] on."""
        self.run([self.encoding(tokens, slots, start)])

    @_alone
    def encoding(
        self, tokens: Tensor, slots: Tensor, start: Tensor, soft: SoftTokens | None = None, *,
        whole: bool = False, real: Tensor | None = None, lane: int = 0, added: Sequence[Added] = (),
    ) -> Pass:  # fmt: skip
        """Return the pass that `encode` runs, before it enters the first layer.

        `soft` has the pictures' soft tokens. The other options become fields of the `Pass`.
        """
        rows = self._encoder_rows(slots, start, tokens.shape[1])
        if soft is None:
            h, x = self._begin(tokens.flatten(), None, 0)
        else:
            h = F.embedding(tokens.flatten(), self.weights.embedding) * self.embed_scale
            h[soft.rows] = soft.embeddings  # as they are: only tokens' embeddings are scaled
            h, x = self.entered(h)
            rows = rows.widened(soft)
        entering = self._pass(h, x, rows, 0, whole=whole, real=real)
        entering.lane, entering.added = lane, added
        return entering

    def entered(self, h: Tensor) -> tuple[Tensor, Activation]:
        """Return embedded rows h bf16 [M, H] unchanged, and the first layer's input made from h."""
        rows = torch.arange(len(h), device=h.device)
        norm, (scheme, shared) = self._entrance(0)
        return fused.begin(rows, h, 1.0, None, norm, 0, scheme, self.eps, shared)

    @_alone
    def decoding(
        self,
        canvas: Tensor,
        rows: PassRows,
        signal: Tensor | None,
        committed: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Pass:
        """Return a pass that decodes canvases [B, L], before it enters the first layer.

        `rows`, made by `behind`, are the canvases' places in the cache. `signal` bf16 [B * L, H] is the
        previous step's soft embedding; at a first step it is zeros or None. `committed`, if given, has
        (tokens [C, L], slots [C], starts [C]) of finished canvases, which the pass also encodes. A
        decoded canvas may follow an encoded canvas in the same slot.
        """
        update = None
        if signal is not None:
            conditioning = self.weights.self_conditioning
            x = fused.scaled_norm(signal, self.embed_scale, conditioning.pre_norm, self.eps)
            with sequences_of(canvas.shape[1]):
                hidden = fused.gelu_mul(fused.linear(x, conditioning.gate_up))
                update = fused.linear(hidden, conditioning.down)
        tokens, decoded = canvas.flatten(), canvas.numel()
        if committed is not None:
            more, slots, start = committed
            tokens = torch.cat([tokens, more.flatten()])
            rows = rows.followed_by(self._encoder_rows(slots, start, more.shape[1]))
        return self._pass(*self._begin(tokens, update, decoded), rows, decoded)

    def _pass(
        self, h: Tensor, x: Activation, rows: PassRows, decoded: int, *, whole: bool = False,
        real: Tensor | None = None,
    ) -> Pass:  # fmt: skip
        routed = self.routed if self.noted is None else []
        made = Pass(h, x, rows, decoded, self.inputs, whole, real, routed)
        if self.given is not None:
            next_choices = self.given.next_of(decoded, len(rows.slots), rows.rows_each)
            made.given = next_choices.to(h.device)
        if not (h.is_cuda and torch.cuda.is_current_stream_capturing()):  # nothing is in it yet
            self.on_pass(made)
        return made

    def run(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Take passes through all layers; return each pass' normed rows after the last layer.

        A pass' rows are bf16 [decoded, H], or [M, H] if the pass is `whole`. Each layer takes one lane
        (a batch with slots of its own) after the other. Within a lane, passes that only encode go
        first, so that canvases see what the same call encodes.
        """
        if not passes:
            return []
        parts = [self._parts(entering) for entering in passes]
        lanes: dict[int, tuple[list[Pass], list[Pass]]] = {}
        for entering in chain(*parts):
            lanes.setdefault(entering.lane, ([], []))[entering.decoded > 0].append(entering)
        added = {lane: [a for p in passes if p.lane == lane for a in p.added] for lane in lanes}
        visits = self.cache.visits(len(self.weights.layers), added)
        for index, layer in enumerate(self.weights.layers):
            for turns, cells in zip(lanes.values(), visits, strict=False):
                for turn in turns:
                    self._take(index, layer, turn, cells)
        next(visits, None)  # the last one's cells go back
        last = [_last_rows(entering, of) for entering, of in zip(passes, parts, strict=True)]
        for entering in passes:
            if self.noted is not None and not entering.decoded:
                noted = Choices.of(entering.routed or [], len(entering.rows.slots))
                self.noted.encoded.append(noted.on_host)
        return last

    def _take(self, index: int, layer: LayerWeights, parts: list[Pass], cells: Cells) -> None:
        """Take passes through a layer side by side, each with a copy of this model."""

        def through(entering: Pass) -> None:
            entering.cells = cells
            alike = self.encodes_alike and not entering.decoded
            with launched_as_one_of(len(entering.rows.slots) if alike else 1):
                copy(self).through(index, layer, entering)

        if any(entering.watched for entering in parts):
            self.compute.one(lambda: [through(entering) for entering in parts])
        else:
            self.compute.each(through, parts)

    def _parts(self, entering: Pass) -> list[Pass]:
        """Share a pass among cores, unless observers watch it: they need whole passes."""
        if self.compute.whole or entering.watched:
            return [entering]
        return [entering.of(some) for some in self.compute.share(len(entering.rows.slots))]

    def through(self, index: int, layer: LayerWeights, entering: Pass) -> None:
        """Take a pass through one layer, which changes the pass' `h` and `x`.

        In the last layer, nothing reads the encoder's rows once their keys and values are written. So
        these rows are dropped there, unless the pass is `whole` or observers watch it.
        """
        self.inputs, self.routed = entering.inputs, entering.routed
        if self.inputs is not None:
            self.inputs.real = entering.real
        assert entering.cells is not None
        q = self._heads(index, layer, entering, entering.cells)
        last = index + 1 == len(self.weights.entrances)
        if last and not (entering.whole or entering.watched):
            if not entering.decoded:
                return
            rows = slice(0, entering.decoded)
            entering.h, q = entering.h[rows], q[rows]
            entering.rows = entering.rows.of(slice(0, rows.stop // entering.rows.rows_each))
        o = self._attended(index, layer, q, entering.rows, entering.cells)
        with sequences_of(entering.rows.rows_each):
            entering.h, entering.x = self._rest(
                index, layer, entering.h, o, entering.decoded, entering.given
            )

    def logits(self, h: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the soft-capped logits bf16 [m, V] of rows bf16 [m, H] that `run` returned."""
        with part("vocabulary"):
            return fused.lm_head(h, self.weights.embedding, self.softcap, out=out)

    def look_runs(self, coldest: float) -> bool:
        """Return whether `fused_dequant.look` can run here if no temperature is below `coldest`."""
        return LOOKING and fused.look_runs(self.weights.device, self.softcap, coldest)

    def soft_embedding(
        self,
        logits: Tensor,
        inverse_temperature: Tensor,
        out: Tensor | None = None,
        probabilities: Probabilities | None = None,
    ) -> Tensor:
        """Return softmax(logits [M, V] / T) @ embedding: bf16 [M, H], in `out` if given.

        Unlike token embeddings, it is not scaled by sqrt(H). `inverse_temperature` [M] is 1 / T.
        `probabilities` are those that `fused_dequant.look` stored with these logits, or None.
        """
        embedding = self.weights.embedding
        with part("vocabulary"):
            if probabilities is not None:
                return fused.soft_embedding_of(probabilities, embedding, out)
            return fused.soft_embedding(logits, embedding, inverse_temperature, out)

    def _begin(
        self, tokens: Tensor, update: Tensor | None, decoded: int
    ) -> tuple[Tensor, Activation]:
        """Embed tokens, add `update`, if any, to decoder rows; return h and layer 0's input."""
        norm, (scheme, shared) = self._entrance(0)
        embedding, factor = self.weights.embedding, self.embed_scale
        return fused.begin(
            tokens, embedding, factor, update, norm, decoded, scheme, self.eps, shared
        )

    def _heads(self, index: int, layer: LayerWeights, entering: Pass, cells: Cells) -> Tensor:
        rows = entering.rows
        with part("dense"), sequences_of(rows.rows_each):
            qkv = self._product(index, "qkv", entering.x, layer.qkv)
        with part("attention"):
            return fused.attention_heads(
                qkv, layer.q_norm, layer.k_norm, *rows.angles[layer.sliding],
                rows.slots, rows.positions, *cells, self.heads, self.eps,
            )  # fmt: skip

    def _attended(
        self, index: int, layer: LayerWeights, q: Tensor, rows: PassRows, cells: Cells
    ) -> Tensor:
        visible = rows.visible[layer.sliding]
        with sequences_of(rows.rows_each):
            with part("attention"):
                o = fused.attend(q, *cells, rows.slots, *visible, *self._read((layer.o,)))
            with part("dense"):
                return self._product(index, "o", o, (layer.o,))

    def _rest(
        self, index: int, layer: LayerWeights, h: Tensor, o: Tensor, decoded: int,
        given: Choices | None,
    ) -> tuple[Tensor, Activation]:  # fmt: skip
        """Run the dense and the routed branch; return h and the next layer's input."""
        n = layer.norms
        before = (n["post_attention"], n["dense"], n["experts"], layer.router_scale)
        scheme, shared = self._read(layer.gate_up)
        own_scheme, own_shared = self._read((layer.experts_gate_up,))
        h, x, x_experts, x_router = fused.after_attention(
            h, o, before, (scheme, own_scheme), self.eps, (shared, own_shared)
        )
        with self._beside(), part("dense"):
            dense = self._down(index, self._product(index, "gate_up", x, layer.gate_up), layer.down)
        if given is not None:
            ids, routing = given.of_layer(index)
        else:
            router = x_router, layer.router, layer.per_expert_scale
            ids, routing = fused.choose_experts(*router, self.topk)
        if self.routed is not None:
            self.routed.append((ids, routing))
        with part("experts"):
            both = layer.experts_gate_up, layer.experts_down
            if self.inputs is None or x_experts[1] is not None:
                routed = fused.routed_experts(*x_experts, ids, routing, *both)
            else:
                routed = self.inputs.experts(index, x_experts[0], ids, routing, *both)
        self._join()
        last = index + 1 == len(self.weights.entrances)
        norm, (scheme, shared) = (self.weights.norm, BF16) if last else self._entrance(index + 1)
        after = (n["post_dense"], n["post_experts"], n["post"], norm)
        scalars = layer.decoder_scalar, layer.encoder_scalar
        return fused.after_experts(
            h, dense, routed, after, scalars, decoded, scheme, self.eps, shared
        )

    def _read(self, rows: Rows) -> Read:
        return BF16 if self.inputs is not None and self.inputs.bf16 else how_read(rows)

    def _product(self, index: int, kind: str, x: Activation, rows: Rows) -> Tensor:
        """Multiply by one matrix, or by several side by side; return bf16 [M, sum of N]."""
        codes, scale = x
        if scale is None and self.inputs is not None:
            codes, rows = self.inputs.dense(index, kind, codes, rows)
        parts = [fused.linear(codes, weight, scale) for weight in rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _down(self, index: int, gate_up: Tensor, down: Weight) -> Tensor:
        read = self._read((down,))
        x = (
            (fused.gelu_mul(gate_up), None)
            if read == BF16
            else fused.quantize_rows(gate_up, *read, gelu_mul=True)
        )
        return self._product(index, "down", x, (down,))

    def _beside(self) -> AbstractContextManager[object]:
        """Run a branch on its own stream until `_join`: small kernels run beside the main stream's.

        Memory is safe: the main stream uses what the branch allocates before the next branch starts,
        and holds what it lends the branch until after `_join`.
        """
        if (side := self._branch) is None:
            return nullcontext()
        side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(side)

    def _join(self) -> None:
        if (side := self._branch) is not None:
            torch.cuda.current_stream().wait_stream(side)

    @property
    def _branch(self) -> torch.cuda.Stream | None:
        """The branch's stream; None while observers watch, which add inputs on one stream."""
        return None if self.inputs is not None and self.inputs.shown else self._side

    def _entrance(self, index: int) -> Entrance:
        """Return the norm of a layer's input and how it is read; no other weights are touched."""
        norm, read = self.weights.entrances[index]
        return norm, BF16 if self.inputs is not None and self.inputs.bf16 else read

    def behind(self, slots: Tensor, context: Tensor, length: int) -> PassRows:
        """Return the placement of canvases of `length` tokens after `context` int32 [B] positions."""
        positions = _run(context, length)
        first = (context - self.window + 1).clamp(min=0).repeat_interleave(length)
        last = (context + (length - 1)).repeat_interleave(length)
        return self._seen_from(slots, positions, first, last)

    def _encoder_rows(self, slots: Tensor, start: Tensor, n: int) -> PassRows:
        positions = _run(start, n)
        first = (positions - self.window + 1).clamp(min=0)
        return self._seen_from(slots, positions, first, positions)

    def _seen_from(self, slots: Tensor, positions: Tensor, first: Tensor, last: Tensor) -> PassRows:
        visible = {True: (first, last), False: (torch.zeros_like(last), last)}
        return self.placed(slots, positions, visible)

    def placed(
        self, slots: Tensor, positions: Tensor, visible: dict[bool, tuple[Tensor, Tensor]]
    ) -> PassRows:
        """Return the `PassRows` of these arguments, with the rotary angles at `positions`."""
        angles = {
            kind: (self._angles(torch.cos, angle), self._angles(torch.sin, angle))
            for kind, f in self.frequencies.items()
            for angle in [(positions[:, None].float() * f).view(len(slots), -1, len(f))]
        }
        return PassRows(slots, positions, visible, angles)

    def _angles(self, function: Callable[[Tensor], Tensor], angles: Tensor) -> Tensor:
        """Return `function` of angles f32 [B, n, D / 2] as bf16 [B * n, D / 2]."""
        return self.compute.by_sequence(function, angles).to(torch.bfloat16)


def _last_rows(entering: Pass, parts: list[Pass]) -> Tensor:
    """Join the results of a pass' parts; return its rows after the last layer, as `run` does."""
    if entering.routed is not None and parts != [entering]:
        routed = [part.routed or [] for part in parts]
        entering.routed += [
            (torch.cat([ids for ids, _ in layer]), torch.cat([weights for _, weights in layer]))
            for layer in zip(*routed, strict=True)
        ]
    last = [part.x[0] if part.whole else part.x[0][: part.decoded] for part in parts]
    return last[0] if len(last) == 1 else torch.cat(last)


def _run(start: Tensor, n: int) -> Tensor:
    """Return positions start[b] .. start[b] + n - 1 of every sequence b: int32 [B * n]."""
    return (start[:, None] + torch.arange(n, dtype=torch.int32, device=start.device)).flatten()


def _rope_frequencies(text: Any, device: torch.device) -> dict[bool, Tensor]:
    """Return transformers' inverse frequencies [D / 2] of sliding (True) and full layers."""
    from quantize.checkpoints.from_transformers import (
        DiffusionGemmaTextRotaryEmbedding,
    )

    rotary: Any = DiffusionGemmaTextRotaryEmbedding(text)
    kinds = {kind: kind == "sliding_attention" for kind in set(text.layer_types)}
    return {
        sliding: getattr(rotary, f"{kind}_inv_freq").float().to(device)
        for kind, sliding in kinds.items()
    }
