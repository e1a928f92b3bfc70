"""Decodes image files that anybody may have sent.

The size is read from the header and judged before a pixel is decoded: a file of some kilobytes can say that it has
billions of them.
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
# Longer strips are no pictures; processors would make them a pixel high, or fail.
MAX_ASPECT_RATIO = 200


def decode_image(data: bytes) -> Image.Image:
    """Return the picture that ``data`` is, upright and in RGB; what is transparent is on white.

    Raises:
        ValidationError: it is none, is damaged, moves, or has a size or a shape that is not read.
    """
    kind = image_format(check_image_bytes("it", data))
    try:
        with warnings.catch_warnings():
            # What Pillow warns of is judged below, by bounds of our own.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=[kind] if kind else None)
    except Image.DecompressionBombError:
        raise _too_large("by far too many") from None
    except Exception as error:  # a damaged header raises anything
        raise ValidationError(f"it is no {FORMATS} image that can be read; send it as one") from error
    with image:
        _check_size(*image.size)
        if _num_frames(image) > 1:
            raise ValidationError("it is animated, and only still images are read; send one of its frames")
        try:
            image.load()
            upright = ImageOps.exif_transpose(image)
            return _on_white(_in_bytes(upright))
        except Exception as error:  # OSError, SyntaxError, struct.error, MemoryError …: each decoder has its own
            raise ValidationError(f"it is truncated or damaged: its {kind} data cannot be decoded") from error


def _in_bytes(image: Image.Image) -> Image.Image:
    """Grey of 16 bits as that of 8, which Pillow would cut off at 255: nearly all of it would be white."""
    transparent = image.info.get("transparency")
    if not image.mode.startswith("I"):
        if isinstance(transparent, tuple) and max(transparent) > 255:  # of a file with 16 bits, read as 8 by Pillow
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
    except Exception:  # its frames cannot be counted: then it is damaged, which the decoder will say
        return 1
