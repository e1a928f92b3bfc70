"""Other weights for an engine that serves: what becomes of requests is decided here, of the weights in the core."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from ....shared.control.weights import ReloadWeights, WeightsReloaded
from ....shared.errors import BrokerError
from ....shared.messages.from_core import Ready
from ..calls.sleep import SleepControl
from ..core.client import CoreClient
from ..telling.heartbeat import Heartbeat
from .activity import until_hung

log = structlog.get_logger(__name__)


class WeightsReloading:
    """Its parts are shared with the ``WorkerService``. One control call at a time.

    Args:
        ready: whose ``weights_version`` each generation is told that begins.
        on_reloaded: called as soon as other weights are in place, before anybody hears of it: should the engine die
            then, its next life begins with these.
        load_timeout_s: how long the core may stand still while it reads.
    """

    def __init__(
        self,
        core: CoreClient,
        sleep: SleepControl,
        heartbeat: Heartbeat,
        ready: Ready,
        on_reloaded: Callable[[], None],
        load_timeout_s: float,
    ) -> None:
        self._core = core
        self._sleep = sleep
        self._heartbeat = heartbeat
        self._ready = ready
        self._on_reloaded = on_reloaded
        self._load_timeout_s = load_timeout_s

    async def reload(self, call: ReloadWeights) -> WeightsReloaded:
        """Let the core look at the folder; then claim nothing, clear it of requests, and let it change.

        Whatever fails, the engine serves on with what it had, or its core ends.
        """
        checked = await self._ask(msgspec.structs.replace(call, only_check=True))
        if call.only_check:
            return checked
        try:
            await self._sleep.clear(call.mode, call.drain_timeout_s, may_hand_back=False)
            answer = await self._ask(call)
            self._ready.weights_version = answer.version
            self._heartbeat.weights_folder, self._heartbeat.weights_version = answer.path, answer.version
            self._on_reloaded()
            await self._heartbeat.tell_version(answer.version)
        finally:
            await self._sleep.go_on()
        return answer

    async def _ask(self, call: ReloadWeights) -> WeightsReloaded:
        former = self._ready.weights_version
        watching = asyncio.create_task(self._watch())
        try:
            answer = await self._core.call(call)
        finally:
            watching.cancel()
        if not isinstance(answer, WeightsReloaded):
            raise BrokerError(f"the engine core answered {type(call).__name__} with {type(answer).__name__}")
        # The core knows a digest, whatever name they were started with.
        return msgspec.structs.replace(answer, former_version=former)

    async def _watch(self) -> None:
        """Kill a core that hangs over a folder: it began its life with another, and will again."""
        finding = await until_hung(self._core, self._load_timeout_s)
        log.error("load_timed_out", finding=finding, core_pid=self._core.pid)
        self._core.kill(finding)
