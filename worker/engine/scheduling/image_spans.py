"""Where the images of a prompt lie among its tokens, and how the blocks that hold them are told apart.

The tokens in the place of an image are the same for every image of that size, so blocks with some of them are known by
the image's digest, too. Blocks before it are not: chats that begin alike share them, whatever they show later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class ImageSpan:
    """An image in a prompt.

    Args:
        start, stop: its tokens.
        places: the positions in the prompt whose embeddings are its features, ascending.
        key: by which it is told apart.
        features: ``[len(places), hidden size]``, or several times as wide where deeper layers take some, too: a tensor
            on the CPU. Nothing of the scheduler looks at it.
        axes: ``[3, stop - start]``, positions in three axes from the image's first; None where one is each token's.
    """

    start: int
    stop: int
    places: list[int]
    key: bytes
    features: Any
    axes: Any = None


def block_keys(images: Sequence[ImageSpan], block_size: int, first: int, end: int) -> dict[int, bytes]:
    """What the blocks ``first .. end`` of a request are known by beside their tokens; those without images are not in.

    Where an image begins is a part of it: a block may hold the ends of one and the beginnings of the next.
    """
    keys: dict[int, bytes] = {}
    for image in images:
        for block in range(max(first, image.start // block_size), min(end, -(-image.stop // block_size))):
            keys[block] = keys.get(block, b"") + image.key + image.start.to_bytes(8, "little")
    return keys
