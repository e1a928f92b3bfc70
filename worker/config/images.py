"""Options of an engine for images."""

from __future__ import annotations

from typing import Annotated

from ...shared.params.images import MAX_IMAGES
from ..options.numbers import Integer, Size
from ..options.option import Option

_GROUP = "what an engine takes"
DEFAULT_MAX_IMAGES = 8
DEFAULT_CACHE_MEMORY = 512 << 20

MaxImages = Annotated[
    int,
    Option(
        "most images of a request, of a model that reads images; 0 takes none, and leaves its tower out",
        Integer(0, MAX_IMAGES, "0 takes none"),
        group=_GROUP,
    ),
]
ImageCacheMemory = Annotated[
    int,
    Option(
        "memory for results of earlier images, so that an image that is sent again is not computed again: half for "
        "processed images, half for the vision encoder's features of them",
        Size(0, 1 << 50),
        default="512MiB",
        group=_GROUP,
    ),
]
