"""Comparison of the outputs under chaos with undisturbed ones."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ....shared.queue.lifecycle import EventKind, RequestEvent
from .ledger_records import LedgerCheck
from .load import Sighting
from .owners import Owners
from .timelines import Timelines, find_violation

MAX_EXAMPLES = 10


class Verdict(msgspec.Struct, kw_only=True):
    """Numbers of harmed requests by kind; ``lost`` and all below must be 0.

    ``num_kills`` processes were killed; with 0 nothing was tested. ``missing`` are requested actions that did not
    happen. ``num_gone`` requests ended with the error that Redis had lost them, when it did lose its data.
    ``num_sent_again`` times that error came before any token: a killed primary had accepted a request that no replica
    had yet.

    ``num_records`` records of known writers were observed; ``num_moved`` requests were resumed by another owner.
    ``two_owners`` counts writes of former owners. ``num_timelines`` requests have all their events; those of
    ``wrong_timelines`` contradict the output. ``wrong_ledger`` sums of the ledger differ from the records.
    ``num_compared`` requests have one correct output, regardless of faults. ``unserved`` models were not served within
    the bound after the last fault.
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
    wrong_ledger: int = 0
    unserved: int = 0
    examples: list[str] = []

    @property
    def num_harms(self) -> int:
        num_harms = self.lost + self.duplicated + self.reordered + self.different + self.wrong_ends + self.failed
        return num_harms + self.two_owners + self.wrong_timelines + self.wrong_ledger + self.unserved

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
    sightings: list[Sighting],
    owners: Owners,
    *,
    num_kills: int,
    missing: Sequence[str] = (),
    loses_data: bool = False,
    timelines: Timelines | None = None,
    ledger: LedgerCheck | None = None,
    num_unserved: int = 0,
    may_differ: Sequence[bool] = (),
) -> Verdict:
    """Compare each of ``sightings`` with the undisturbed run of the same request (they repeat in order).

    Args:
        owners: checks of the writers of logs.
        missing: requested actions that did not happen.
        loses_data: whether Redis lost data, or failed over, which may lose the last writes. Then requests may have
            ended with the error that says so.
        timelines: events by request; None if Redis may have lost some. Requests whose first events were trimmed are
            skipped.
        ledger: comparison of the ledger with the records, each difference of which is a harm.
        may_differ: for each of ``expected``, whether another engine may continue with different tokens; empty if none
            may. Everything but the tokens is compared in any case.
    """
    verdict = Verdict(
        num_requests=len(sightings),
        num_kills=num_kills,
        missing=list(missing),
        num_records=owners.num_records,
        num_moved=owners.num_moved,
        two_owners=owners.num_harms,
        unserved=num_unserved,
        examples=owners.harms[:MAX_EXAMPLES],
    )
    if ledger is not None:
        verdict.wrong_ledger = len(ledger.differences)
        verdict.examples += ledger.differences[:MAX_EXAMPLES]
    for number, sighting in enumerate(sightings):
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
            summary = f"{', '.join(harms)} {sighting.error}".strip()
            verdict.examples.append(f"{sighting.request_id}: {summary}{_difference(whole, sighting)}")
        _judge_timeline(verdict, (timelines or {}).get(sighting.request_id), sighting)
    return verdict


def _judge_timeline(verdict: Verdict, timeline: Sequence[RequestEvent] | None, sighting: Sighting) -> None:
    if not timeline or timeline[0].kind is not EventKind.QUEUED:
        return
    if not sighting.finish_reasons or sighting.num_sent_again:
        return
    verdict.num_timelines += 1
    if harm := find_violation(timeline, sighting):
        verdict.wrong_timelines += 1
        verdict.examples.append(f"{sighting.request_id}: {harm}")


def _harms(expected: Sighting, sighting: Sighting, *, is_excused: bool) -> list[str]:
    harms = []
    if sighting.error:
        harms.append("failed")
    elif not sighting.finish_reasons and not is_excused:
        harms.append("lost")
    if len(sighting.finish_reasons) > 1:
        harms.append("wrong_ends")
    if len(set(sighting.indexes)) < len(sighting.indexes):
        harms.append("duplicated")
    elif sighting.indexes != list(range(len(sighting.indexes))):
        harms.append("reordered")
    if not sighting.finish_reasons and sighting.token_ids != expected.token_ids[: len(sighting.token_ids)]:
        harms.append("different")
    if sighting.finish_reasons and (sighting.token_ids, sighting.text, sighting.finish_reasons) != (
        expected.token_ids,
        expected.text,
        expected.finish_reasons,
    ):
        harms.append("different")
    return harms


def _difference(expected: Sighting, sighting: Sighting) -> str:
    """Return where the output first differs from the expected one, for debugging."""
    for name in ("token_ids", "text", "finish_reasons"):
        expected_value, actual = getattr(expected, name), getattr(sighting, name)
        place = next(
            (i for i, pair in enumerate(zip(expected_value, actual, strict=False)) if pair[0] != pair[1]), None
        )
        if place is not None:
            return f"; {name} from {place} on: {actual[place:]!r} instead of {expected_value[place:]!r}"
        if len(actual) != len(expected_value):
            return f"; {name}: {len(actual)} instead of {len(expected_value)}"
    return ""
