"""Choice of the parts that bring most within a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .plan import Plan, kind_of
from .results_file import ResultsFile

TESTS = ("correctness", "engine-tests")
# A part may take longer than it did before.
_MARGIN = 1.5


def parts_within(parts: Sequence[str], plan: Plan, results: ResultsFile, seconds: float) -> Iterator[tuple[str, float]]:
    """Yield the parts to run within ``seconds``, and the time that each may take.

    Tests come first, then parts that were never measured on this card, then the rest; each group in the order of
    ``parts``, which is that of their worth. A part that does not fit is passed over.
    """
    measured = results.results()
    left_s = seconds
    for part in sorted((part for part in parts if part not in measured), key=lambda part: _rank(part, results)):
        needed_s = time_of(part, plan, results)
        if needed_s <= left_s:
            left_s -= needed_s
            yield part, needed_s


def time_of(part: str, plan: Plan, results: ResultsFile) -> float:
    """Return the time that a part may take: its limit, or less if it took less before on this card."""
    limit_s, before_s = plan.limits_s[kind_of(part)], results.seconds_before(part)
    return limit_s if not before_s else min(limit_s, _MARGIN * before_s)


def _rank(part: str, results: ResultsFile) -> tuple[bool, bool]:
    return kind_of(part) not in TESTS, results.seconds_before(part) is not None
