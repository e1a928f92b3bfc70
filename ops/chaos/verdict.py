"""Compares what the subscribers saw under chaos with what they saw without."""

from __future__ import annotations

import msgspec

from .load import Sighting


class Verdict(msgspec.Struct, kw_only=True):
    """How many requests were harmed, and how; all but ``num_requests`` must be 0."""

    num_requests: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    different: int = 0
    wrong_ends: int = 0
    failed: int = 0
    examples: list[str] = []

    @property
    def is_clean(self) -> bool:
        return not any((self.lost, self.duplicated, self.reordered, self.different, self.wrong_ends, self.failed))


def judge(expected: list[Sighting], seen: list[Sighting]) -> Verdict:
    """Compare each of ``seen`` with the undisturbed run of the same request (they repeat in order)."""
    verdict = Verdict(num_requests=len(seen))
    for number, sighting in enumerate(seen):
        harms = _harms(expected[number % len(expected)], sighting)
        for harm in harms:
            setattr(verdict, harm, getattr(verdict, harm) + 1)
        if harms and len(verdict.examples) < 10:
            verdict.examples.append(f"{sighting.request_id}: {', '.join(harms)} {sighting.error}".strip())
    return verdict


def _harms(expected: Sighting, seen: Sighting) -> list[str]:
    harms = []
    if seen.error:
        harms.append("failed")
    elif not seen.finish_reasons:
        harms.append("lost")
    if len(seen.finish_reasons) > 1:
        harms.append("wrong_ends")
    if len(set(seen.indexes)) < len(seen.indexes):
        harms.append("duplicated")
    elif seen.indexes != list(range(len(seen.indexes))):
        harms.append("reordered")
    if seen.finish_reasons and (seen.token_ids, seen.text, seen.finish_reasons) != (
        expected.token_ids,
        expected.text,
        expected.finish_reasons,
    ):
        harms.append("different")
    return harms
