"""Pictures for tests, as data URLs."""

import base64
import struct
import zlib
from io import BytesIO
from typing import Any

from PIL import Image


def picture(seed: int = 0, size: tuple[int, int] = (96, 64)) -> Image.Image:
    """A colour gradient, another one for each seed."""
    bands = [Image.linear_gradient("L").rotate(90 * (seed + i)).resize(size) for i in range(3)]
    return Image.merge("RGB", bands)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a picture file."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def part(url: str) -> dict[str, Any]:
    """Part of a message."""
    return {"type": "image_url", "image_url": {"url": url}}


def bomb(width: int, height: int) -> bytes:
    """A small PNG that claims to be large: all its pixels are zeros."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes((width + 1) * min(height, 64)))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )
