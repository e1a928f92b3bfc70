"""Times that count as waiting for nothing."""

from __future__ import annotations

from penstock.ops.sim.measures import Measures, Note
from penstock.ops.sim.scenario import Tenants


def waiting_since(measures: Measures, at_s: float) -> Note:
    group = Tenants(name="one")
    note = Note("r1", group, "one", at_s, 10, 10)
    measures.note_arrival(note)
    return note


def test_one_engine_that_has_room_all_the_time_counts() -> None:
    measures = Measures()
    waiting_since(measures, 1.0)
    for at_s in (1.0, 2.0, 3.0):
        measures.record_capacity(at_s, ["e0"])
    assert measures.longest_with_room_s == 2.0


def test_engines_that_have_room_by_turns_do_not() -> None:
    measures = Measures()
    waiting_since(measures, 1.0)
    for at_s, engine_id in ((1.0, "e0"), (2.0, "e1"), (3.0, "e0")):
        measures.record_capacity(at_s, [engine_id])
    assert measures.longest_with_room_s == 0.0


def test_room_counts_from_the_arrival() -> None:
    measures = Measures()
    measures.record_capacity(1.0, ["e0"])
    waiting_since(measures, 2.5)
    measures.record_capacity(3.0, ["e0"])
    assert measures.longest_with_room_s == 0.5


def test_requeued_requests_do_not_count_as_first_waits() -> None:
    measures = Measures()
    note = waiting_since(measures, 0.0)
    measures.record_claim("r1", 1.0)
    measures.record_requeue(note, 2.0, None)
    assert measures.oldest is None
    assert list(measures.waiting) == ["r1"]
