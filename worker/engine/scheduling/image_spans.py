"""Where the images of a prompt lie among its tokens, and how the blocks that hold them are told apart.

The tokens in the place of an image are the same for every image of that size, so blocks with some of them are known by
the image's digest, too. Blocks before it are not: chats that begin alike share them, whatever they show later.

Some models let the tokens of an image see each other. One forward has to compute all of them, so a prompt is not cut
there: neither by the end of a chunk nor by what is found in the KV cache.
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
        wholes: first token and end of each run of its tokens that see each other, ascending: one forward computes all
            of a run; none where each sees what is before it, as text does.
    """

    start: int
    stop: int
    places: list[int]
    key: bytes
    features: Any
    axes: Any = None
    wholes: tuple[tuple[int, int], ...] = ()


def block_keys(images: Sequence[ImageSpan], block_size: int, first: int, end: int) -> dict[int, bytes]:
    """What the blocks ``first .. end`` of a request are known by beside their tokens; those without images are not in.

    Where an image begins is a part of it: a block may hold the ends of one and the beginnings of the next.
    """
    keys: dict[int, bytes] = {}
    for image in images:
        for block in range(max(first, image.start // block_size), min(end, -(-image.stop // block_size))):
            keys[block] = keys.get(block, b"") + image.key + image.start.to_bytes(8, "little")
    return keys


def last_cut(images: Sequence[ImageSpan], num_tokens: int) -> int:
    """Return how many of the first ``num_tokens`` tokens of a request can be computed without those behind them."""
    for image in images:
        for first, end in image.wholes:
            if first < num_tokens < end:
                return first
    return num_tokens


def whole_chunk(images: Sequence[ImageSpan], num_computed_tokens: int, num_new_tokens: int) -> int:
    """Return how many of ``num_new_tokens`` a step may compute: none where it has too little room for an image's."""
    return last_cut(images, num_computed_tokens + num_new_tokens) - num_computed_tokens


def whole_hit(images: Sequence[ImageSpan], num_blocks: int, block_size: int) -> int:
    """Return how many of the first ``num_blocks`` blocks, which are cached, may be taken as computed."""
    while (cut := last_cut(images, num_blocks * block_size)) < num_blocks * block_size:
        num_blocks = cut // block_size
    return num_blocks
