"""Supervisor of a host whose devices several models share: one keeper per device starts and ends their processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ...shared.broker import Homes
from ...shared.messages.supervision import ModelCommand
from ...shared.partitions import Layouts
from ..config.worker_config import WorkerConfig
from ..supervisor import EngineStartError, Supervisor
from ..supervisor.host_metrics import MetricsServer
from ..supervisor.reaper import Reaper
from ..supervisor.stat_loggers import StatLoggerManager
from ..supervisor.supervisor import StopMode
from .engine import SharedEngine
from .keeper import DeviceKeeper
from .kept_model import KeptModel
from .plan import SharedPlan
from .report import DeviceReporter, device_id_of, models_awake


class ModelsSupervisor(Supervisor):
    """Runs the keepers of all devices.

    Args:
        configs: configuration of each model's worker process, by device.
        on_ready: called with the models that are awake, once the worker serves.
    """

    def __init__(
        self,
        plan: SharedPlan,
        configs: Sequence[Sequence[WorkerConfig]],
        on_ready: Callable[[Sequence[str]], None],
        metrics: MetricsServer | None = None,
        stat_loggers: StatLoggerManager | None = None,
    ) -> None:
        self._plan = plan
        self._keepers: list[DeviceKeeper] = []
        self._reporters: list[DeviceReporter] = []
        self._keeping: list[asyncio.Task[None]] = []
        self._shared_engines: list[SharedEngine] = []
        every = [config for of_device in configs for config in of_device]
        super().__init__(every, lambda: on_ready(models_awake(self._keepers)), metrics, stat_loggers)

    @property
    def scale_refusal(self) -> str:
        return "the worker has several models, with one engine each on a device"

    async def _start(self) -> None:
        self._make_keepers()
        await self._follow_demand()
        self._keeping = [
            *(asyncio.create_task(keeper.keep()) for keeper in self._keepers),
            *(asyncio.create_task(reporter.publish()) for reporter in self._reporters),
        ]
        steps = [*(keeper.started for keeper in self._keepers), *(reporter.entered for reporter in self._reporters)]
        for step in steps:
            step.add_done_callback(lambda _: self._changed.set())
        await self._until(lambda: self._is_over() or all(step.done() for step in steps))
        if self._is_over():
            return
        if not any(keeper.started.result() for keeper in self._keepers):
            models = self._keepers[0].models.values()
            reasons = "; ".join(f"{model.name}: {model.failure_reason}" for model in models)
            self._escalate_stop(StopMode.HAND_BACK)
            self._has_failed_to_start = True
            raise EngineStartError(f"no model can be served: {reasons}")
        self._on_ready()

    async def _serve(self) -> None:
        await self._until(self._is_over)

    async def _stop_engines(self) -> None:
        for task in self._keeping:
            task.cancel()
        results = await asyncio.gather(*self._keeping, return_exceptions=True)
        try:
            await super()._stop_engines()
        finally:
            await asyncio.gather(*(reporter.remove_device() for reporter in self._reporters))
        for result in results:
            if isinstance(result, Exception):
                raise result

    def _is_over(self) -> bool:
        return self._is_stopping or any(task.done() for task in self._keeping)

    def _make_keepers(self) -> None:
        engines = iter(self._shared_engines)
        for device in self._plan.devices:
            own = [next(engines) for _ in self._plan.models]
            config = own[0].config
            pairs = zip(self._plan.models, own, strict=True)
            models = [KeptModel(planned, engine, device_id_of(config)) for planned, engine in pairs]
            homes = {model.name: Homes(self._redis, self._keys.model(model.name)) for model in models}
            keeper = DeviceKeeper(device_id_of(config), device, models, homes, self._plan.sharing)
            self._keepers.append(keeper)
            self._reporters.append(DeviceReporter(self._redis, config, device, keeper, homes, self._plan.cards))

    async def _follow_demand(self) -> None:
        """Have keepers notified of requests for models that no engine serves."""
        layouts = Layouts(self._redis, self._keys)
        for model in self._plan.models:
            for number in range((await layouts.read(model.name)).num_known):
                channel = self._keys.model(model.name, number).wanted
                await self._subscriber.begin(channel, lambda _: self._notify(), self._notify)

    def _notify(self) -> None:
        for part in (*self._keepers, *self._reporters):
            part.notify()

    def _on_change(self) -> None:
        super()._on_change()
        self._notify()

    def _on_model_command(self, command: ModelCommand) -> None:
        for keeper in self._keepers:
            keeper.command(command)

    def _make_engine(self, config: WorkerConfig) -> SharedEngine:
        self._shared_engines.append(SharedEngine(config, Reaper(self._redis, config), self._on_change))
        return self._shared_engines[-1]
