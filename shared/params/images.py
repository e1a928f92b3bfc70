"""Images of prompts: how they are sent and identified, and the checks before one is decoded.

A request has the SHA-256 of an image's bytes. Redis stores the bytes next to the queue for as long as a request needs
them, so a resumed request has the same image. Nothing here decodes: the engine does, with its own limits.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from ..errors import ValidationError
from ..values.shown import shown

# Limit of one image as it is sent, before it is decoded.
MAX_IMAGE_BYTES = 20 << 20
# Limit of one request, whatever the limit of its engine.
MAX_IMAGES = 64
FORMATS = "PNG, JPEG, WebP or GIF"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class ImageInput(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """An image of a prompt. ``data`` is empty between client and worker process, which fetches the bytes.

    Args:
        digest: SHA-256 of the bytes, as 64 hexadecimal digits.
        data: an image file.
    """

    digest: str
    data: bytes = b""

    @classmethod
    def from_bytes(cls, data: bytes) -> ImageInput:
        """Return the image of these bytes."""
        return cls(digest_of(data), data)


def digest_of(data: bytes) -> str:
    """Return the id of an image."""
    return hashlib.sha256(data).hexdigest()


def is_digest(text: object) -> bool:
    """Whether ``text`` may be the id of an image."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def check_image_bytes(field: str, data: object) -> bytes:
    """Return ``data`` if it starts like an image file and is not too large to be sent.

    Raises:
        ValidationError: it is none; names ``field`` and the remedy.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValidationError(f"{field} must be bytes, got {shown(type(data).__name__)}")
    data = bytes(data)
    if not data:
        raise ValidationError(f"{field} is an image of no bytes; send a {FORMATS} file")
    if len(data) > MAX_IMAGE_BYTES:
        raise ValidationError(
            f"{field} is an image of {len(data)} bytes, and at most {MAX_IMAGE_BYTES} may be sent; make it smaller"
        )
    if image_format(data) is None:
        raise ValidationError(f"{field} is no image of a kind that is read; send a {FORMATS} file")
    return data


def image_format(data: bytes) -> str | None:
    """Return the format of ``data`` by its first bytes, as Pillow names it; None if it is not supported."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    return None


def check_images(images: list[ImageInput] | None) -> None:
    """Refuse a list of images that none of our clients sends.

    Raises:
        ValidationError: there are too many, or an id is not a digest.
    """
    if images is None:
        return
    if len(images) > MAX_IMAGES:
        raise ValidationError(f"images: a request has at most {MAX_IMAGES}, got {len(images)}")
    for index, image in enumerate(images):
        if not is_digest(image.digest):
            raise ValidationError(f"images[{index}].digest must be a SHA-256 in hexadecimal, got {shown(image.digest)}")
