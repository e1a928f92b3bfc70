"""Seeds that follow from a request's own: of each of its ``n`` answers, and of each segment of its streamed input."""

from __future__ import annotations

_MASK = 2**64 - 1


def derived_seed(seed: int, number: int) -> int:
    """Return seed ``number`` of those that follow from ``seed``: ``seed`` itself for 0, else 63 bits of SplitMix64's
    ``number``-th output.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators". Never to be changed: a repeated
    request has to get the same answers from every version.
    """
    if number == 0:
        return seed
    mixed = (seed + number * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) >> 1
