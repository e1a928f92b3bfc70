"""Replace the weights of a serving engine: this module handles the requests, the core handles the weights."""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from ....shared.control.model import ReloadWeights, WeightsReloaded
from ....shared.errors import BrokerError
from ....shared.messages.core import Ready
from ..core.client import CoreClient
from ..core.stall import until_hung
from ..reporting.heartbeat import Heartbeat
from .sleep import SleepControl

log = structlog.get_logger(__name__)


class WeightsReloading:
    """Handler of ``ReloadWeights``, one call at a time. Its collaborators are shared with the ``WorkerService``.

    Args:
        ready: its ``weights_version`` is updated; each new generation reports it.
        load_timeout_s: how long the core may make no progress while it reads.
    """

    def __init__(
        self,
        core: CoreClient,
        sleep: SleepControl,
        heartbeat: Heartbeat,
        ready: Ready,
        load_timeout_s: float,
    ) -> None:
        self._core = core
        self._sleep = sleep
        self._heartbeat = heartbeat
        self._ready = ready
        self._load_timeout_s = load_timeout_s

    async def reload(self, call: ReloadWeights) -> WeightsReloaded:
        """Have the core check the folder; then pause claiming, clear the core of requests, and replace its weights.

        After a failure the engine continues with its previous weights, or its core ends.
        """
        checked = await self._ask(msgspec.structs.replace(call, only_check=True))
        if call.only_check:
            return checked
        try:
            await self._sleep.clear(call.mode, call.drain_timeout_s, may_hand_back=False)
            answer = await self._ask(call)
            self._ready.weights_version = answer.version
            self._heartbeat.weights_folder, self._heartbeat.weights_version = answer.path, answer.version
            # Before any client is informed: if the engine dies now, its next process loads the new weights.
            self._heartbeat.report()
            await self._heartbeat.set_model_version(answer.version)
        finally:
            await self._sleep.resume()
        return answer

    async def _ask(self, call: ReloadWeights) -> WeightsReloaded:
        former = self._ready.weights_version
        watching = asyncio.create_task(self._watch_loading())
        try:
            answer = await self._core.call(call)
        finally:
            watching.cancel()
        if not isinstance(answer, WeightsReloaded):
            raise BrokerError(f"the engine core answered {type(call).__name__} with {type(answer).__name__}")
        # The core knows only the digest; the weights may have been started under another name.
        return msgspec.structs.replace(answer, former_version=former)

    async def _watch_loading(self) -> None:
        """Kill a core that hangs while it reads the folder; its next process loads the previous weights."""
        finding = await until_hung(self._core, self._load_timeout_s)
        log.error("load_timed_out", finding=finding, core_pid=self._core.pid)
        self._core.kill(finding)
