"""What a client may ask of engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Unpack

import msgspec

from ...shared.control.caches import (
    ENCODER,
    MULTIMODAL,
    InputCacheReset,
    PrefixCacheReset,
    ResetInputCache,
    ResetPrefixCache,
)
from ...shared.control.diagnosis import (
    CheckInvariants,
    DummyBatchDone,
    ExecuteDummyBatch,
    Invariants,
    ProfileSaved,
    ProfileStarted,
    StartProfile,
    StopProfile,
)
from ...shared.control.rpc import CollectiveRpc, RpcResult
from ...shared.control.sleeping import IsSleeping, Sleep, SleepState, WakeUp
from ...shared.control.weights import SaveShardedState, ShardedStateSaved
from ...shared.errors import ValidationError
from ...shared.values.encodable import UNENCODABLE, unencodable
from ...shared.values.shown import shown
from ...shared.values.timeouts import check_timeout
from ..client_core import ClientCore
from ..engine_calls import CALL_TIMEOUT_S, CallOptions
from ..inputs.options import check_flag


class EngineControl(ClientCore):
    """The part of the client that is about engines. Each method returns what the engines answered, by engine id.

    Engines that start or are dead are left out where all are meant. A call that an engine has not begun when its caller
    gives up is not begun any more.

    All methods raise:
        ValidationError: an argument is wrong; nothing was sent.
        UnknownModelError: no worker has ever served ``model`` here.
        EngineNotFoundError: no engine ``engine_id`` of the model has a heartbeat.
        EngineDeadError: that engine, or every one of the model, is dead or not up yet.
        EngineCallError: an engine refused, failed, died or did not answer in time; its ``errors`` say which and why,
            its ``answers`` are those of the others.
    """

    async def sleep(
        self, level: int = 1, *, mode: str = "keep", drain_timeout_s: float = 30.0, **options: Unpack[CallOptions]
    ) -> dict[str, SleepState]:
        """Let engines give their memory back and claim nothing until ``wake_up``. Asleep already, they stay so.

        What waits goes on waiting, or to engines that are awake. An engine that is restarted is awake.

        Args:
            level: 1 frees the KV cache and moves the weights into host memory, where those of a CPU engine are already;
                2 discards the weights too, to be loaded from their folder at ``wake_up``.
            mode: of requests that run: "keep" queues them again, to go on after their last token; "wait" lets them
                end, for ``drain_timeout_s`` beside ``timeout_s``, and queues the rest again; "abort" ends them with
                finish_reason "abort".
        """
        call = Sleep(level=level, mode=mode, drain_timeout_s=drain_timeout_s)
        if mode == "wait":
            timeout_s = options.get("timeout_s", CALL_TIMEOUT_S)
            check_timeout("timeout_s", timeout_s)
            options["timeout_s"] = timeout_s + drain_timeout_s
        async with self._audited("engine.sleep", options, level=level, mode=mode):
            return await self._call_engines(call, SleepState, options)

    async def wake_up(self, tags: Sequence[str] | None = None, **options: Unpack[CallOptions]) -> dict[str, SleepState]:
        """Let engines take their memory again: all of it, or what ``tags`` name of "weights" and "kv_cache".

        An engine serves again once all is back. One that is awake does nothing.
        """
        if isinstance(tags, str):
            raise ValidationError(f"tags must be a list of tags, got {shown(tags)}")
        call = WakeUp(None if tags is None else list(tags))
        async with self._audited("engine.wake_up", options, tags=" ".join(tags or ())):
            return await self._call_engines(call, SleepState, options)

    def _audited(self, action: str, options: CallOptions, **details: object) -> AbstractAsyncContextManager[object]:
        model, engine_id = options.get("model") or "", options.get("engine_id") or ""
        target = engine_id or model or "all engines"
        return self._operations.audit.audited(action, target, model=model, **details)

    async def is_sleeping(self, **options: Unpack[CallOptions]) -> dict[str, bool]:
        """Return whether each engine sleeps, if only in part."""
        return {engine_id: state.is_sleeping for engine_id, state in (await self.sleep_state(**options)).items()}

    async def sleep_state(self, **options: Unpack[CallOptions]) -> dict[str, SleepState]:
        """Return how deeply each engine sleeps, and what of it."""
        return await self._call_engines(IsSleeping(), SleepState, options)

    async def reset_prefix_cache(
        self, *, reset_running_requests: bool = False, **options: Unpack[CallOptions]
    ) -> dict[str, bool]:
        """Forget what earlier prompts have left in the KV cache; False, and nothing is done, where requests run.

        Args:
            reset_running_requests: queue what runs again first, to go on after its last token, here or elsewhere.
        """
        call = ResetPrefixCache(check_flag("reset_running_requests", reset_running_requests))
        answers = await self._call_engines(call, PrefixCacheReset, options)
        return {engine_id: answer.success for engine_id, answer in answers.items()}

    async def reset_mm_cache(self, **options: Unpack[CallOptions]) -> dict[str, int]:
        """Forget processed images; returns how many, by engine."""
        return await self._reset_input_cache(MULTIMODAL, options)

    async def reset_encoder_cache(self, **options: Unpack[CallOptions]) -> dict[str, int]:
        """Forget the vision encoder's features of images; return their number by engine."""
        return await self._reset_input_cache(ENCODER, options)

    async def _reset_input_cache(self, cache: str, options: CallOptions) -> dict[str, int]:
        answers = await self._call_engines(ResetInputCache(cache), InputCacheReset, options)
        return {engine_id: answer.num_entries for engine_id, answer in answers.items()}

    async def check_invariants(self, **options: Unpack[CallOptions]) -> dict[str, Invariants]:
        """Verify the engines' bookkeeping and return their numbers of blocks and requests."""
        return await self._call_engines(CheckInvariants(), Invariants, options)

    async def start_profile(self, **options: Unpack[CallOptions]) -> dict[str, str]:
        """Record what torch does in the engines' steps; returns the folders, on the engines' hosts, of the traces."""
        answers = await self._call_engines(StartProfile(), ProfileStarted, options)
        return {engine_id: answer.folder for engine_id, answer in answers.items()}

    async def stop_profile(self, **options: Unpack[CallOptions]) -> dict[str, str]:
        """Write the traces and return their files, on the engines' hosts; for chrome://tracing or Perfetto."""
        answers = await self._call_engines(StopProfile(), ProfileSaved, options)
        return {engine_id: answer.path for engine_id, answer in answers.items()}

    async def save_sharded_state(
        self, path: str, pattern: str | None = None, max_size: int | None = None, **options: Unpack[CallOptions]
    ) -> dict[str, ShardedStateSaved]:
        """Write the loaded weights into a new folder on the engine's host, which ``worker start --model`` can serve.

        Each engine holds all weights, so one is enough: where a model has several, say which (``engine_id``).

        Args:
            path: absolute; does not exist yet, or is empty.
            pattern: of the files' names; "model-rank-{rank}-part-{part}.safetensors" by default, the rank being 0.
            max_size: most bytes of tensors in a file; one file by default.
        """
        call = SaveShardedState(path, pattern, max_size)
        if options.get("engine_id") is None:
            states = await self.sleep_state(**options)
            if len(states) > 1:
                raise ValidationError(f"engine_id must be given: the model has {', '.join(sorted(states))}")
            (options["engine_id"],) = states
        return await self._call_engines(call, ShardedStateSaved, options)

    async def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[CallOptions],
    ) -> dict[str, Any]:
        """Run a method that is registered in the engines, between two of their steps, and return its results by engine.

        An engine of several ranks runs it in all of them; its result is then a list in the order of ranks.

        Engines have "device_info", "memory_summary" and "check_invariants", and the ``@rpc_method`` functions of the
        modules that ``worker start --rpc-module`` names.

        Args:
            args, kwargs: plain data: None, bool, int, float, str, bytes, and lists and dicts of them.
        """
        call = CollectiveRpc(method, options.get("timeout_s"), list(args), dict(kwargs or {}))
        try:
            msgspec.msgpack.encode(call)
        except UNENCODABLE as error:
            raise unencodable("", call, error) from error
        answers = await self._call_engines(call, RpcResult, options)
        return {engine_id: answer.result for engine_id, answer in answers.items()}

    async def execute_dummy_batch(self, **options: Unpack[CallOptions]) -> dict[str, float]:
        """Run one token that belongs to no request through each model; returns the seconds that it took."""
        answers = await self._call_engines(ExecuteDummyBatch(), DummyBatchDone, options)
        return {engine_id: answer.time_s for engine_id, answer in answers.items()}
