"""A scenario in real time, to compare with the simulator: coroutines instead of SimPy processes.

They share only the scenario, the drawn requests and the speed of engines with the simulator. The scripts are unchanged,
the clock is the server's, wakes arrive by subscription, and calls wait for their replies. Engines sleep for the
duration of a step.
"""

from __future__ import annotations

import asyncio
import itertools
import time

from ....shared.broker import REAP_INTERVAL_S, Broker, Claim, Queue, Wave
from ....shared.connection import CommandConnection, Subscriber
from ....shared.errors import ConfigurationError, PenstockError
from ....shared.keys import Keys
from ....shared.process.waiting import wait_at_most
from ..clients import configure, draw_calls, make_entries
from ..engine import RENEW_EVERY_S
from ..fleet import CAUSE, MAX_DELIVERIES
from ..measures import WINDOW_S, Measures
from ..running import Running, capacity_of, next_prompt_tokens, step_work
from ..scenario import MODEL, Engines, Scenario, Tenants

# Engines start before clients, within the first second as in the simulator.
START_S = 1.0


def run_in_real_time(url: str, scenario: Scenario) -> Measures:
    """Run a scenario for its duration, on an empty Redis.

    Raises:
        ConfigurationError: as ``check_comparable``.
    """
    check_comparable(scenario)
    return asyncio.run(_run_scenario(url, scenario))


def check_comparable(scenario: Scenario) -> None:
    """Check that a scenario can be compared; raise ``ConfigurationError`` if not."""
    extras = (scenario.deaths, scenario.autoscaling, scenario.shards, scenario.partitions)
    has_sessions = any(group.turns > 1 for group in scenario.tenants)
    if any(extras) or has_sessions or scenario.models != [MODEL]:
        raise ConfigurationError(
            "only a scenario of one model, without deaths, autoscaling, shards, partitions and sessions, can be "
            "compared; leave them out"
        )


class _Engine:
    """An engine; ``fleet`` has all engines."""

    def __init__(
        self,
        engine_id: str,
        kind: Engines,
        broker: Broker,
        measures: Measures,
        started_s: float,
        fleet: list[_Engine],
    ) -> None:
        self.engine_id = engine_id
        self._fleet = fleet
        self.kind = kind
        self.running: dict[str, Running] = {}
        self._broker = broker
        self._measures = measures
        self._started_s = started_s
        self._wake = asyncio.Event()
        self._arrival = asyncio.Event()
        self._appended_s = 0.0

    def wake(self, _: object = None) -> None:
        self._wake.set()

    def now_s(self) -> float:
        return time.monotonic() - self._started_s

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for part in (self._claim_forever(), self._compute_forever(), self._renew_forever()):
                group.create_task(part)

    async def _claim_forever(self) -> None:
        while True:
            self._wake.clear()
            wave = await self._claim()
            for claim in wave.claims:
                self._admit(claim)
            await wait_at_most(wave.wait_s, self._wake.wait())

    async def _claim(self) -> Wave:
        if len(self.running) >= self.kind.max_num_seqs:
            return Wave([])
        wave = await self._broker.claim(self.engine_id, capacity_of(self.kind, self.running.values()))
        self._measures.num_claims["real"] += 1
        self._measures.num_wasted["real"] += not wave.claims
        return wave

    def _admit(self, claim: Claim) -> None:
        note = self._measures.record_claim(claim.request_id, self.now_s())
        self.running[claim.request_id] = Running(note, claim.epoch, note.num_prompt, 0, 0, claim.num_kv_tokens, -1)
        self._arrival.set()

    async def _compute_forever(self) -> None:
        step_ends_s = self.now_s()
        while True:
            if not self.running:
                self._arrival.clear()
                await self._arrival.wait()
                self._appended_s = step_ends_s = self.now_s()
            decoding = [one for one in self.running.values() if one.is_decoding]
            reading = next_prompt_tokens(self.kind, self.running.values())
            # From the scheduled end of the last step, so that a late wake-up of this process does not slow the engine.
            step_ends_s += self.kind.step_s(
                step_work(reading, decoding), sum(bool(engine.running) for engine in self._fleet)
            )
            await asyncio.sleep(max(0.0, step_ends_s - self.now_s()))
            await self._settle(decoding, reading)

    async def _settle(self, decoding: list[Running], reading: list[tuple[Running, int]]) -> None:
        for one, num_tokens in reading:
            one.num_left -= num_tokens
            self._measures.record_tokens(one.note, num_tokens)
            if not one.num_left:
                self._measures.record_output(one.note, self.now_s())
        for one in [*decoding, *(one for one, _ in reading if not one.num_left)]:
            one.num_made += 1
            self._measures.record_tokens(one.note, 1)
        ended = [one for one in self.running.values() if one.num_made >= one.note.num_output]
        finals = [one.final_record() for one in ended]
        for one in ended:
            del self.running[one.note.request_id]
        if finals:
            self._measures.num_stale += len(await self._broker.finish(finals))
            for one in ended:
                one.note.ended_s = self.now_s()
            self.wake()
        if self.now_s() - self._appended_s >= self.kind.append_every_s:
            await self._append()

    async def _append(self) -> None:
        self._appended_s = self.now_s()
        unlogged = [one for one in self.running.values() if one.num_made > one.num_logged]
        if unlogged:
            records = [one.record() for one in unlogged]
            for one in unlogged:
                one.num_logged = one.num_made
            self._measures.num_stale += len(await self._broker.append(records))

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            claims = [(one.note.request_id, one.epoch) for one in self.running.values()]
            await self._broker.renew(self.engine_id, claims)


async def _run_scenario(url: str, scenario: Scenario) -> Measures:
    connection, subscriber = CommandConnection(url), Subscriber(url)
    await subscriber.open()
    keys = Keys("sim").model(MODEL)
    broker, measures = Broker(connection, keys), Measures()
    await configure(Queue(connection, keys), scenario)
    started_s = time.monotonic() + START_S
    kinds = [kind for kind in scenario.engines for _ in range(kind.number)]
    engines: list[_Engine] = []
    for number, kind in enumerate(kinds):
        engines.append(_Engine(f"engine{number:05}", kind, broker, measures, started_s, engines))
    for engine in engines:
        await subscriber.subscribe(keys.engine_wake(engine.engine_id), engine.wake)
    tasks = [asyncio.create_task(engine.run()) for engine in engines]
    tasks.append(asyncio.create_task(_reap_forever(broker)))
    tasks.append(asyncio.create_task(_weigh_forever(measures, started_s)))
    tasks += [
        asyncio.create_task(_send_requests(broker, measures, scenario, group, started_s)) for group in scenario.tenants
    ]
    # No engine ends before it is stopped, except by an error.
    await asyncio.wait(
        tasks[: len(engines) + 2], timeout=START_S + scenario.duration_s, return_when=asyncio.FIRST_EXCEPTION
    )
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await subscriber.close()
    await connection.close()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return measures


async def _weigh_forever(measures: Measures, started_s: float) -> None:
    for number in itertools.count(1):
        await asyncio.sleep(max(0.0, started_s + number * WINDOW_S - time.monotonic()))
        measures.record_window(number * WINDOW_S)


async def _reap_forever(broker: Broker) -> None:
    while True:
        await broker.reap(CAUSE, max_deliveries=MAX_DELIVERIES)
        await asyncio.sleep(REAP_INTERVAL_S)


async def _send_requests(
    broker: Broker, measures: Measures, scenario: Scenario, group: Tenants, started_s: float
) -> None:
    for notes in draw_calls(scenario, group):
        await asyncio.sleep(max(0.0, notes[0].arrived_s + started_s - time.monotonic()))
        for note in notes:  # before the call, because an engine may claim it before the reply arrives
            note.arrived_s = max(note.arrived_s, time.monotonic() - started_s)
            measures.note_arrival(note)
        for answer in await broker.enqueue_many(make_entries(notes)):
            if isinstance(answer, PenstockError):
                raise answer
