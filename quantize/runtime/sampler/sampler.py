"""Settings of the entropy-bound sampler; its steps and a canvas' state are in `fused_dequant.sampler`.

Engines ask a sampler for `begin`, `schedule`, `decide` and `max_denoising_steps`, and for nothing else.

At step s = 1..N of a canvas, with n = N - s + 1 steps remaining (transformers counts down):

    l = logits / T,   T = t_min + (t_max - t_min) * n / N
    y ~ softmax(l),   a = argmax(l),   H = entropy(l) in nats, all per position
    accept the positions of lowest H while the sum of all LOWER entropies is <= entropy_bound
    next canvas = y where accepted, uniformly random tokens elsewhere, whatever the canvas held

A canvas stops after step N, or when mean(H) < confidence_threshold and a equals the a of each of the
`stability_threshold` steps before. It commits a, not y. The next step is conditioned on l = logits / T.
Entropy-bound acceptance: arXiv 2505.24857; the algorithm is that of transformers 5.17
`generation_diffusion_gemma.py`.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import torch
from fused_dequant import CanvasState, Draw, accept
from fused_dequant.sampler.canvas import Rules, accepted
from torch import Tensor

from quantize.checkpoints.reader import read_json_object
from quantize.errors import InputError
from quantize.recipe.controls import CONTROLS, Controls
from quantize.runtime.sampler.known_tokens import holding

# Fields of generation_config.json that cannot change what this runtime returns.
WITHOUT_EFFECT = frozenset(
    {
        "bos_token_id",  # the chat template writes it
        "disable_compile",  # nothing is compiled
        "return_dict_in_generate",  # one result type
        "transformers_version",
        "_commit_hash",
        "_from_model_config",
    }
)
# Fields that are whole numbers; the others are any numbers.
WHOLE = (
    "max_denoising_steps",
    "stability_threshold",
    "max_new_tokens",
    "max_length",
    "pad_token_id",
)
NUMBER = (int, float)
# Kinds of bounds of settings: name -> (test, words for the error).
BOUNDS = {
    "gt": (operator.gt, "above"), "ge": (operator.ge, "at least"), "le": (operator.le, "at most"),
}  # fmt: skip

# Settings of a sampler that are stored with every score.
ALWAYS_NOTED = frozenset({
    "max_new_tokens", "max_length", "max_denoising_steps", "entropy_bound", "t_min", "t_max",
    "stability_threshold", "confidence_threshold", "eos_token_ids", "pad_token_id",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sampler(Controls):
    """Settings of block-diffusion generation: the `Controls` of denoising, and what ends a sample."""

    max_new_tokens: int = 256  # default budget; whole canvases are generated until it is reached
    max_length: int | None = None  # limit on prompt plus new tokens; None for no limit
    eos_token_ids: tuple[int, ...] = ()  # any of these ends the sample
    pad_token_id: int | None = None  # fills a canvas after an EOS; None keeps the tokens there

    def __post_init__(self) -> None:
        bounds = {name: control.metadata["bounds"] for name, control in CONTROLS.items()}
        bounds |= {name: {"gt": 0} for name in ("max_new_tokens", "max_length")}
        for (name, limits), (bound, (fits, says)) in product(bounds.items(), BOUNDS.items()):
            value, limit = getattr(self, name), limits.get(bound)
            if value is not None and limit is not None and not fits(value, limit):
                raise InputError(f"generation config: {name} must be {says} {limit}, not {value}")
        if not self.t_max > self.t_min:
            raise InputError(
                f"generation config: needs t_max > t_min, has {self.t_max} and {self.t_min}"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Sampler":
        """Return the sampler of generation_config.json's fields; a field that is null has its default.

        Raise InputError, which names the field, if a field is unknown, not supported or out of bounds.
        """
        fields = {key: value for key, value in config.items() if value is not None}
        for key in WITHOUT_EFFECT:
            fields.pop(key, None)
        if fields.pop("cache_implementation", "dynamic") != "dynamic":
            raise InputError(
                f"generation config: cache_implementation {config['cache_implementation']!r} is not "
                f"supported (transformers' static cache is wrong past the sliding window); remove it"
            )
        eos = fields.pop("eos_token_id", ())
        several: Sequence[Any] = eos if type(eos) in (list, tuple) else [eos]
        if odd := [token for token in several if type(token) is not int]:
            raise InputError(f"generation config: eos_token_id {odd[0]!r} is no token id")
        fields["eos_token_ids"] = tuple(several)
        fields |= _entropy_bound(fields.pop("sampler_config", None))
        unknown = fields.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise InputError(f"generation config: {sorted(unknown)[0]!r} is not supported here")
        for name, value in fields.items():
            if name != "eos_token_ids" and type(value) not in ((int,) if name in WHOLE else NUMBER):
                raise InputError(
                    f"generation config: {name} is {value!r}, which is no number for it"
                )
        return cls(**fields)

    @classmethod
    def from_checkpoint(cls, folder: Path) -> "Sampler":
        """Return the sampler of `folder`/generation_config.json; if missing, transformers' defaults.

        Where it names no token that ends a sample, config.json's tokens do.
        """
        path, model = folder / "generation_config.json", folder / "config.json"
        config = read_json_object(path) if path.is_file() else {}
        if config.get("eos_token_id") is None and model.is_file():
            ends = read_json_object(model).get("eos_token_id")
            if isinstance(ends, int) or (isinstance(ends, list) and {*map(type, ends)} == {int}):
                config = config | {"eos_token_id": ends}
        try:
            return cls.from_config(config)
        except InputError as error:
            reason = str(error).removeprefix("generation config: ")
            raise InputError(f"{path}: {reason}") from error

    def noted(self) -> dict[str, Any]:
        """Return the settings that are stored with scores.

        Newer fields are left out if they have their default, so that older scores stay valid.
        """
        defaults = {field.name: field.default for field in fields(self)}
        return {k: v for k, v in asdict(self).items() if k in ALWAYS_NOTED or v != defaults[k]}

    def temperature(self, step: int | Tensor) -> Tensor:
        """Return the temperature of each `step` (from 1), in float32, by transformers' formula."""
        remaining = self.max_denoising_steps - torch.as_tensor(step, dtype=torch.int32) + 1
        return self.t_min + (self.t_max - self.t_min) * (remaining / self.max_denoising_steps)

    def schedule(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the temperatures of all N steps, float32 [N], on `device`."""
        return self.temperature(torch.arange(1, self.max_denoising_steps + 1)).to(device)

    def end_of(self, tokens: Sequence[int]) -> int | None:
        """Return the index of the first EOS in `tokens`; None if there is no EOS."""
        return next((i for i, token in enumerate(tokens) if token in self.eos_token_ids), None)

    def begin(self, canvas: Tensor, seeds: Tensor, index: int = 0) -> CanvasState:
        """Return the state before step 1 of canvas number `index`, whose tokens are int64 [B, L]."""
        return CanvasState.begin(canvas, seeds, self.stability_threshold, index)

    def accepted(self, entropy: Tensor) -> Tensor:
        """Return whether a step accepts each position, bool [B, L], by its `entropy` [B, L] in nats."""
        return accepted(entropy, self.entropy_bound)

    def decide(
        self, draw: Draw, state: CanvasState, schedule: Tensor, pinned: Tensor | None = None
    ) -> None:
        """Update `state` in place by `draw`; `pinned` int64 [B, L] replaces drawn tokens unless FREE.

        The call never waits for the device, so it can be captured in a CUDA graph.
        """
        rules = Rules(*(getattr(self, name) for name in Rules._fields))
        accept(draw if pinned is None else holding(draw, pinned), state, schedule, rules)


def _entropy_bound(config: Any) -> dict[str, Any]:
    """Read `sampler_config`, which transformers stores with the name of its class."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise InputError(f"generation config: sampler_config is {config!r}, not an object")
    known = {"_cls_name", "entropy_bound"}
    name = config.get("_cls_name", "EntropyBoundSamplerConfig")
    if name != "EntropyBoundSamplerConfig" or not config.keys() <= known:
        raise InputError(
            f"generation config: sampler_config {name!r} with {sorted(config.keys() - known)} is not "
            f"supported; only EntropyBoundSamplerConfig with entropy_bound is"
        )
    return {"entropy_bound": config["entropy_bound"]} if "entropy_bound" in config else {}
