"""A training-only forward of DiffusionGemma in plain torch, and the loss.

transformers' forward builds masks on the host and loops over experts with device syncs, so a step
of it cannot be captured in a CUDA graph. This one shares the model's parameters, has static shapes
and no host logic; tests hold it to transformers' forward within float32 rounding.

What is simplified, and why it is the same function:

* All experts are computed for all tokens and weighted by the router, zero for those not chosen: two
  matrix products instead of 16 gathers (4x the expert FLOPs, which at 64-wide experts cost less
  than the launches they save).
* Sequences are shorter than the sliding window, so sliding layers need no window mask.
* The encoder is causal and padding is on the right, so it needs no padding mask.

Objective (google-deepmind/gemma ``sft_model.py``, huggingface/trl ``sft_diffusion_gemma.py``): each
canvas position is replaced by a uniform random token with probability t ~ U(0.001, 1); the loss is
the mean cross entropy of the clean token over ALL positions, plus next-token cross entropy of the
encoder with weight 1. Half of the rows are conditioned on a first pass's logits. One term is added
to train from scratch: 0.01 x the load-balancing loss of Switch Transformers (1.0 when balanced).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion

from experiments.bundled.architecture import CANVAS, TOP_K

Weights = Mapping[str, Tensor]
Rope = tuple[Tensor, Tensor]
KeysValues = tuple[Tensor, Tensor]
P = ParamSpec("P")
R = TypeVar("R")
SOFTCAP = 30.0
BALANCE_WEIGHT = 0.01


def rms_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """RMSNorm over the last dimension, computed in float32, returned in x's dtype."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h if weight is None else h * weight.float()).to(x.dtype)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding of x [B, S, heads, d] by (cos, sin) [B or 1, S, 1, d]."""
    first, second = x.chunk(2, -1)
    return x * rope[0] + torch.cat((-second, first), -1) * rope[1]


def attention(
    x: Tensor, w: Weights, rope: Rope, prefix: KeysValues | None, mask: Tensor | None
) -> tuple[Tensor, KeysValues]:
    """Return attention's output, and the keys and values of x: causal, or over `prefix` and all of x.

    x [B, S, H]; prefix keys and values [B, kv heads, P, d]; mask bool [B, 1, 1, P + S], True: attend.
    """

    def heads(name: str) -> Tensor:
        projected = F.linear(x, w[f"self_attn.{name}_proj.weight"])
        return projected.unflatten(-1, (-1, w["self_attn.q_norm.weight"].numel()))

    raw_keys = heads("k")
    raw_values = heads("v") if "self_attn.v_proj.weight" in w else raw_keys
    queries = rotate(rms_norm(heads("q"), w["self_attn.q_norm.weight"]), rope).transpose(1, 2)
    keys = rotate(rms_norm(raw_keys, w["self_attn.k_norm.weight"]), rope).transpose(1, 2)
    values = rms_norm(raw_values).transpose(1, 2)
    keys_values = (keys, values)
    if prefix is not None:
        keys, values = torch.cat((prefix[0], keys), 2), torch.cat((prefix[1], values), 2)
    groups = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    out = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=prefix is None, scale=1.0
    )
    return F.linear(out.transpose(1, 2).flatten(2), w["self_attn.o_proj.weight"]), keys_values


def gated(x: Tensor, w: Weights, name: str) -> Tensor:
    """The gated MLP `name` (dense MLP or self-conditioning): down(gelu(gate x) * up x)."""
    gate = F.linear(x, w[f"{name}.gate_proj.weight"])
    up = F.linear(x, w[f"{name}.up_proj.weight"])
    return F.linear(F.gelu(gate, approximate="tanh") * up, w[f"{name}.down_proj.weight"])


def experts(x: Tensor, w: Weights, routing: Tensor) -> Tensor:
    """Sum of all experts' outputs for x [T, H], weighted by `routing` [T, E] (0 if not chosen)."""
    gate_up, down = w["experts.gate_up_proj"], w["experts.down_proj"]  # [E, 2I, H], [E, H, I]
    gate, up = F.linear(x, gate_up.flatten(0, 1)).unflatten(-1, gate_up.shape[:2]).chunk(2, -1)
    h = F.gelu(gate, approximate="tanh") * up * routing[..., None].to(x.dtype)
    return F.linear(h.flatten(1), down.transpose(0, 1).flatten(1))


def route(x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    """Weights [T, E] of the top-k experts for x [T, H], else 0, and the layer's load-balancing loss.

    An expert is chosen if fewer than k others score higher. Without ties these are the experts that
    topk chooses, but elementwise comparisons fuse with the softmax.
    """
    h = rms_norm(x) * w["router.scale"] * x.shape[-1] ** -0.5
    scores = F.linear(h, w["router.proj.weight"]).softmax(-1, dtype=torch.float32)
    chosen = (scores[:, None, :] > scores[:, :, None]).sum(-1) < TOP_K
    kept = scores * chosen
    routing = kept / kept.sum(-1, keepdim=True) * w["router.per_expert_scale"].float()
    load = chosen.float().mean(0) / TOP_K
    return routing, scores.shape[-1] * (load * scores.mean(0)).sum()


def layer(
    x: Tensor, w: Weights, rope: Rope, prefix: KeysValues | None, mask: Tensor | None
) -> tuple[Tensor, KeysValues, Tensor]:
    """One text layer: x [B, S, H] -> (x, its own keys and values, load-balancing loss)."""
    attended, keys_values = attention(
        rms_norm(x, w["input_layernorm.weight"]), w, rope, prefix, mask
    )
    x = x + rms_norm(attended, w["post_attention_layernorm.weight"])
    dense = gated(rms_norm(x, w["pre_feedforward_layernorm.weight"]), w, "mlp")
    flat = x.flatten(0, 1)
    routing, balance = route(flat, w)
    sparse = experts(rms_norm(flat, w["pre_feedforward_layernorm_2.weight"]), w, routing)
    both = rms_norm(dense, w["post_feedforward_layernorm_1.weight"]) + rms_norm(
        sparse.view_as(x), w["post_feedforward_layernorm_2.weight"]
    )
    x = x + rms_norm(both, w["post_feedforward_layernorm.weight"])
    return x * w["layer_scalar"], keys_values, balance


def head(x: Tensor, norm: Tensor, embedding: Tensor) -> Tensor:
    """Soft-capped float32 logits [..., V] of hidden states."""
    return SOFTCAP * torch.tanh(F.linear(rms_norm(x, norm), embedding).float() / SOFTCAP)


def head_loss(x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of targets (-100: ignored) under the logits of x [B, S, H]."""
    return F.cross_entropy(head(x, norm, embedding).flatten(0, 1), targets.flatten())


def condition(embeds: Tensor, signal: Tensor, w: Weights) -> Tensor:
    """Norm of canvas embeddings plus the gated MLP of `signal`, the last pass's soft embeddings."""
    normed = rms_norm(signal, w["self_conditioning.pre_norm.weight"])
    return rms_norm(embeds + gated(normed, w, "self_conditioning"))


@dataclass(frozen=True)
class TrainingBatch:
    """One training batch of B rows; encoder length S, canvas length C."""

    tokens: Tensor  # [B, S] clean prompt and answer, int64
    lengths: Tensor  # [B] tokens that are not padding
    start: Tensor  # [B] where the selected canvas begins: the decoder sees tokens before it
    canvas: Tensor  # [B, C] clean tokens
    noisy: Tensor  # [B, C] corrupted tokens
    conditioned: Tensor  # [B] bool: rows that see the first pass's logits


class Wrapper(Protocol):
    """A wrapper that keeps a function's signature: ``torch.compile`` or `identity`."""

    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]:
        """Wrap a function of tensors."""
        ...


def identity(function: Callable[P, R], /) -> Callable[P, R]:
    """Return `function` unchanged: a CPU run compiles nothing."""
    return function


class TrainingForward:
    """Computes losses from a model's own parameters, which are cast to `dtype` once in each step.

    `wrap` is applied to layer, head, head_loss and condition; a CUDA run passes ``torch.compile``.
    """

    def __init__(
        self, model: DiffusionGemmaForBlockDiffusion, dtype: torch.dtype, positions: int,
        wrap: Wrapper = identity,
    ) -> None:  # fmt: skip
        decoder = model.model.decoder
        self.parameters = dict(decoder.named_parameters())
        self.scalars = [cast(Tensor, block.layer_scalar) for block in decoder.layers]
        text_config: Any = model.config.text_config
        self.types: list[str] = text_config.layer_types
        self.dtype = dtype
        device = next(decoder.parameters()).device
        ids = torch.arange(positions, device=device)[None]
        one = torch.ones(1, device=device, dtype=torch.float32)
        self.rope = {
            kind: tuple(t[0, :, None].to(dtype) for t in decoder.rotary_emb(one, ids, kind))
            for kind in set(self.types)
        }
        self.layer, self.head = wrap(layer), wrap(head)
        self.head_loss, self.condition = wrap(head_loss), wrap(condition)

    def weights(self) -> tuple[Weights, list[Weights]]:
        """Parameters in the compute dtype: those outside the layers, and one mapping a layer."""
        low = {name: p.to(self.dtype) for name, p in self.parameters.items()}
        layers: list[Weights] = []
        for i, scalar in enumerate(self.scalars):
            start = f"layers.{i}."
            of_layer = {n.removeprefix(start): p for n, p in low.items() if n.startswith(start)}
            layers.append(of_layer | {"layer_scalar": scalar.to(self.dtype)})
        return {n: p for n, p in low.items() if not n.startswith("layers.")}, layers

    def embed(self, tokens: Tensor, w: Weights) -> Tensor:
        """Token embeddings scaled by sqrt(hidden)."""
        table = w["embed_tokens.weight"]
        return F.embedding(tokens, table) * table.shape[-1] ** 0.5

    def encode(
        self, tokens: Tensor, w: Weights, layers: Sequence[Weights]
    ) -> tuple[Tensor, list[KeysValues], Tensor]:
        """Causal pass: hidden states before the final norm, keys and values, balance loss."""
        x, balance = self.embed(tokens, w), tokens.new_zeros((), dtype=torch.float32)
        cache: list[KeysValues] = []
        for kind, weights in zip(self.types, layers, strict=True):
            cos, sin = self.rope[kind]
            rope = (cos[None, : tokens.shape[1]], sin[None, : tokens.shape[1]])
            x, keys_values, loss = self.layer(x, weights, rope, None, None)
            cache.append(keys_values)
            balance = balance + loss / len(layers)
        return x, cache, balance

    def decode(
        self, batch: TrainingBatch, soft: Tensor, cache: Sequence[KeysValues], w: Weights,
        layers: Sequence[Weights],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Canvas pass: hidden states [B, C, H] before the final norm, balance loss."""
        x = self.condition(self.embed(batch.noisy, w), soft, w)
        canvas = torch.arange(batch.noisy.shape[1], device=x.device)
        positions = batch.start[:, None] + canvas
        seen = torch.arange(batch.tokens.shape[1], device=x.device) < batch.start[:, None]
        mask = torch.cat((seen, torch.ones_like(batch.noisy, dtype=torch.bool)), 1)[:, None, None]
        balance = x.new_zeros((), dtype=torch.float32)
        for kind, weights, prefix in zip(self.types, layers, cache, strict=True):
            cos, sin = self.rope[kind]
            x, _, loss = self.layer(x, weights, (cos[positions], sin[positions]), prefix, mask)
            balance = balance + loss / len(layers)
        return x, balance

    def losses(self, batch: TrainingBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Denoising loss, next-token loss of the encoder, load-balancing loss: three scalars."""
        w, layers = self.weights()
        embedding, norm = w["embed_tokens.weight"], w["norm.weight"]
        hidden, cache, encoder_balance = self.encode(batch.tokens, w, layers)
        nothing = torch.zeros((*batch.noisy.shape, embedding.shape[1]), device=embedding.device)
        nothing = nothing.to(self.dtype)
        with torch.no_grad():
            first, _ = self.decode(batch, nothing, cache, w, layers)
            logits = self.head(first, norm, embedding)
        soft = self.soft_embeddings(logits, embedding) * batch.conditioned[:, None, None]
        canvas, decoder_balance = self.decode(batch, soft, cache, w, layers)
        denoising = self.head_loss(canvas, norm, embedding, batch.canvas)
        following = torch.arange(1, batch.tokens.shape[1], device=hidden.device)
        targets = torch.where(following < batch.lengths[:, None], batch.tokens[:, 1:], -100)
        causal = self.head_loss(hidden[:, :-1], norm, embedding, targets)
        return denoising, causal, (encoder_balance + decoder_balance) / 2

    @staticmethod
    def soft_embeddings(logits: Tensor, embedding: Tensor) -> Tensor:
        """Expected embedding under logits [B, C, V], scaled like token embeddings."""
        return logits.softmax(-1).to(embedding.dtype) @ embedding * embedding.shape[1] ** 0.5


def corrupt(canvas: Tensor, vocabulary: int) -> Tensor:
    """Replace each token of canvas [B, C] by a uniform one with probability t ~ U(0.001, 1)."""
    rows, length = canvas.shape
    t = torch.rand(rows, 1, device=canvas.device) * 0.999 + 0.001
    random = torch.randint(vocabulary, (rows, length), device=canvas.device)
    return torch.where(torch.rand(rows, length, device=canvas.device) < t, random, canvas)


def draw_batch(
    bank: Tensor, prompts: Tensor, canvases: Tensor, rows: int, encoder: int, vocabulary: int
) -> TrainingBatch:
    """Draw random rows of the bank, and one random canvas of each, on its device without host syncs.

    Args:
        bank: [N, longest prompt + longest answer] int16 tokens, padded on the right.
        prompts: [N] prompt lengths.
        canvases: [N] number of canvases in each answer.
        rows: how many to draw.
        encoder: how many tokens of each row the encoder reads.
        vocabulary: size of the vocabulary that corruption draws from.

    """
    index = torch.randint(len(bank), (rows,), device=bank.device)
    tokens, count = bank[index].long(), canvases[index]
    block = (torch.rand(rows, device=bank.device) * count).long()
    start = prompts[index] + block * CANVAS
    canvas = tokens.gather(1, start[:, None] + torch.arange(CANVAS, device=bank.device))
    return TrainingBatch(
        tokens=tokens[:, :encoder], lengths=prompts[index] + count * CANVAS, start=start,
        canvas=canvas, noisy=corrupt(canvas, vocabulary),
        conditioned=torch.rand(rows, device=bank.device) < 0.5,
    )  # fmt: skip
