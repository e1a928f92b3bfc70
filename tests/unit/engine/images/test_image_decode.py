"""Image files that anybody may send: what is read, and what is refused in words before it costs anything."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.shared.errors import ValidationError
from penstock.shared.params.images import MAX_IMAGE_BYTES, check_image_bytes
from penstock.worker.engine.images.decode import decode_image


def file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def header_of(width: int, height: int) -> bytes:
    """A PNG that says how large it is, and has next to no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


RED = Image.new("RGB", (8, 4), (255, 0, 0))
FRAMES = [Image.new("RGB", (8, 4), (value, 0, 0)) for value in (0, 128, 255)]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_still_images_are_read(kind: str) -> None:
    image = decode_image(file(RED, kind))
    assert (image.mode, image.size) == ("RGB", (8, 4))
    red, *others = np.asarray(image).reshape(-1, 3).T
    assert red.min() > 240
    assert max(color.max() for color in others) < 15


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_all_pixels_become_rgb(mode: str) -> None:
    assert decode_image(file(Image.new(mode, (5, 5)))).mode == "RGB"


def test_grey_of_sixteen_bits_is_that_of_eight() -> None:
    """Pillow's own conversion makes all that is lighter than 255 of 65,535 white."""
    steps = np.arange(256, dtype=np.uint16)
    picture = decode_image(file(Image.fromarray(np.tile(steps * 257, (9, 1)))))
    assert picture.mode == "RGB"
    assert np.array_equal(np.asarray(picture), np.tile(steps[None, :, None], (9, 1, 3)))


def test_an_image_is_turned_as_its_camera_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode_image(file(RED, "JPEG", exif=exif)).size == (4, 8)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "no bytes"),
        (b"<svg></svg>", "send a PNG, JPEG, WebP or GIF"),
        (file(RED, "BMP"), "send a PNG, JPEG, WebP or GIF"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "no PNG, JPEG, WebP or GIF image that can be read"),
        (file(RED)[:40], "be read|truncated or damaged"),
        (file(Image.effect_noise((64, 64), 90), "JPEG")[:700], "truncated or damaged: its JPEG data"),
        (header_of(64, 64), "truncated or damaged: its PNG data"),
        (header_of(50_000, 50_000), "pixels, and at most 64000000 are decoded"),
        (header_of(1 << 30, 1 << 30), "pixels, and at most 64000000 are decoded"),
        (header_of(9000, 9000), "9000 by 9000 pixels, and at most"),
        (header_of(1, 100_000), "1 by 100000 pixels, and one side may be at most 200 times the other"),
        (file(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "it is animated"),
        (file(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]), "it is animated"),
        (file(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:], lossless=True), "it is animated"),
    ],
)
def test_others_are_refused_in_words(data: bytes, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        decode_image(data)


def test_what_is_too_large_to_be_sent() -> None:
    whole = file(RED)
    assert check_image_bytes("image", bytearray(whole)) == whole
    with pytest.raises(ValidationError, match=f"image is an image of {MAX_IMAGE_BYTES + 1} bytes"):
        check_image_bytes("image", whole.ljust(MAX_IMAGE_BYTES + 1))
    with pytest.raises(ValidationError, match="image must be bytes"):
        check_image_bytes("image", "whole")
