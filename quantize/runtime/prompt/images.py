"""Turns picture files into the vision tower's input, and expands their placeholders in prompts.

Gemma 4's own image processor resizes a picture to at most `soft_tokens` tokens (70, 140, 280, 560 or
1120; the model's default is 280), keeps its proportions, and cuts it into patches. The processor's PIL
version is used, which needs no torchvision; it is given resized pictures, of which it makes fewer
copies. The chat template writes one placeholder per picture.
`place` turns this placeholder into a begin token, one placeholder per soft token, and an end token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from struct import error as StructError
from typing import Any

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from quantize.errors import InputError

SOFT_TOKENS = (70, 140, 280, 560, 1120)
MAX_PIXELS = 64_000_000  # a picture larger than this is refused before it is decoded
# What PIL's decoders raise for broken files.
DECODER_ERRORS = (
    OSError, ValueError, SyntaxError, IndexError, KeyError, EOFError, OverflowError, StructError,
    TypeError, Image.DecompressionBombError,
)  # fmt: skip


@dataclass(frozen=True)
class Images:
    """The images of one prompt, as Gemma 4's image processor makes them."""

    pixels: Tensor  # float [images, patches, patch values]
    positions: Tensor  # int64 [images, patches, 2], x and y of each patch, -1 for padding


def open_picture(
    source: Path | BytesIO, *, formats: tuple[str, ...] | None = None, max_pixels: int = MAX_PIXELS
) -> Image.Image:
    """Decode a picture from a file or from bytes; return it in RGB, turned upright.

    `formats` are PIL's names of the accepted formats; None accepts all. Raise InputError if the source
    cannot be read, or is no picture of these formats. Raise it before decoding if width times height
    is above `max_pixels`.
    """
    name = f"{source}: " if isinstance(source, Path) else ""
    try:
        picture = Image.open(source, formats=formats)
        if picture.width * picture.height > max_pixels:
            size = f"{picture.width} x {picture.height}"
            raise InputError(f"{name}{size} pixels are too many: at most {max_pixels}")
        ImageOps.exif_transpose(picture, in_place=True)  # no copy, as large as what is decoded
        return picture if picture.mode == "RGB" else picture.convert("RGB")
    except UnidentifiedImageError as error:
        known = f" ({', '.join(formats)})" if formats else ""
        raise InputError(f"{name}not a picture that can be read{known}") from error
    except DECODER_ERRORS as error:
        raise InputError(f"{name}not a picture that can be read ({error})") from error


def prepare(
    pictures: Sequence[Image.Image], config: Any, soft_tokens: int = 280
) -> tuple[Images, list[int]]:
    """Return the vision tower's input for RGB pictures, and the number of soft tokens per picture.

    That number is at most `soft_tokens`. `config` is transformers' configuration of the model.
    Raise InputError if `soft_tokens` is not in SOFT_TOKENS, or a picture has extreme proportions.
    """
    from quantize.checkpoints.from_transformers import (
        Gemma4ImageProcessorPil,
        get_aspect_ratio_preserving_size,
    )

    if soft_tokens not in SOFT_TOKENS:
        raise InputError(
            f"{soft_tokens} tokens a picture: one of {', '.join(map(str, SOFT_TOKENS))}"
        )
    vision = config.vision_config
    patch, pooling = vision.patch_size, vision.pooling_kernel_size
    processor: Any = Gemma4ImageProcessorPil(
        patch_size=patch, pooling_kernel_size=pooling, max_soft_tokens=soft_tokens
    )

    def resized(picture: Image.Image) -> Image.Image:
        height, width = get_aspect_ratio_preserving_size(
            picture.height, picture.width, patch, soft_tokens * pooling**2, pooling
        )
        return picture.resize((width, height), processor.resample)

    try:
        prepared = processor([*map(resized, pictures)], do_resize=False, return_tensors="pt")
    except ValueError as error:
        raise InputError(f"a picture does not fit {soft_tokens} tokens: {error}") from error
    side = int(prepared["image_position_ids"].max()) + 1
    if side > vision.position_embedding_size:
        raise InputError(
            f"a picture of these proportions is {side} patches long at {soft_tokens} tokens, and this "
            f"model's vision tower knows {vision.position_embedding_size} positions; ask for fewer"
        )
    counts = [int(n) for n in prepared["num_soft_tokens_per_image"]]
    return Images(prepared["pixel_values"], prepared["image_position_ids"].to(torch.int64)), counts


def place(ids: Sequence[int], counts: Sequence[int], config: Any) -> list[int]:
    """Return a prompt's `ids` with image placeholders expanded to `counts` soft tokens per picture.

    The one placeholder of a picture becomes a begin token, one placeholder per soft token, and an end
    token. Raise InputError if the number of placeholders differs from the number of pictures.
    """
    image = config.image_token_id
    if list(ids).count(image) != len(counts):
        raise InputError(
            f"{list(ids).count(image)} image placeholders for {len(counts)} pictures: the text holds "
            f"one of its own, or this checkpoint's chat template takes no pictures"
        )
    remaining = iter(counts)
    placed: list[int] = []
    for token in ids:
        if token == image:
            placed += [config.boi_token_id, *[image] * next(remaining), config.eoi_token_id]
        else:
            placed.append(token)
    return placed
