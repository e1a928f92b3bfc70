"""Who asks: the tenants of a scenario, and what they ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from random import Random

from ...shared.broker import Entry, Queue
from ...shared.errors import PenstockError
from ...shared.policy import QueuePolicy, TenantPolicy
from .measures import Note
from .scenario import Scenario, Tenants
from .shapes import arrival_times
from .world import Process, World

RESULT_TTL_MS = 1000
ENTRIES_PER_CALL = 200


def draw_requests(scenario: Scenario, group: Tenants) -> Iterator[Note]:
    """What a group asks for, in order of arrival, by random numbers of its own: the same for the same seed."""
    random, moments = Random(f"{scenario.seed} {group.name}"), Random(f"{scenario.seed} {group.name} arrivals")
    number = 0

    def request(at_s: float) -> Note:
        nonlocal number
        number += 1
        return Note(
            request_id=f"{group.name}-{number}",
            group=group,
            tenant=group.tenant(random.randrange(group.number)),
            arrived_s=at_s,
            num_prompt=group.prompt.draw(random),
            num_output=min(group.output.draw(random), group.most_tokens),
        )

    for _ in range(group.at_start):
        yield request(0.0)
    for at_s in arrival_times(group.arrivals, moments, scenario.duration_s):
        yield request(at_s)


def draw_calls(scenario: Scenario, group: Tenants) -> Iterator[list[Note]]:
    """The same, as lists that are sent in one call each: what comes in one moment."""
    for _, notes in groupby(draw_requests(scenario, group), key=lambda note: note.arrived_s):
        together = list(notes)
        for start in range(0, len(together), ENTRIES_PER_CALL):
            yield together[start : start + ENTRIES_PER_CALL]


def make_entries(notes: Sequence[Note]) -> list[Entry]:
    """What is sent of each. Nobody reads the payload."""
    return [
        Entry(
            request_id=note.request_id,
            payload=b"simulated",
            result_ttl_ms=RESULT_TTL_MS,
            tenant=note.tenant,
            band=note.group.band,
            num_prompt_tokens=note.num_prompt,
            max_tokens=note.most_tokens,
        )
        for note in notes
    ]


async def configure(queue: Queue, scenario: Scenario) -> None:
    """Give queue and tenants the policies of the scenario."""
    if scenario.queue != QueuePolicy():
        await queue.configure(scenario.queue)
    for group in scenario.tenants:
        if group.policy != TenantPolicy():
            for index in range(group.number):
                await queue.configure_tenant(group.tenant(index), group.policy)


def begin_clients(world: World) -> None:
    """Configure the queue, and let all tenants send."""
    world.do(configure(world.queue, world.scenario))
    for group in world.scenario.tenants:
        world.env.process(_send(world, group))


def _send(world: World, group: Tenants) -> Process:
    for notes in draw_calls(world.scenario, group):
        if notes[0].arrived_s > world.env.now:
            yield world.env.timeout(notes[0].arrived_s - world.env.now)
        yield from world.redis()
        answers = world.do(world.broker.enqueue_many(make_entries(notes)))
        for note, answer in zip(notes, answers, strict=True):
            if isinstance(answer, PenstockError):
                world.measures.num_refused[note.group.name] += 1
            else:
                world.measures.note_arrival(note)
