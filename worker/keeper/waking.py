"""Wakes of models, for which memory must be free: sleeping processes end, or a model gets less cache."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

import structlog
from msgspec.structs import replace

from ...shared.errors import CacheTooSmallError, DeviceMemoryError, EngineCallError, PenstockError
from ...shared.swap.budget import departures
from ...shared.swap.views import DeviceView, ModelView, SleepLevel
from ..processes.gpu import until_free
from .kept_model import KeptModel
from .memory import cache_bytes

log = structlog.get_logger()


class Waking:
    """Wakes the models of one device.

    Args:
        visible_devices: the GPU; None for the CPU.
        models: all models of the device, by name.
        views: returns their state.
    """

    def __init__(
        self,
        device: DeviceView,
        visible_devices: str | None,
        models: Mapping[str, KeptModel],
        views: Callable[[], list[ModelView]],
    ) -> None:
        self._device = device
        self._visible_devices = visible_devices
        self._models = models
        self._views = views

    def cache_bytes(self, model: KeptModel) -> int:
        """Return the bytes of the KV cache that a model gets at its next load."""
        return cache_bytes(self._device.memory, model.bytes, [each.bytes for each in self._models.values()])

    async def wake(self, model: KeptModel) -> None:
        """Wake a model for which other models have left.

        Raises:
            CacheTooSmallError: a request does not fit, even without any other process.
            PenstockError: it is not awake.
        """
        try:
            await self._wake_with_free_memory(model)
        except CacheTooSmallError:
            if model.bytes.cache is not None:
                raise
            await self._give_all(model)
            await self._wake_with_free_memory(model)

    async def _wake_with_free_memory(self, model: KeptModel) -> None:
        """Wake a model. Each time that memory is not free, free some or need less, and try again."""
        lacking: PenstockError | None = None
        async for cache in self._caches_to_try(model):
            await until_free(self._visible_devices, model.bytes.weights + cache)
            try:
                await model.wake_or_load(cache)
                return
            except (EngineCallError, DeviceMemoryError) as error:
                log.warning("wake_lacked_memory", model=model.name, kv_cache_mib=cache >> 20, cause=str(error))
                lacking = error
            except CacheTooSmallError as error:
                if lacking is None:
                    raise
                # A part of the cache was too small. Memory for all of it may be free at the next wake.
                raise lacking from error
        assert lacking is not None
        raise lacking

    async def _caches_to_try(self, model: KeptModel) -> AsyncIterator[int]:
        """Yield the bytes of the KV cache for each attempt to wake a model. Frees memory before the next one."""
        yield self.cache_bytes(model)
        if await self._end_largest_sleeper(model):
            yield self.cache_bytes(model)
        if model.level is not SleepLevel.DISK:
            # A new process may need less.
            await model.unload()
            yield self.cache_bytes(model)
        yield self.cache_bytes(model) // 2

    async def _give_all(self, model: KeptModel) -> None:
        """Give a model as much cache as fits alone, and end the sleeping processes that do not fit beside it."""
        model.bytes = replace(model.bytes, least_cache=self._device.memory)
        views = self._views()
        leaving = departures(self._device, views, next(view for view in views if view.name == model.name))
        for name in leaving.ended if leaving is not None else ():
            await self._models[name].unload()

    async def _end_largest_sleeper(self, entering: KeptModel) -> bool:
        """End the process of the sleeping model that keeps most memory. Returns False if no other one sleeps."""
        asleep = (SleepLevel.HOST_MEMORY, SleepLevel.PROCESS)
        sleepers = [model for model in self._models.values() if model is not entering and model.level in asleep]
        if not sleepers:
            return False
        await max(sleepers, key=lambda model: model.bytes.process).unload()
        return True
