"""Untrusted image files: valid ones are read, others are refused with a message before they cost anything."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from penstock.producer.inputs.images import image_bytes
from penstock.shared.errors import ValidationError
from penstock.shared.params.images import MAX_IMAGE_BYTES, check_image_bytes
from penstock.worker.engine.images.decode import decode_image


def file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int, height: int, pixels: bytes, bits: int = 8, transparent: bytes = b"") -> bytes:
    """A PNG in RGB of these chunks."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0))
    trns = chunk(b"tRNS", transparent) if transparent else b""
    return b"\x89PNG\r\n\x1a\n" + head + trns + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def header_of(width: int, height: int) -> bytes:
    """A PNG that says how large it is, and has next to no pixels."""
    return png(width, height, b"\0")


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


def paletted(*, whole_palette: bool) -> tuple[Image.Image, dict[str, Any]]:
    """A picture of black and red, of which the black is transparent, or half of it."""
    image = Image.new("P", (6, 4), 0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.paste(1, (3, 0, 6, 4))
    return image, {"transparency": b"\x80\xff" if whole_palette else 0}


def transparent_images() -> dict[str, bytes]:
    rgba = Image.new("RGBA", (6, 4), (0, 0, 0, 0))
    rgba.paste((255, 0, 0, 255), (3, 0, 6, 4))
    half = rgba.copy()
    half.putalpha(128)
    grey = rgba.convert("LA")
    rgb, bits = rgba.convert("RGB"), Image.new("1", (6, 4), 0)
    bits.paste(1, (3, 0, 6, 4))
    one_color, all_colors = paletted(whole_palette=False), paletted(whole_palette=True)
    turned = Image.Exif()
    turned[0x0112] = 6
    return {
        "RGBA": file(rgba),
        "RGBA, half": file(half),
        "RGBA, turned": file(rgba, exif=turned),
        "LA": file(grey),
        "P, one color": file(one_color[0], **one_color[1]),
        "P, all colors": file(all_colors[0], **all_colors[1]),
        "RGB, one color": file(rgb, transparency=(0, 0, 0)),
        "L, one grey": file(rgb.convert("L"), transparency=0),
        "1, one bit": file(bits, transparency=0),
        "WebP": file(rgba, "WEBP", lossless=True, exact=True),
        "GIF": file(one_color[0], "GIF", **one_color[1]),
        "opaque": file(rgb),
    }


@pytest.mark.parametrize("name", transparent_images())
def test_transparent_pixels_are_on_white_as_in_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers.image_transforms")
    data = transparent_images()[name]
    picture = np.asarray(decode_image(data))
    theirs = transformers.convert_to_rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert np.array_equal(picture, np.asarray(theirs))
    is_black = (picture == 0).all(axis=2).any()
    assert is_black == (name == "opaque")


def test_a_transparent_grey_of_sixteen_bits_is_white() -> None:
    values = np.zeros((4, 6), np.uint16)
    values[:, 3:] = 40_000
    picture = np.asarray(decode_image(file(Image.fromarray(values), transparency=0)))
    assert (picture[:, :3] == 255).all()
    assert (picture[:, 3:] == 40_000 >> 8).all()


def test_a_transparent_color_of_sixteen_bits_is_white() -> None:
    color, other = struct.pack(">HHH", 0x1234, 0, 0), struct.pack(">HHH", 0x5678, 0, 0)
    picture = np.asarray(decode_image(png(2, 1, b"\0" + color + other, bits=16, transparent=color)))
    assert picture.tolist() == [[[255, 255, 255], [0x56, 0, 0]]]


@pytest.mark.parametrize("mode", ["LA", "La", "PA", "RGBA", "RGBa", "P"])
def test_a_picture_keeps_its_transparency_on_its_way(mode: str) -> None:
    picture, options = paletted(whole_palette=False)
    if mode == "P":
        picture.info.update(options)
    else:
        picture = Image.new(mode, (6, 4))
    pixels = np.asarray(decode_image(image_bytes("image", picture)))
    assert (pixels[:, :3] == 255).all()


def test_grey_of_sixteen_bits_is_that_of_eight() -> None:
    """Pillow's own conversion makes all that is lighter than 255 of 65,535 white."""
    steps = np.arange(256, dtype=np.uint16)
    picture = decode_image(file(Image.fromarray(np.tile(steps * 257, (9, 1)))))
    assert picture.mode == "RGB"
    assert np.array_equal(np.asarray(picture), np.tile(steps[None, :, None], (9, 1, 3)))


def test_an_image_is_rotated_by_its_exif_orientation() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode_image(file(RED, "JPEG", exif=exif)).size == (4, 8)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no bytes"),
        (b"<svg></svg>", "send a PNG, JPEG, WebP or GIF"),
        (file(RED, "BMP"), "send a PNG, JPEG, WebP or GIF"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "not a readable PNG, JPEG, WebP or GIF image"),
        (file(RED)[:40], "readable|truncated or damaged"),
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
def test_others_are_refused_in_words(data: bytes, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        decode_image(data)


def test_images_that_are_too_large() -> None:
    whole = file(RED)
    assert check_image_bytes("image", bytearray(whole)) == whole
    with pytest.raises(ValidationError, match=f"image is an image of {MAX_IMAGE_BYTES + 1} bytes"):
        check_image_bytes("image", whole.ljust(MAX_IMAGE_BYTES + 1))
    with pytest.raises(ValidationError, match="image must be bytes"):
        check_image_bytes("image", "whole")
