"""Transformers' layers in float64, each fed what the fused path fed its own: the judge of that path.

A stack of layers is chaotic: one rounding sends a token to another expert, and from there on nothing
can be compared. So every pass of the fused path is recorded, and each layer, the embedding before them
and the logits behind them are computed again from the recorded operands, in float64, by transformers'
modules and with transformers' masks. Then an error is one layer's own, some 2^-9 a rounding, whatever
CPU or GPU computed it. Experts are those that the fused path chose; how well it chose is judged apart.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import fused_dequant
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.runtime.model.text_stack import FusedModel
from tests.support.modules_oracle.passes import CACHE
from tests.support.tiny import tiny_config, tiny_model

# What the text stack calls in every layer, and where in its result the wanted tensors are.
SEEN = ("begin", "attend", "choose_experts", "after_experts")


@dataclass
class Pass:
    """One encode or decode of M rows.

    `hidden`: [M, H], the embeddings and then what each layer made of them. By layer: `attended`
    [M, q heads * D], `routed` expert ids and routing weights [M, topk].
    """

    hidden: list[Tensor] = field(default_factory=list[Tensor])
    attended: list[Tensor] = field(default_factory=list[Tensor])
    routed: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])


@contextmanager
def recorded() -> Iterator[list[Pass]]:
    """Record the passes that a `FusedModel` takes meanwhile."""
    passes: list[Pass] = []

    def note(name: str, result: Any) -> None:
        if name == "begin":
            passes.append(Pass())
        if name in ("begin", "after_experts"):
            passes[-1].hidden.append(result[0].clone())
        elif name == "attend":
            codes, scale = result
            values = codes.double() if scale is None else codes.double() * scale.double()[:, None]
            passes[-1].attended.append(values)
        else:
            passes[-1].routed.append(result)

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            note(name, result)
            return result

        return wrapped

    changed = {name: noted(name, getattr(fused_dequant, name)) for name in SEEN}
    with patch.multiple(fused_dequant, **changed):
        yield passes


def joined(passes: list[Pass], lengths: list[int]) -> Pass:
    """Passes over consecutive rows as one; of each the first rows alone, the rest filled it up."""

    def rows(parts: Any) -> list[Tensor]:
        own = [[tensor[:n] for tensor in part] for part, n in zip(parts, lengths, strict=True)]
        return [torch.cat(same) for same in zip(*own, strict=True)]

    ids, weights = (rows([[r[k] for r in p.routed] for p in passes]) for k in (0, 1))
    return Pass(
        rows([p.hidden for p in passes]), rows([p.attended for p in passes]),
        list(zip(ids, weights, strict=True)),
    )  # fmt: skip


@dataclass
class Errors:
    """Relative errors |fused - exact| / |exact| of every layer, and how far its routing is off.

    `missed`: the largest share of probability that better experts than the chosen ones had.
    """

    hidden: list[float] = field(default_factory=list[float])
    attended: list[float] = field(default_factory=list[float])
    keys: list[float] = field(default_factory=list[float])
    values: list[float] = field(default_factory=list[float])
    routing: list[float] = field(default_factory=list[float])
    missed: list[float] = field(default_factory=list[float])

    def worst(self) -> dict[str, float]:
        """The largest of each."""
        return {name: max(values) for name, values in vars(self).items() if values}


def relative(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


class Judge:
    """A model of transformers in float64 beside a fused one of the same checkpoint."""

    def __init__(self, exact: DiffusionGemmaForBlockDiffusion, fused: FusedModel) -> None:
        self.exact: Any = exact
        self.fused, self.device = fused, exact.device
        exact.set_experts_implementation("eager")  # the others know no float64
        towers = (exact.model.encoder.language_model, exact.model.decoder)
        for module in (m for tower in towers for layer in tower.layers for m in layer.modules()):
            # 8-bit codes of one number rounded to bf16 and not would differ, a step of 9 % each.
            if isinstance(module, torch.nn.Linear) or hasattr(module, "gate_up_proj"):
                module.register_forward_pre_hook(_to_bf16, prepend=True)
        self.text: Any = exact.config.text_config

    @torch.no_grad()
    def encoder(self, record: Pass, slot: int, pictures: Sequence[tuple[int, int]] = ()) -> Errors:
        """Judge the layers of a whole prompt in a slot, from position 0 on.

        `pictures`: the first position of each and the one behind its last.
        """
        errors, n = Errors(), len(record.hidden[0])
        at = torch.arange(n, device=self.device)
        blocks = torch.zeros(n, n, dtype=torch.bool, device=self.device)
        for first, behind in pictures:
            blocks[first:behind, first:behind] = True
        causal = (at[None] <= at[:, None]) | blocks
        near = (causal & (at[:, None] - at[None] < self.text.sliding_window)) | blocks
        tower = self.exact.model.encoder.language_model
        for index, layer in enumerate(tower.layers):
            mask = near if self._sliding(index) else causal
            made: list[Tensor] = []

            def update(
                k: Tensor, v: Tensor, *_: Any, made: list[Tensor] = made, **__: Any
            ) -> tuple[Tensor, Tensor]:
                made += [k, v]
                return k, v

            self._layer(
                errors, layer, tower, index, record, at, mask, SimpleNamespace(update=update)
            )
            kept = self._kept(index, n)
            for name, exact, own in zip(
                ("keys", "values"), made, self._cells(index, slot, n), strict=True
            ):
                getattr(errors, name).append(relative(own, exact[..., kept:, :]))
        return errors

    @torch.no_grad()
    def decoder(self, record: Pass, slot: int, context: int) -> Errors:
        """Judge the layers of one canvas behind what a slot's cache holds."""
        errors, n = Errors(), len(record.hidden[0])
        at = torch.arange(context, context + n, device=self.device)
        tower = self.exact.model.decoder
        for index, layer in enumerate(tower.layers):
            k, v = self._cells(index, slot, context)
            layers = {index: SimpleNamespace(keys=k, values=v)}
            cache = SimpleNamespace(layers=layers, is_compileable=False)
            self._layer(errors, layer, tower, index, record, at, None, cache)
        return errors

    @torch.no_grad()
    def embedded(self, canvas: Tensor, logits: Tensor | None) -> Tensor:
        """The decoder's embeddings, conditioned on a step's logits, divided by the temperature."""
        decoder = self.exact.model.decoder
        h = decoder.embed_tokens(canvas)
        soft = torch.zeros_like(h)
        if logits is not None:
            soft = logits.double().softmax(-1) @ decoder.embed_tokens.weight
            soft = soft * decoder.embed_tokens.embed_scale.double()
        return decoder.self_conditioning(h, soft)[0]

    @torch.no_grad()
    def logits(self, record: Pass) -> Tensor:
        """Of the last layer's output: final norm, lm_head, softcap."""
        h = self.exact.model.decoder.norm(record.hidden[-1].double())
        cap = self.text.final_logit_softcapping
        return torch.tanh(self.exact.lm_head(h) / cap) * cap

    def _sliding(self, index: int) -> bool:
        return self.text.layer_types[index] == "sliding_attention"

    def _kept(self, index: int, length: int) -> int:
        """The first position of a prefix that later canvases see."""
        return max(0, length - self.text.sliding_window + 1) if self._sliding(index) else 0

    def _cells(self, index: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a prefix, as transformers' cache holds them: float64 [1, heads, n, D]."""
        caches = (self.fused.cache.keys[index], self.fused.cache.values[index])
        at = torch.arange(self._kept(index, length), length) % caches[0].shape[1]
        k, v = (cache[slot, at.to(cache.device)] for cache in caches)
        k, v = (t.to(self.device).double().transpose(0, 1)[None] for t in (k, v))
        return k, v

    def _layer(
        self,
        errors: Errors,
        layer: Any,
        tower: Any,
        index: int,
        record: Pass,
        positions: Tensor,
        mask: Tensor | None,
        cache: Any,
    ) -> None:
        h = record.hidden[index].double()[None]
        angles = tower.rotary_emb(h, positions[None], self.text.layer_types[index])
        attended: list[Tensor] = []
        hooks = [
            layer.self_attn.o_proj.register_forward_pre_hook(
                lambda _, args: attended.append(args[0][0])
            )
        ]
        if index < len(record.routed):
            route = _route(errors, *record.routed[index])
            hooks.append(layer.router.register_forward_hook(route))
        exact = layer(
            h, position_embeddings=angles, attention_mask=None if mask is None else mask[None, None],
            position_ids=positions[None], **{CACHE: cache},
        )[0]  # fmt: skip
        for hook in hooks:
            hook.remove()
        if index < len(record.attended):
            errors.attended.append(relative(record.attended[index], attended[0]))
        if index + 1 < len(record.hidden):
            errors.hidden.append(relative(record.hidden[index + 1], exact))


def _to_bf16(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0].to(torch.bfloat16).double(), *args[1:])


def _route(errors: Errors, ids: Tensor, weights: Tensor) -> Callable[..., Any]:
    """A hook on a router: compare with its choice, then take the fused path's."""

    def hook(router: Any, _: Any, result: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        p, _, best = result
        chosen = p.gather(1, ids.long())
        missed = p.gather(1, best).sum(-1) - chosen.sum(-1)
        errors.missed.append(float(missed.max()))
        scaled = chosen / chosen.sum(-1, keepdim=True) * router.per_expert_scale[ids.long()]
        errors.routing.append(relative(weights, scaled))
        return p, weights.double(), ids.long()

    return hook


def telling_checkpoint(folder: Path) -> Path:
    """Write the tiny model with every operand telling, so that no mix-up of two of them stays hidden.

    Norms, scalars and router scales all differ, encoder's layer scalars from the decoder's too; the
    softcap is near the logits, eps near the mean squares.
    """
    model, generator = tiny_model(seed=3), torch.Generator().manual_seed(4)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("layer_scalar"):
            tensors[name] = 0.5 + torch.rand(1, generator=generator).to(tensor.dtype)
        elif tensor.dim() == 1 and "vision" not in name:
            tensors[name] = (0.5 + torch.rand(tensor.shape, generator=generator)).to(tensor.dtype)
        if name.endswith("q_norm.weight"):
            tensors[name] *= len(tensor) ** -0.5  # scores of size 1: attention that is spread out
    save_file(tensors, file, metadata={"format": "pt"})
    config = tiny_config()
    config.text_config.rms_norm_eps = 0.02
    config.text_config.final_logit_softcapping = 2.0
    config.save_pretrained(folder)
    return folder
