"""Compares what the subscribers saw under chaos with what they saw without."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ....shared.queue.request_events import EventKind, RequestEvent
from .load import Sighting
from .owners import Owners
from .timelines import Timelines, harm_of

MAX_EXAMPLES = 10


class Verdict(msgspec.Struct, kw_only=True):
    """How many requests were harmed, and how; ``lost`` and all below must be 0.

    ``num_kills`` processes were killed: where none was, nothing was put to the test. ``missing`` are the actions that
    were asked for and never happened. ``num_gone`` requests ended with the error that Redis has lost them, where it did
    lose its data. ``num_sent_again`` times that error came before any token: a primary had accepted a request that no
    replica had yet, and was killed.

    ``num_records`` were seen going into logs, whose writers are known; ``num_moved`` requests went on under another
    owner. ``two_owners``: writes of an owner that was none any more. ``num_timelines`` requests have all their events;
    those of ``wrong_timelines`` do not fit what was seen. ``num_compared`` have one right answer, whatever dies.
    """

    num_requests: int = 0
    num_kills: int = 0
    missing: list[str] = []
    num_records: int = 0
    num_moved: int = 0
    num_gone: int = 0
    num_sent_again: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    different: int = 0
    wrong_ends: int = 0
    failed: int = 0
    two_owners: int = 0
    num_timelines: int = 0
    num_compared: int = 0
    wrong_timelines: int = 0
    examples: list[str] = []

    @property
    def num_harms(self) -> int:
        seen = self.lost + self.duplicated + self.reordered + self.different + self.wrong_ends + self.failed
        return seen + self.two_owners + self.wrong_timelines

    @property
    def shows_nothing(self) -> str:
        """Why nothing follows from this run; empty if something does."""
        if self.num_kills == 0:
            return "nothing was killed"
        if self.missing:
            return f"this never happened: {', '.join(self.missing)}"
        if self.num_requests <= self.num_gone:
            return "every request was lost with the data"
        return "" if self.num_records else "no record was seen going into a log"

    @property
    def is_clean(self) -> bool:
        return self.num_harms == 0 and not self.shows_nothing


def judge(
    expected: list[Sighting],
    seen: list[Sighting],
    owners: Owners,
    *,
    num_kills: int,
    missing: Sequence[str] = (),
    loses_data: bool = False,
    timelines: Timelines | None = None,
    may_differ: Sequence[bool] = (),
) -> Verdict:
    """Compare each of ``seen`` with the undisturbed run of the same request (they repeat in order).

    Args:
        owners: what was seen of who wrote to which log.
        missing: actions that were asked for and did not happen.
        loses_data: Redis was made to lose its data, or to fail over, which may lose the last of it; so requests may
            have ended with the error that says so.
        timelines: events by request; None where Redis may have lost some. A request whose first are kept no more is
            passed over.
        may_differ: of each of ``expected``, whether another engine may go on with other tokens than this one would
            have; none where it is empty. Everything but the tokens is held against it all the same.
    """
    verdict = Verdict(
        num_requests=len(seen),
        num_kills=num_kills,
        missing=list(missing),
        num_records=owners.num_records,
        num_moved=owners.num_moved,
        two_owners=owners.num_harms,
        examples=owners.harms[:MAX_EXAMPLES],
    )
    for number, sighting in enumerate(seen):
        is_excused = loses_data and sighting.is_gone
        verdict.num_gone += is_excused
        verdict.num_sent_again += sighting.num_sent_again
        whole = expected[number % len(expected)]
        harms = _harms(whole, sighting, is_excused=is_excused)
        if may_differ and may_differ[number % len(may_differ)]:
            harms = [harm for harm in harms if harm != "different"]
        else:
            verdict.num_compared += 1
        for harm in harms:
            setattr(verdict, harm, getattr(verdict, harm) + 1)
        if harms and len(verdict.examples) < 2 * MAX_EXAMPLES:
            told = f"{', '.join(harms)} {sighting.error}".strip()
            verdict.examples.append(f"{sighting.request_id}: {told}{_difference(whole, sighting)}")
        timeline = (timelines or {}).get(sighting.request_id)
        if (
            timeline
            and timeline[0].kind is EventKind.QUEUED
            and sighting.finish_reasons
            and not sighting.num_sent_again
        ):
            _judge_timeline(verdict, timeline, sighting)
    return verdict


def _judge_timeline(verdict: Verdict, timeline: Sequence[RequestEvent], sighting: Sighting) -> None:
    verdict.num_timelines += 1
    if harm := harm_of(timeline, sighting):
        verdict.wrong_timelines += 1
        verdict.examples.append(f"{sighting.request_id}: {harm}")


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
