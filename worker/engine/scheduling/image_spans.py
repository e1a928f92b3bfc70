"""Positions of images among the tokens of a prompt, and how blocks that contain images are identified.

The placeholder tokens are the same for every image of one size, so blocks that contain some of them are also
identified by the image's digest. Blocks before the image are not: chats with the same beginning share them, whichever
images follow.

Some models let the tokens of an image attend to each other. One forward must compute all of them, so a prompt is not
split there, neither by the end of a chunk nor by a hit in the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class ImageSpan:
    """An image in a prompt.

    Args:
        start, stop: range of its tokens.
        places: positions in the prompt whose embeddings are the image's features, ascending.
        key: identity of the image's contents.
        features: ``[len(places), hidden size]``, or several times as wide if deeper layers get features too: a tensor
            on the CPU. The scheduler does not read it.
        axes: ``[3, stop - start]``, positions in three axes relative to the image's first; None if each token has one
            position.
        bidirectional: first token and end of each run of tokens that attend to each other, ascending. One forward
            computes a whole run. Empty if attention is causal, as in text.
    """

    start: int
    stop: int
    places: list[int]
    key: bytes
    features: Any
    axes: Any = None
    bidirectional: tuple[tuple[int, int], ...] = ()


def block_keys(images: Sequence[ImageSpan], block_size: int, first: int, end: int) -> dict[int, bytes]:
    """Return the image part of the identity of blocks ``first .. end`` of a request; blocks without images are absent.

    It includes each image's start, because a block may hold the end of one image and the beginning of the next.
    """
    keys: dict[int, bytes] = {}
    for image in images:
        for block in range(max(first, image.start // block_size), min(end, -(-image.stop // block_size))):
            keys[block] = keys.get(block, b"") + image.key + image.start.to_bytes(8, "little")
    return keys


def last_cut(images: Sequence[ImageSpan], num_tokens: int) -> int:
    """Return how many of the first ``num_tokens`` tokens of a request can be computed without the tokens after them."""
    for image in images:
        for first, end in image.bidirectional:
            if first < num_tokens < end:
                return first
    return num_tokens


def uncut_chunk(images: Sequence[ImageSpan], num_computed_tokens: int, num_new_tokens: int) -> int:
    """Return how many of ``num_new_tokens`` a step may compute: 0 if an image's run of tokens does not fit."""
    return last_cut(images, num_computed_tokens + num_new_tokens) - num_computed_tokens


def uncut_hit(images: Sequence[ImageSpan], num_blocks: int, block_size: int) -> int:
    """Return how many of the first ``num_blocks`` blocks, which are cached, may be used as computed."""
    while (cut := last_cut(images, num_blocks * block_size)) < num_blocks * block_size:
        num_blocks = cut // block_size
    return num_blocks
