"""The engines of a simulation: their beginning, their deaths, and how many there should be."""

from __future__ import annotations

import math
from random import Random

from ...shared.broker import REAP_INTERVAL_S
from ...shared.records import DeathCause
from .autoscaling import wanted_engines
from .engine import Engine
from .measures import Loss
from .scenario import Autoscaling, DeathKind, Deaths, Engines
from .world import Process, World

# As by default of `worker start --max-deliveries`.
MAX_DELIVERIES = 3
CAUSE = DeathCause(engine_id="", reason="the scenario let it die")


class Fleet:
    """Engines by their ids, which are given once: an engine that comes back has another one."""

    def __init__(self, world: World) -> None:
        self.engines: dict[str, Engine] = {}
        self.num_wanted = 0
        self._world = world
        self._env = world.env
        self._random = Random(f"{world.scenario.seed} deaths")
        self._num_made = 0
        self._num_starting = 0

    def begin(self) -> None:
        """Start the engines and all that happens to them."""
        self._world.listen(self._world.keys.wake, self._wake_all)
        scenario = self._world.scenario
        for kind in scenario.engines:
            for _ in range(kind.number):
                self._env.process(self._start(kind, self._spread_s()))
        self._env.process(self._reap_forever())
        for deaths in scenario.deaths:
            self._env.process(self._let_die(deaths))
        if scenario.autoscaling:
            self._env.process(self._scale_forever(scenario.autoscaling))

    @property
    def serving(self) -> list[Engine]:
        """Those that claim."""
        return [engine for engine in self.engines.values() if engine.is_claiming]

    def _spread_s(self) -> float:
        """Engines of a deployment did not all begin in the same moment."""
        return self._random.random()

    def _start(self, kind: Engines, after_s: float) -> Process:
        yield self._env.timeout(after_s)
        engine_id = f"engine{self._num_made:05}"
        self._num_made += 1
        # Its worker holds the lease before it claims.
        yield from self._world.redis()
        self._world.do(self._world.broker.renew(engine_id, []))
        engine = Engine(self._world, engine_id, kind, self._note_left)
        self.engines[engine_id] = engine
        self._world.listen(self._world.keys.engine_wake(engine_id), engine.wake)

    def _wake_all(self) -> None:
        for engine in self.engines.values():
            engine.wake()

    def _note_left(self, engine: Engine) -> None:
        """One that was drained has ended its last request; its supervisor tells Redis that it is gone."""
        self._forget(engine)
        self._reclaim(engine)

    def _forget(self, engine: Engine) -> None:
        del self.engines[engine.engine_id]
        self._world.listen(self._world.keys.engine_wake(engine.engine_id), None)

    def _reclaim(self, engine: Engine) -> None:
        broker = self._world.broker
        self._world.do(broker.reclaim(engine.engine_id, CAUSE, is_external=True, max_deliveries=MAX_DELIVERIES))

    def _reclaim_soon(self, engine: Engine) -> Process:
        yield from self._world.redis()
        self._reclaim(engine)

    def _reap_forever(self) -> Process:
        while True:
            yield from self._world.redis()
            self._world.do(self._world.broker.reap(CAUSE, max_deliveries=MAX_DELIVERIES))
            yield self._env.timeout(REAP_INTERVAL_S)

    def _let_die(self, deaths: Deaths) -> Process:
        yield self._env.timeout(deaths.at_s)
        living = list(self.engines.values())
        number = deaths.number or round(deaths.share * len(living))
        dying = self._random.sample(living, min(number, len(living)))
        loss = Loss(self._env.now, len(dying))
        self._world.measures.losses.append(loss)
        for engine in dying:
            engine.die(loss)
            self._forget(engine)
            if deaths.kind is DeathKind.PROCESS:
                self._env.process(self._reclaim_soon(engine))
            if deaths.back_after_s is not None:
                self._env.process(self._start(engine.kind, deaths.back_after_s + self._spread_s()))

    def _scale_forever(self, rule: Autoscaling) -> Process:
        kind, enough_since = self._world.scenario.engines[0], math.inf
        while True:
            yield self._env.timeout(rule.look_every_s)
            yield from self._world.redis()
            stats = self._world.do(self._world.queue.stats())
            serving = self.serving
            num_seqs = sum(engine.kind.max_num_seqs for engine in serving)
            self.num_wanted = wanted_engines(
                rule,
                num_engines=len(serving),
                busy=sum(len(engine.running) for engine in serving) / max(1, num_seqs),
                waiting_tokens=stats.num_tokens,
                tokens_per_s=stats.tokens_per_s,
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
        yield from self._start(kind, after_s)
        self._num_starting -= 1
