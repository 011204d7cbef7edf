"""Turns a request's pictures (data URLs) into the vision tower's input; nothing is ever fetched.

Pictures are untrusted. Only three formats are decoded. A picture's size is read from its header and
checked before any pixel is decoded, and so is the number of a JPEG's scans, each of which goes over all
pixels. At most one decoded picture is held at a time.
"""

import asyncio
import base64
import binascii
import re
from collections.abc import Sequence
from concurrent.futures import Executor
from io import BytesIO
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from quantize.errors import InputError
from quantize.runtime.prompt.images import Images, open_picture, prepare
from quantize.serve.failures import RequestError, invalid

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PICTURES = 16
MAX_PIXELS = 14_000_000  # pixels of one picture: decoders take up to 16 bytes for each
MAX_BYTES = 4 << 20  # bytes of one encoded picture
JPEG_SCAN, MAX_SCANS = b"\xff\xda\x00", 32  # progressive files have about 10
DATA_URL = re.compile(r"data:image/(?:png|jpeg|webp);base64,", re.IGNORECASE)


async def prepared(
    config: Any, urls: Sequence[tuple[str, str]], soft_tokens: int, most: int, thread: Executor
) -> tuple[Images, list[int]]:
    """Return pictures as the vision tower takes them, and how many tokens each has.

    `urls` has (parameter, data URL) of each picture, at least one. `soft_tokens` is the most tokens
    that one takes. They are prepared on `thread` one by one, so that requests take turns; those behind
    the first `most` tokens are left out. RequestError: a picture is refused, or there are too many.
    """
    if len(urls) > MAX_PICTURES:
        message = f"{len(urls)} pictures; at most {MAX_PICTURES} are taken"
        raise RequestError(400, message, param="messages", code="too_many_images")
    loop, counts = asyncio.get_running_loop(), list[int]()
    pixels, positions = list[Tensor](), list[Tensor]()
    for param, url in urls:
        if sum(counts) > most:
            break
        try:
            task = loop.run_in_executor(
                thread, lambda url=url: prepare([read(url)], config, soft_tokens)
            )
            images, count = await task
        except InputError as error:
            raise invalid(param, error, "invalid_image") from error
        pixels.append(images.pixels)
        positions.append(images.positions)
        counts += count
    return Images(torch.cat(pixels), torch.cat(positions)), counts


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
    if (scans := data.count(JPEG_SCAN)) > MAX_SCANS:
        raise InputError(f"the picture has {scans} scans; at most {MAX_SCANS} are taken")
    return open_picture(BytesIO(data), formats=FORMATS, max_pixels=MAX_PIXELS)
