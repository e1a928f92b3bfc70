"""Compares what the subscribers saw under chaos with what they saw without."""

from __future__ import annotations

import msgspec

from .load import Sighting


class Verdict(msgspec.Struct, kw_only=True):
    """How many requests were harmed, and how; all below ``num_gone`` must be 0.

    ``num_kills`` processes were killed: where none was, nothing was put to the test. ``num_gone`` requests ended with
    the error that Redis has lost them, where it did lose its data. ``num_sent_again`` times that error came before any
    token: a primary had accepted a request that no replica had yet, and was killed.
    """

    num_requests: int = 0
    num_kills: int = 0
    num_gone: int = 0
    num_sent_again: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    different: int = 0
    wrong_ends: int = 0
    failed: int = 0
    examples: list[str] = []

    @property
    def num_harms(self) -> int:
        return self.lost + self.duplicated + self.reordered + self.different + self.wrong_ends + self.failed

    @property
    def is_clean(self) -> bool:
        return self.num_harms == 0 and self.num_kills > 0 and self.num_requests > self.num_gone


def judge(expected: list[Sighting], seen: list[Sighting], *, num_kills: int, loses_data: bool = False) -> Verdict:
    """Compare each of ``seen`` with the undisturbed run of the same request (they repeat in order).

    Args:
        loses_data: Redis was made to lose its data, so requests may have ended with the error that says so.
    """
    verdict = Verdict(num_requests=len(seen), num_kills=num_kills)
    for number, sighting in enumerate(seen):
        is_excused = loses_data and sighting.is_gone
        verdict.num_gone += is_excused
        verdict.num_sent_again += sighting.num_sent_again
        whole = expected[number % len(expected)]
        harms = _harms(whole, sighting, is_excused=is_excused)
        for harm in harms:
            setattr(verdict, harm, getattr(verdict, harm) + 1)
        if harms and len(verdict.examples) < 10:
            told = f"{', '.join(harms)} {sighting.error}".strip()
            verdict.examples.append(f"{sighting.request_id}: {told}{_difference(whole, sighting)}")
    return verdict


def _harms(expected: Sighting, seen: Sighting, *, is_excused: bool) -> list[str]:
    harms = []
    if seen.error:
        harms.append("failed")
    elif not seen.finish_reasons and not is_excused:
        harms.append("lost")
    if len(seen.finish_reasons) > 1:
        harms.append("wrong_ends")
    if len(set(seen.indexes)) < len(seen.indexes):
        harms.append("duplicated")
    elif seen.indexes != list(range(len(seen.indexes))):
        harms.append("reordered")
    if not seen.finish_reasons and seen.token_ids != expected.token_ids[: len(seen.token_ids)]:
        harms.append("different")
    if seen.finish_reasons and (seen.token_ids, seen.text, seen.finish_reasons) != (
        expected.token_ids,
        expected.text,
        expected.finish_reasons,
    ):
        harms.append("different")
    return harms


def _difference(expected: Sighting, seen: Sighting) -> str:
    """Where what was seen leaves what was expected, for who has to find out why."""
    for name in ("token_ids", "text", "finish_reasons"):
        wanted, found = getattr(expected, name), getattr(seen, name)
        place = next((i for i, pair in enumerate(zip(wanted, found, strict=False)) if pair[0] != pair[1]), None)
        if place is not None:
            return f"; {name} from {place} on: {found[place:]!r} instead of {wanted[place:]!r}"
        if len(found) != len(wanted):
            return f"; {name}: {len(found)} instead of {len(wanted)}"
    return ""
