"""Clients: the tenants of a scenario and their requests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from random import Random

from ...shared.broker import Entry, Queue
from ...shared.errors import PenstockError
from ...shared.queue.policy import QueuePolicy, TenantPolicy
from .measures import Note, Words
from .scenario import Scenario, Tenants
from .shapes import arrival_times
from .world import Partition, Process, World

RESULT_TTL_MS = 1000
ENTRIES_PER_CALL = 200


def draw_requests(scenario: Scenario, group: Tenants) -> Iterator[Note]:
    """Yield the requests of a group in order of arrival, from its own random numbers: equal for equal seeds."""
    name = f"{group.name}-{group.model}" if group.models else group.name
    random, moments = Random(f"{scenario.seed} {name}"), Random(f"{scenario.seed} {name} arrivals")
    number = 0

    def request(at_s: float) -> Note:
        nonlocal number
        number += 1
        note = Note(
            request_id=f"{name}-{number}",
            group=group,
            tenant=group.tenant(random.randrange(group.number)),
            arrived_s=at_s,
            num_prompt=group.prompt.draw(random),
            num_output=min(group.output.draw(random), group.most_tokens),
        )
        if group.turns > 1:
            note.session, note.later = note.request_id, draw_turns(group, random)
        return note

    for _ in range(group.at_start):
        yield request(0.0)
    for at_s in arrival_times(group.arrivals, moments, scenario.duration_s):
        yield request(at_s)


def draw_turns(group: Tenants, random: Random) -> list[Words]:
    """Return the turns of a session after the first."""
    return [
        Words(
            after_s=random.expovariate(1 / group.think_s) if group.think_s else 0.0,
            num_new=group.prompt.draw(random),
            num_output=min(group.output.draw(random), group.most_tokens),
        )
        for _ in range(group.turns - 1)
    ]


def next_turn(note: Note) -> Note | None:
    """Return the turn after one that has ended; None if that was the last. Its arrival is not known yet."""
    if not note.later:
        return None
    words, turn = note.later[0], note.turn + 1
    num_before = note.num_prompt + note.num_output
    return Note(
        request_id=f"{note.session}.{turn}",
        group=note.group,
        tenant=note.tenant,
        arrived_s=0.0,
        num_prompt=num_before + words.num_new,
        num_output=words.num_output,
        session=note.session,
        turn=turn,
        later=note.later[1:],
        num_findable=num_before,
    )


def draw_calls(scenario: Scenario, group: Tenants) -> Iterator[list[Note]]:
    """Yield the requests of a group in lists. Requests that arrive at the same time are sent in one call."""
    for _, notes in groupby(draw_requests(scenario, group), key=lambda note: note.arrived_s):
        together = list(notes)
        for start in range(0, len(together), ENTRIES_PER_CALL):
            yield together[start : start + ENTRIES_PER_CALL]


def make_entries(notes: Sequence[Note]) -> list[Entry]:
    """Return the entries to send. No engine reads their payload."""
    return [
        Entry(
            request_id=note.request_id,
            payload=b"simulated",
            result_ttl_ms=RESULT_TTL_MS,
            tenant=note.tenant,
            band=note.group.band,
            num_prompt_tokens=note.num_prompt,
            max_tokens=note.most_tokens,
            digests=_digests(note),
            own_digests=_digests(note),
        )
        for note in notes
    ]


def _digests(note: Note) -> tuple[str, ...]:
    """Return the digest of a request's session, as ``session_id`` makes one."""
    if not (note.session and note.group.tells_session):
        return ()
    return (hashlib.sha1(note.session.encode(), usedforsecurity=False).hexdigest(),)


async def configure(queue: Queue, scenario: Scenario) -> None:
    """Set the policies of queue and tenants."""
    if scenario.queue != QueuePolicy():
        await queue.configure(scenario.queue)
    for group in scenario.tenants:
        if group.policy != TenantPolicy():
            for index in range(group.number):
                await queue.configure_tenant(group.tenant(index), group.policy)


def begin_clients(world: World) -> None:
    """Configure the queue, and start the clients of all tenants."""
    for partition in world.partitions:
        partition.do(configure(partition.queue, world.scenario))
    for group in world.scenario.tenants:
        world.env.process(_send_requests(world, group))


def schedule_next_turn(world: World, note: Note) -> None:
    """Schedule the next turn of the session of a finished request."""
    following = next_turn(note)
    if following is not None:
        world.env.process(_send_turn(world, following, note.later[0].after_s))


def _send_turn(world: World, note: Note, after_s: float) -> Process:
    yield world.env.timeout(after_s)
    note.arrived_s = world.env.now
    yield from _enqueue_entries(world, world.place(note), [note])


def _send_requests(world: World, group: Tenants) -> Process:
    for notes in draw_calls(world.scenario, group):
        if notes[0].arrived_s > world.env.now:
            yield world.env.timeout(notes[0].arrived_s - world.env.now)
        parts: dict[Partition, list[Note]] = {}
        for note in notes:
            parts.setdefault(world.place(note), []).append(note)
        for partition, own in parts.items():
            # An unreachable Redis must not delay requests to others.
            world.env.process(_enqueue_entries(world, partition, own))


def _enqueue_entries(world: World, partition: Partition, notes: list[Note]) -> Process:
    yield from partition.redis()
    answers = partition.do(partition.broker.enqueue_many(make_entries(notes)))
    for note, answer in zip(notes, answers, strict=True):
        if isinstance(answer, PenstockError):
            world.measures.num_refused[note.group.name] += 1
        else:
            world.measures.note_arrival(note)
            if world.on_accepted is not None:
                world.on_accepted(partition, note)
