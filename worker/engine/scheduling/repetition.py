"""Detection of outputs that repeat themselves."""

from __future__ import annotations

from ....shared.params.repetition import RepetitionDetectionParams


def ends_in_repetition(token_ids: list[int], num_skipped: int, params: RepetitionDetectionParams) -> bool:
    """Return whether ``token_ids`` ends with ``params.min_count`` copies of a pattern of a size within the bounds.

    The size of a pattern is the distance between the last token and an earlier equal token, so only such sizes are
    compared. The search for equal tokens runs in C, and few of the last tokens are equal in ordinary text.

    Args:
        num_skipped: length of the prompt, which is not searched.
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
