"""The model's own vision tower, without its text stack: turns pictures into soft tokens.

The modules are transformers' own. They are BF16 in every checkpoint, since no recipe quantizes them.
They are loaded with the first picture, so text alone costs neither their 1.1 GB nor their loading.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quantize.checkpoints.reader import FIX, Checkpoint
from quantize.errors import InputError, ResourceError
from quantize.runtime.prompt.images import Images
from quantize.schemes.rounding import all_finite

TOWER, PROJECTION = "model.encoder.vision_tower.", "model.encoder.embed_vision."


class Tower:
    """Runs a checkpoint's vision tower; `config` is transformers' configuration of the whole model."""

    def __init__(self, checkpoint: Checkpoint, config: Any, device: torch.device) -> None:
        self._checkpoint, self._config, self._device = checkpoint, config, device

    @torch.no_grad()
    def __call__(self, images: Images) -> Tensor:
        """Return the soft tokens bf16 [tokens, H] of all images, one image after the other.

        Raise InputError if the patches do not have this tower's shape, or if weights are missing or
        not finite. Raise ResourceError if the tower does not fit beside what the device holds.
        """
        _check(images, self._config.vision_config.patch_size)
        try:
            tower, projection = self._modules
            pixels = images.pixels.to(self._device, torch.bfloat16)
            seen = tower(pixel_values=pixels, pixel_position_ids=images.positions.to(self._device))
            return projection(inputs_embeds=seen.last_hidden_state)
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                "no GPU memory for pictures beside weights and cache; lower the context or the batch"
            ) from error

    @cached_property
    def _modules(self) -> tuple[Any, Any]:
        """Build the vision tower and the projection on the device; every weight must be found."""
        from quantize.checkpoints.from_transformers import (
            DiffusionGemmaMultimodalEmbedder,
            Gemma4VisionModel,
        )

        config = self._config
        built: Any = Gemma4VisionModel.from_pretrained(
            None, config=config.vision_config, state_dict=self._weights(TOWER),
            dtype=torch.bfloat16, device_map={"": str(self._device)}, output_loading_info=True,
        )  # fmt: skip
        tower, keys = built
        for what, names in keys.items():
            if names:
                raise InputError(f"{self._checkpoint.folder}: transformers reports {what}: {names}")
        projection: Any = DiffusionGemmaMultimodalEmbedder(config.vision_config, config.text_config)
        projection.load_state_dict(self._weights(PROJECTION))
        return tower.eval(), projection.to(self._device, torch.bfloat16).eval()

    def _weights(self, prefix: str) -> dict[str, Tensor]:
        names = [name for name in self._checkpoint.tensors if name.startswith(prefix)]
        read = {name.removeprefix(prefix): self._checkpoint.read(name) for name in names}
        bad = [name for name, tensor in read.items() if not all_finite(tensor)]
        if bad:
            raise InputError(
                f"{self._checkpoint.folder}: {prefix}{bad[0]} holds NaN or infinity; {FIX}"
            )
        return read


def _check(images: Images, patch: int) -> None:
    count, patches, values = images.pixels.shape
    if values != 3 * patch**2 or images.positions.shape != (count, patches, 2):
        raise InputError(
            f"images of {tuple(images.pixels.shape)} at {tuple(images.positions.shape)}: this tower "
            f"takes patches of {patch} x {patch} x 3 and a position each"
        )
