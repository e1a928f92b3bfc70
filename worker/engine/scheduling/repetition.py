"""Whether an output has begun to repeat itself."""

from __future__ import annotations

from ....shared.params.repetition import RepetitionDetectionParams


def ends_in_repetition(token_ids: list[int], num_skipped: int, params: RepetitionDetectionParams) -> bool:
    """Whether ``token_ids`` ends with ``params.min_count`` times the same pattern of a size within the bounds.

    Only a pattern whose size is the distance between the last token and an equal one is compared; the search for those
    runs in C, and text seldom has several among its last few tokens.

    Args:
        num_skipped: tokens at the beginning that do not count: the prompt.
    """
    longest = min(params.max_pattern_size, (len(token_ids) - num_skipped) // max(params.min_count, 1))
    size = max(params.min_pattern_size, 1)
    if size > longest:
        return False
    before = token_ids[-1 - longest : -1]
    before.reverse()
    try:
        while True:
            size = before.index(token_ids[-1], size - 1) + 1
            tail = token_ids[-size * params.min_count :]
            if tail[size:] == tail[:-size]:
                return True
            size += 1
    except ValueError:
        return False
