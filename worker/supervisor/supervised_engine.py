"""One engine through all its lives: started, watched, buried and started again."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from ...shared.deployment.records import EngineHeartbeat
from ...shared.messages.worker_status import EngineState
from ..config.worker_config import WorkerConfig
from .engine_process import EngineProcess
from .reaper import Reaper
from .restart import Death, Phase, RestartPolicy

# While leaving: what cannot be taken back in this time falls to the reapers of other hosts when the lease ends.
LAST_RECLAIM_TIMEOUT_S = 2.0

log = structlog.get_logger()


class Engine:
    """An engine of this host, the same ``engine_id`` in every life.

    Args:
        config: of its worker process.
        reaper: takes back what it held when it died.
        on_change: called when its phase or its process has changed.

    Attributes:
        policy: its phase.
        life: its present or last worker process.
        death: how its last life ended; None while the first one lasts.
        is_restarted: whether it is started again when it dies; False until all engines of the host serve. A rank of a
            group is once it has served, or lost its group: others may stand by for as long as they like.
    """

    def __init__(self, config: WorkerConfig, reaper: Reaper, on_change: Callable[[], None]) -> None:
        self.engine_id = config.engine_id
        self.policy = RestartPolicy()
        self.life = EngineProcess(config, self._on_life_change)
        self.death: Death | None = None
        self.is_restarted = False
        self._config = config
        self._reaper = reaper
        self._on_change = on_change
        self._leaving = asyncio.Event()
        self._died_at = 0.0
        self._restart_at = 0.0

    async def run(self) -> None:
        """Live, and live again, until told to leave, given up, or dead before it is to be restarted."""
        try:
            while True:
                await self._live()
                if self._is_rank and self.death is not None and self.death.is_external:
                    self.is_restarted = True
                is_last = self._leaving.is_set() or not self.is_restarted
                if not is_last:
                    self._mourn()
                # First of all, so that others go on with its requests while its processes still end.
                await self._reclaim()
                await self.life.gone()
                is_last = is_last or self.policy.phase is Phase.GIVEN_UP
                if is_last or await self._told_to_leave_within(self.policy.restart_in_s):
                    break
                self.policy.restarting()
            self.policy.leave()
        finally:
            self.life.kill()
            self._on_change()

    def leave(self, how: Callable[[EngineProcess], None]) -> None:
        """Do not start it again, and make its worker process go, if there is one, in the way given."""
        self._leaving.set()
        if self.life.alive:
            how(self.life)

    @property
    def has_failed_to_start(self) -> bool:
        """Whether it has ended, or says that it will, and is not started again."""
        return bool(self.death or self.life.failure) and not self.is_restarted

    @property
    def ought_to_speak(self) -> bool:
        """Whether its worker process is to be watched for silence.

        Its event loop speaks while the core loads, however long that takes.
        """
        expected = self.policy.phase in (Phase.STARTING, Phase.SERVING, Phase.RESTARTING)
        return expected and self.life.alive and not self._leaving.is_set()

    def notice(self) -> EngineHeartbeat | None:
        """Return the heartbeat to write in its worker's stead; None if its worker speaks for itself, or it has left."""
        is_silent = self.policy.phase is Phase.RESTARTING and not self.life.has_spoken
        if self.death is None or not (is_silent or self.policy.phase in (Phase.DOWN, Phase.GIVEN_UP)):
            return None
        notice = self._bare_beat(EngineState.DEAD)
        notice.error, notice.restart_at = self.describe_death(), self._restart_at
        return notice

    def beat(self) -> EngineHeartbeat:
        """Return what is known of it now, by what its worker process said last, whether Redis hears of it or not."""
        notice = self.notice()
        if notice is not None:
            return notice
        if not self.life.heartbeat:
            return self._bare_beat(self.life.state)
        return msgspec.json.decode(self.life.heartbeat, type=EngineHeartbeat)

    def beat_if_there(self) -> EngineHeartbeat | None:
        """``beat``; None once it has left, while others stay."""
        return None if self.policy.phase is Phase.LEFT else self.beat()

    @property
    def _is_rank(self) -> bool:
        return self._config.engine.is_grouped

    def _bare_beat(self, state: EngineState) -> EngineHeartbeat:
        config = self._config
        return EngineHeartbeat(
            worker_id=config.worker_id,
            engine_id=config.engine_id,
            engine_name=config.engine_name,
            model=config.engine.model_name,
            state=state,
            host=socket.gethostname(),
            worker_pid=0,
            core_pid=0,
            supervisor_pid=config.supervisor_pid,
            device=config.device_name,
            num_restarts=self.policy.num_restarts,
        )

    def describe_death(self) -> str:
        """Say what it died of last, and whether for good."""
        reason = self.death.reason if self.death is not None else "it has not died"
        if self.policy.phase is Phase.GIVEN_UP:
            return f"given up after {self.policy.num_barren_deaths} deaths in a row without a token: {reason}"
        return reason

    async def _live(self) -> None:
        """Run one worker process to its end, on the weights that the one before had in the end."""
        folder, version = self.life.weights
        if folder:
            engine = msgspec.structs.replace(
                self._config.engine, model=folder, served_model_name=self._config.engine.model_name
            )
            self._config = msgspec.structs.replace(self._config, engine=engine, weights_version=version)
        config = msgspec.structs.replace(self._config, num_restarts=self.policy.num_restarts)
        self.life = EngineProcess(config, self._on_life_change)
        try:
            await self.life.start()
        except OSError as error:
            # The host's trouble, out of processes or memory: it may pass.
            self.death = Death(f"the worker process could not be started: {error}", is_external=True)
        else:
            if self._leaving.is_set():
                self.life.drain()  # who told the others to leave could not tell this one yet
            await self.life.ended.wait()
            self.death = self.life.death()
        self._died_at = asyncio.get_running_loop().time()

    def _mourn(self) -> None:
        assert self.death is not None
        self.policy.died(self.death)
        delay_s = self.policy.restart_in_s
        self._restart_at = time.time() + delay_s
        told: dict[str, Any] = {
            "engine_id": self.engine_id,
            "cause": self.death.reason,
            "is_external": self.death.is_external,
            "num_restarts": self.policy.num_restarts,
        }
        if self.death.trace:
            told["trace"] = self.death.trace
        if self.policy.phase is Phase.GIVEN_UP:
            self._restart_at = 0.0
            log.error("engine_given_up", **told, num_deaths=self.policy.num_barren_deaths)
        else:
            log.error("engine_lost", **told, restart_in_s=round(delay_s, 1))
        self._on_change()

    async def _reclaim(self) -> None:
        """Take back what it held, and its lease; with little patience once it is told to leave.

        Done after every life, though one that left in order holds nothing: the broker finds that out best.
        """
        assert self.death is not None
        hands_back = self._leaving.is_set() and self.life.was_put_down
        reclaiming = asyncio.create_task(self._reaper.reclaim(self.engine_id, self.death, hands_back=hands_back))
        leaving = asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait([reclaiming, leaving], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([reclaiming], timeout=LAST_RECLAIM_TIMEOUT_S)
        finally:
            leaving.cancel()
            if not reclaiming.done():
                log.warning("requests_not_taken_back", engine_id=self.engine_id)
            reclaiming.cancel()

    async def _told_to_leave_within(self, delay_s: float) -> bool:
        try:
            async with asyncio.timeout(delay_s):
                await self._leaving.wait()
        except TimeoutError:
            pass
        return self._leaving.is_set()

    def _on_life_change(self, life: EngineProcess) -> None:
        serves = life.state in (EngineState.READY, EngineState.BUSY)
        if serves and self.policy.phase in (Phase.STARTING, Phase.RESTARTING):
            self.policy.ready()
            self.is_restarted = self.is_restarted or self._is_rank
            if self.death is not None:
                log.info(
                    "engine_restarted",
                    engine_id=self.engine_id,
                    num_restarts=self.policy.num_restarts,
                    took_s=round(asyncio.get_running_loop().time() - self._died_at, 2),
                )
        self._on_change()
