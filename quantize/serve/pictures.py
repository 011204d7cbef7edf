"""Turns a request's pictures (data URLs) into the vision tower's input; nothing is ever fetched.

Pictures are untrusted. Only three formats are decoded. A picture's size is read from its header and
checked before any pixel is decoded. At most one decoded picture is held at a time.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import torch
from PIL.Image import Image

from quantize.errors import InputError
from quantize.runtime.prompt.images import Images, open_picture, place, prepare
from quantize.serve.failures import RequestError, invalid

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PICTURES = 16
MAX_PIXELS = 16_000_000  # pixels of one picture, 48 MB once decoded
MAX_BYTES = 4 << 20  # bytes of one encoded picture
DATA_URL = re.compile(r"data:image/(?:png|jpeg|webp);base64,", re.IGNORECASE)


def put(
    config: Any, prompt: list[int], urls: Sequence[tuple[str, str]], soft_tokens: int
) -> tuple[list[int], Images | None]:
    """Return the prompt with room for the pictures' tokens, and the prepared pictures or None.

    `prompt` has token ids, one placeholder per picture. `urls` has (parameter, data URL) of each
    picture. `soft_tokens` is the most tokens that one picture takes. RequestError: a picture is
    refused, or there are too many. InputError: placeholders and pictures differ in number.
    """
    if not urls:
        return prompt, None
    if len(urls) > MAX_PICTURES:
        message = f"{len(urls)} pictures; at most {MAX_PICTURES} are taken"
        raise RequestError(400, message, param="messages", code="too_many_images")
    put_in: list[tuple[Images, list[int]]] = []
    for param, url in urls:
        try:
            put_in.append(prepare([read(url)], config, soft_tokens))
        except InputError as error:
            raise invalid(param, error, "invalid_image") from error
    pixels = torch.cat([images.pixels for images, _ in put_in])
    positions = torch.cat([images.positions for images, _ in put_in])
    counts = [count for _, soft_counts in put_in for count in soft_counts]
    return place(prompt, counts, config), Images(pixels, positions)


def read(url: str) -> Image:
    """Return a data URL's picture as RGB; InputError: it is broken, too large or not of FORMATS."""
    if (head := DATA_URL.match(url)) is None:
        raise InputError(
            f"{url[:40]!r} is not read: pictures come as data:image/png;base64,... (or jpeg, webp), "
            f"this server fetches nothing"
        )
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"not valid base64 ({error})") from error
    if len(data) > MAX_BYTES:
        raise InputError(f"the picture has {len(data)} bytes; at most {MAX_BYTES} are taken")
    return open_picture(BytesIO(data), formats=FORMATS, max_pixels=MAX_PIXELS)
