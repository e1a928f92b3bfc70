"""Options of an engine for images."""

from __future__ import annotations

from typing import Annotated

from ...shared.params.images import MAX_IMAGES
from ..options.numbers import Integer, Size
from ..options.option import Option

_GROUP = "batch and memory"
DEFAULT_MAX_IMAGES = 8
DEFAULT_CACHE_MEMORY = 512 << 20

MaxImages = Annotated[
    int,
    Option(
        "maximum images per request of a vision model; 0 accepts none and does not load the vision encoder",
        Integer(0, MAX_IMAGES, "0 takes none"),
        group=_GROUP,
    ),
]
ImageCacheMemory = Annotated[
    int,
    Option(
        "memory that caches repeated images: half for processed images, half for features of the vision encoder",
        Size(0, 1 << 50),
        default="512MiB",
        group=_GROUP,
    ),
]
