"""Who asks: the tenants of a scenario, and what they ask for."""

from __future__ import annotations

from random import Random

from ...shared.broker import Entry
from ...shared.errors import PenstockError
from ...shared.policy import QueuePolicy, TenantPolicy
from .measures import Note
from .scenario import Tenants
from .shapes import arrival_times
from .world import Process, World

RESULT_TTL_MS = 1000
ENTRIES_PER_CALL = 200


class Clients:
    """Sends the requests of all tenants. Each group draws by random numbers of its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._num_sent = 0

    def begin(self) -> None:
        """Configure the queue as the scenario has it, and start to send."""
        world, scenario = self._world, self._world.scenario
        if scenario.queue != QueuePolicy():
            world.do(world.queue.configure(scenario.queue))
        for group in scenario.tenants:
            if group.policy != TenantPolicy():
                for index in range(group.number):
                    world.do(world.queue.configure_tenant(group.tenant(index), group.policy))
            world.env.process(self._send(group))

    def _send(self, group: Tenants) -> Process:
        env, seed = self._world.env, self._world.scenario.seed
        random, moments = Random(f"{seed} {group.name}"), Random(f"{seed} {group.name} arrivals")
        for start in range(0, group.at_start, ENTRIES_PER_CALL):
            number = min(ENTRIES_PER_CALL, group.at_start - start)
            self._enqueue([self._request(group, random) for _ in range(number)])
        for at_s in arrival_times(group.arrivals, moments, self._world.scenario.duration_s):
            yield env.timeout(at_s - env.now)
            self._enqueue([self._request(group, random)])

    def _request(self, group: Tenants, random: Random) -> Note:
        self._num_sent += 1
        return Note(
            request_id=f"r{self._num_sent}",
            group=group,
            tenant=group.tenant(random.randrange(group.number)),
            arrived_s=self._world.env.now,
            num_prompt=group.prompt.draw(random),
            num_output=min(group.output.draw(random), group.most_tokens),
        )

    def _enqueue(self, notes: list[Note]) -> None:
        entries = [
            Entry(
                request_id=note.request_id,
                payload=b"simulated",
                result_ttl_ms=RESULT_TTL_MS,
                tenant=note.tenant,
                band=note.group.band,
                num_prompt_tokens=note.num_prompt,
                max_tokens=note.group.most_tokens,
            )
            for note in notes
        ]
        answers = self._world.do(self._world.broker.enqueue_many(entries))
        for note, answer in zip(notes, answers, strict=True):
            if isinstance(answer, PenstockError):
                self._world.measures.num_refused[note.group.name] += 1
            else:
                self._world.measures.note_arrival(note)
