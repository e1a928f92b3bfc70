"""The engines of a simulation: their starts, deaths and autoscaling."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from ...shared.broker import REAP_INTERVAL_S
from ...shared.deployment.records import DeathCause
from ..metrics.wanted import wanted_for_waiting
from .clients import schedule_next_turn
from .engine import Engine
from .measures import Loss, Note
from .scenario import Autoscaling, DeathKind, Deaths, Engines
from .world import Partition, Process, World

# As by default of `worker start --max-deliveries`.
MAX_DELIVERIES = 3
CAUSE = DeathCause(engine_id="", reason="the scenario let it die")


class Fleet:
    """Engines by id. Ids are not reused: a restarted engine gets another one."""

    def __init__(self, world: World) -> None:
        self.engines: dict[str, Engine] = {}
        self.num_wanted = 0
        self.world = world
        self._env = world.env
        self._random = Random(f"{world.scenario.seed} deaths")
        self._num_made = 0
        self._num_starting = 0

    def begin(self) -> None:
        """Start the engines of this model alone, deaths and autoscaling."""
        for partition in self.world.partitions:
            partition.listen(partition.keys.wake, self._wake_all)
            self._env.process(self._reap_forever(partition))
        scenario = self.world.scenario
        for kind in scenario.engines:
            for _ in range(0 if kind.models else kind.number):
                self._env.process(self._start_engine(kind, self._spread_s()))
        # Engines of several models die with their devices.
        for deaths in scenario.deaths if not any(kind.models for kind in scenario.engines) else ():
            self._env.process(self._let_die(deaths))
        if scenario.autoscaling:
            self._env.process(self._scale_forever(scenario.autoscaling))

    @property
    def serving(self) -> list[Engine]:
        """Return the engines that claim."""
        return [engine for engine in self.engines.values() if engine.is_claiming]

    def _spread_s(self) -> float:
        """Return a random delay, since engines of a deployment do not all start at the same time."""
        return self._random.random()

    def _start_engine(self, kind: Engines, after_s: float) -> Process:
        yield self._env.timeout(after_s)
        # A worker acquires the lease before it claims. While its Redis is unreachable, that waits.
        if self.world.is_away:
            yield from self.world.partitions[0].redis()
        self.add_engine(kind)

    def add_engine(self, kind: Engines, on_idle: Callable[[], None] | None = None) -> Engine:
        """Start an engine now. It calls ``on_idle`` after the last of its requests has ended."""
        engine_id = f"engine{self._num_made:05}"
        self._num_made += 1
        for partition in self.world.partitions:
            if not partition.is_away:
                partition.do(partition.broker.renew(engine_id, []))

        def report_end(note: Note) -> None:
            schedule_next_turn(self.world, note)
            if on_idle is not None and not engine.running:
                on_idle()

        engine = Engine(self.world, engine_id, kind, self._report_left, report_end)
        self.engines[engine_id] = engine
        engine.claims.listen()
        return engine

    def kill(self, engine: Engine, loss: Loss) -> None:
        """Let an engine die."""
        engine.die(loss)
        self._forget(engine)

    def _wake_all(self) -> None:
        for engine in self.engines.values():
            engine.claims.wake()

    def _report_left(self, engine: Engine) -> None:
        """Let the supervisor of a drained engine report to Redis that it has left."""
        self._forget(engine)
        for partition in self.world.partitions:
            self._env.process(self._reclaim(engine, partition))

    def _forget(self, engine: Engine) -> None:
        del self.engines[engine.engine_id]
        engine.claims.leave()

    def _reclaim(self, engine: Engine, partition: Partition) -> Process:
        yield from partition.redis()
        broker = partition.broker
        partition.do(broker.reclaim(engine.engine_id, CAUSE, is_external=True, max_deliveries=MAX_DELIVERIES))

    def _reap_forever(self, partition: Partition) -> Process:
        while True:
            yield from partition.redis()
            partition.do(partition.broker.reap(CAUSE, max_deliveries=MAX_DELIVERIES))
            yield self._env.timeout(REAP_INTERVAL_S)

    def _let_die(self, deaths: Deaths) -> Process:
        yield self._env.timeout(deaths.at_s)
        living = list(self.engines.values())
        number = deaths.number or round(deaths.share * len(living))
        dying = self._random.sample(living, min(number, len(living)))
        loss = Loss(self._env.now, len(dying))
        self.world.measures.losses.append(loss)
        for engine in dying:
            self.kill(engine, loss)
            if deaths.kind is DeathKind.PROCESS:
                for partition in self.world.partitions:
                    self._env.process(self._reclaim(engine, partition))
            if deaths.back_after_s is not None:
                self._env.process(self._start_engine(engine.kind, deaths.back_after_s + self._spread_s()))

    def _scale_forever(self, rule: Autoscaling) -> Process:
        kind, enough_since = self.world.scenario.engines[0], math.inf
        while True:
            yield self._env.timeout(rule.look_every_s)
            for partition in self.world.partitions:
                yield from partition.redis()
            stats = [partition.do(partition.queue.stats()) for partition in self.world.partitions]
            serving = self.serving
            num_seqs = sum(engine.kind.max_num_seqs for engine in serving)
            self.num_wanted = wanted_engines(
                rule,
                num_engines=len(serving),
                busy=sum(len(engine.running) for engine in serving) / max(1, num_seqs),
                waiting_tokens=sum(one.num_tokens for one in stats),
                tokens_per_s=sum(one.full_tokens_per_s for one in stats),
            )
            surplus = len(serving) + self._num_starting - self.num_wanted
            for _ in range(-surplus):
                self._num_starting += 1
                self._env.process(self._start_one_more(kind, rule.start_s))
            enough_since = min(enough_since, self._env.now) if surplus > 0 else math.inf
            if self._env.now - enough_since >= rule.down_after_s and serving:
                min(serving, key=lambda engine: (len(engine.running), engine.engine_id)).drain()
                enough_since = self._env.now

    def _start_one_more(self, kind: Engines, after_s: float) -> Process:
        yield from self._start_engine(kind, after_s)
        self._num_starting -= 1


def wanted_engines(
    rule: Autoscaling, *, num_engines: int, busy: float, waiting_tokens: float, tokens_per_s: float
) -> int:
    """Return the engines that running requests fill, plus those that serve waiting ones within ``wanted_wait_s``.

    Args:
        num_engines: engines that serve now.
        busy: used share of their sequences, in [0, 1].
        waiting_tokens: tokens of waiting requests, prompts and maximum outputs.
        tokens_per_s: such tokens that all engines serve per second when they are full; 0 if unknown.
    """
    of_one = tokens_per_s / max(1, num_engines)
    load = busy * num_engines + wanted_for_waiting(waiting_tokens, of_one, rule.wanted_wait_s)
    return min(rule.most, max(rule.least, math.ceil(load - 1e-9)))
