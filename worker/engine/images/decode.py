"""Decodes image files from untrusted clients.

The size is read from the header and checked before any pixel is decoded, because a file of some kilobytes can claim
billions of pixels.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image, ImageOps

from ....shared.errors import ValidationError
from ....shared.params.images import FORMATS, check_image_bytes, image_format

# 192 MB as RGB; a camera of 2026 makes 12 to 50 million.
MAX_PIXELS = 64_000_000
# Processors would shrink longer strips to a height of one pixel, or fail.
MAX_ASPECT_RATIO = 200


def decode_image(data: bytes) -> Image.Image:
    """Return the image in ``data``, upright and in RGB; transparent parts are on white.

    Raises:
        ValidationError: it is no image, is damaged or animated, or has an unsupported size or shape.
    """
    kind = image_format(check_image_bytes("it", data))
    try:
        with warnings.catch_warnings():
            # Ignore Pillow's warning, because the size is checked below with other limits.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=[kind] if kind else None)
    except Image.DecompressionBombError:
        raise _too_large("by far too many") from None
    except Exception as error:  # a damaged header raises anything
        raise ValidationError(f"it is not a readable {FORMATS} image; send it as one") from error
    with image:
        _check_size(*image.size)
        if _num_frames(image) > 1:
            raise ValidationError("it is animated, and only still images are supported; send one of its frames")
        try:
            image.load()
            upright = ImageOps.exif_transpose(image)
            return _on_white(_in_bytes(upright))
        except Exception as error:  # OSError, SyntaxError, struct.error, MemoryError …: it depends on the decoder
            raise ValidationError(f"it is truncated or damaged: its {kind} data cannot be decoded") from error


def _in_bytes(image: Image.Image) -> Image.Image:
    """Convert 16-bit grey to 8 bits. Pillow would clip it at 255, so that nearly all of it would be white."""
    transparent = image.info.get("transparency")
    if not image.mode.startswith("I"):
        if isinstance(transparent, tuple) and max(transparent) > 255:  # a 16-bit file, which Pillow reads as 8 bits
            image.info["transparency"] = tuple(value >> 8 for value in transparent)
        return image
    values = np.asarray(image).clip(0, 65535)
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey


def _on_white(image: Image.Image) -> Image.Image:
    """Return ``image`` in RGB, on a white background, as transformers and vLLM do."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    background = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(background, image).convert("RGB")


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise _too_large(f"{width} by {height}")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ValidationError(
            f"it is {width} by {height} pixels, and one side may be at most {MAX_ASPECT_RATIO} times the other; crop it"
        )


def _too_large(size: str) -> ValidationError:
    return ValidationError(f"it has {size} pixels, and at most {MAX_PIXELS} are decoded; make it smaller")


def _num_frames(image: Image.Image) -> int:
    try:
        return getattr(image, "n_frames", 1)
    except Exception:  # its frames cannot be counted, so it is damaged, and the decoder will report that
        return 1
