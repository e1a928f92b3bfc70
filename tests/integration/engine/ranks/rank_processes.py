"""Cores of a data-parallel group in processes of their own, and what their worker processes do for them: say on that a
wave has begun."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.ops.lab.clusters.redis_processes import free_port
from penstock.shared.control.calls import Utility
from penstock.shared.messages.core import (
    EngineCoreOutputs,
    Ready,
    StartWave,
    UtilityCall,
    UtilityOutput,
    WavePhase,
    WaveState,
)
from penstock.worker.config.data_parallel import RankPlace
from penstock.worker.config.engine_config import EngineConfig

from ....processes import DEADLINE_S
from ..harness import CoreProcess


class RankProcess:
    """A core whose output a thread of its own reads."""

    def __init__(self, on_wave: Callable[[RankProcess, WaveState], None]) -> None:
        self.core = CoreProcess()
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.errors: list[str] = []
        self.waves: list[WaveState] = []
        self.num_steps = 0
        self.answers: dict[int, UtilityOutput] = {}
        self.started: Any = None
        self.last_words = ""
        self.changed = threading.Condition()
        self._on_wave = on_wave
        self._reading: threading.Thread | None = None

    @property
    def status(self) -> int | None:
        """Return its exit status; None while it runs."""
        return self.core.process.returncode

    def start(self, config: EngineConfig) -> None:
        self._reading = threading.Thread(target=self._read, args=(config,), daemon=True)
        self._reading.start()

    def until(self, condition: Callable[[], object], what: str) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, DEADLINE_S), f"{what}: {self.waves[-3:]} {self.last_words[-2000:]}"

    def ask(self, call: Utility, call_id: int) -> None:
        self.core.send(UtilityCall(call_id, call))

    def answer(self, call_id: int) -> UtilityOutput:
        self.until(lambda: call_id in self.answers, "no answer")
        return self.answers[call_id]

    def close(self) -> None:
        self.core.process.kill()
        if self._reading is not None:
            self._reading.join(DEADLINE_S)

    def _read(self, config: EngineConfig) -> None:
        try:
            self._note("started", self.core.start(config.encode()))
            while True:
                self._take(self.core.receive())
        except EOFError as error:
            self._note("last_words", str(error))
        except OSError as error:  # what it was sent last is not read any more
            self._note("last_words", f"{error!r} {self.core.close()}")

    def _note(self, name: str, value: object) -> None:
        with self.changed:
            setattr(self, name, value)
            self.changed.notify_all()

    def _take(self, message: Any) -> None:
        with self.changed:
            if isinstance(message, UtilityOutput):
                self.answers[message.call_id] = message
            else:
                self._take_outputs(message)
            self.changed.notify_all()
        if isinstance(message, EngineCoreOutputs) and self.waves:
            self._on_wave(self, self.waves[-1])

    def _take_outputs(self, message: EngineCoreOutputs) -> None:
        for output in message.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.error is not None:
                self.errors.append(output.error.message)
            if output.finished:
                self.ended.add(output.request_id)
        stats = message.scheduler_stats
        if stats is not None and stats.wave is not None and self.waves[-1:] != [stats.wave]:
            self.waves.append(stats.wave)


class RankGroup:
    """Ranks of one generation, which hear of each other's waves.

    Args:
        timeout_s: how long a collective waits.
    """

    def __init__(self, config: EngineConfig, size: int, *, timeout_s: float = 60.0) -> None:
        self.ranks = [RankProcess(self._say_on) for _ in range(size)]
        self.address = f"127.0.0.1:{free_port()}"
        for number, rank in enumerate(self.ranks):
            place = RankPlace(generation=1, rank=number, size=size, address=self.address, timeout_s=timeout_s)
            rank.start(msgspec.structs.replace(config, data_parallel_size=size, place=place))

    def await_ready(self) -> list[Ready]:
        for rank in self.ranks:
            rank.until(lambda rank=rank: rank.started is not None or rank.last_words, "not started")
            assert isinstance(rank.started, Ready), (rank.started, rank.last_words)
        return [rank.started for rank in self.ranks]

    def await_idle(self) -> int:
        """Wait until the ranks are between two waves; returns the number of the next one."""
        for rank in self.ranks:
            rank.until(lambda rank=rank: rank.waves[-1].phase is WavePhase.IDLE, "no idling")
        numbers = {rank.waves[-1].wave for rank in self.ranks}
        assert len(numbers) == 1
        return numbers.pop()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def _say_on(self, said: RankProcess, wave: WaveState) -> None:
        if wave.phase is WavePhase.STARTING:
            for rank in self.ranks:
                if rank is not said and not rank.last_words:
                    rank.core.send(StartWave(wave.wave))
