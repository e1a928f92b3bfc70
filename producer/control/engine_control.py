"""The client's control calls to engines, and those that change their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Unpack

import msgspec

from ...shared.control.engine import (
    ENCODER,
    MULTIMODAL,
    CheckInvariants,
    CollectiveRpc,
    DummyBatchDone,
    ExecuteDummyBatch,
    InputCacheReset,
    Invariants,
    IsSleeping,
    PrefixCacheReset,
    ProfileSaved,
    ProfileStarted,
    ResetInputCache,
    ResetPrefixCache,
    RpcResult,
    Sleep,
    SleepState,
    StartProfile,
    StopProfile,
    WakeUp,
)
from ...shared.control.model import ReloadWeights, SaveShardedState, ShardedStateSaved, WeightsReloaded
from ...shared.errors import EngineCallError, PenstockError, ValidationError
from ...shared.process.code_profile import CodeProfile
from ...shared.values.checks import UNENCODABLE, check_timeout, unencodable
from ...shared.values.shown import shown
from ..client_parts.core import CALL_TIMEOUT_S, CallOptions, ClientCore
from ..inputs.options import check_flag

# Reading a model takes longer than most calls.
RELOAD_TIMEOUT_S = 600.0


class EngineControl(ClientCore):
    """The part of the client that calls engines. Each method returns the engines' answers by engine id.

    A call to all engines skips those that are starting or dead. An engine does not begin a call after its caller has
    given up.

    All methods raise:
        ValidationError: an argument is wrong; nothing was sent.
        UnknownModelError: no worker has ever served ``model`` here.
        EngineNotFoundError: no engine ``engine_id`` of the model has a heartbeat.
        EngineDeadError: that engine, or every engine of the model, is dead or not up yet.
        EngineCallError: an engine refused, failed, died or did not answer in time. ``errors`` has the reason by engine,
            ``answers`` the answers of the other engines.
    """

    _own_profile: tuple[CodeProfile, Path] | None = None

    async def sleep(
        self, level: int = 1, *, mode: str = "keep", drain_timeout_s: float = 30.0, **options: Unpack[CallOptions]
    ) -> dict[str, SleepState]:
        """Have engines release their memory and claim nothing until ``wake_up``. Engines that sleep already stay
        asleep.

        Waiting requests keep waiting, or are claimed by engines that are awake. An engine that is restarted is awake.

        Args:
            level: 1 frees the KV cache and moves the weights into host memory, where a CPU engine has them already; 2
                also discards the weights, and ``wake_up`` loads them from their folder.
            mode: of running requests: "keep" requeues them, to resume after their last token; "wait" lets them finish
                for ``drain_timeout_s``, in addition to ``timeout_s``, and requeues the rest; "abort" ends them with
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
        """Have engines allocate their memory again: all of it, or the ``tags`` among "weights" and "kv_cache".

        An engine serves again once it has all its memory. An engine that is awake does nothing.
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
        """Return whether each engine sleeps, at least in part."""
        return {engine_id: state.is_sleeping for engine_id, state in (await self.sleep_state(**options)).items()}

    async def sleep_state(self, **options: Unpack[CallOptions]) -> dict[str, SleepState]:
        """Return how deeply each engine sleeps, and which parts of it."""
        return await self._call_engines(IsSleeping(), SleepState, options)

    async def reset_prefix_cache(
        self, *, reset_running_requests: bool = False, **options: Unpack[CallOptions]
    ) -> dict[str, bool]:
        """Drop the cached prefixes of earlier prompts from the KV cache. False, and nothing is dropped, where requests
        run.

        Args:
            reset_running_requests: first requeue running requests, to resume after their last token, here or elsewhere.
        """
        call = ResetPrefixCache(check_flag("reset_running_requests", reset_running_requests))
        answers = await self._call_engines(call, PrefixCacheReset, options)
        return {engine_id: answer.success for engine_id, answer in answers.items()}

    async def reset_mm_cache(self, **options: Unpack[CallOptions]) -> dict[str, int]:
        """Drop the cached processed images. Return their number by engine."""
        return await self._reset_input_cache(MULTIMODAL, options)

    async def reset_encoder_cache(self, **options: Unpack[CallOptions]) -> dict[str, int]:
        """Drop the cached outputs of the vision encoder. Return the number of images by engine."""
        return await self._reset_input_cache(ENCODER, options)

    async def _reset_input_cache(self, cache: str, options: CallOptions) -> dict[str, int]:
        answers = await self._call_engines(ResetInputCache(cache), InputCacheReset, options)
        return {engine_id: answer.num_entries for engine_id, answer in answers.items()}

    async def check_invariants(self, **options: Unpack[CallOptions]) -> dict[str, Invariants]:
        """Verify the engines' bookkeeping, and return their numbers of blocks and requests."""
        return await self._call_engines(CheckInvariants(), Invariants, options)

    async def start_profile(
        self,
        *,
        prefix: str = "",
        with_stack: bool = False,
        use_gzip: bool = False,
        client_file: str | Path | None = None,
        **options: Unpack[CallOptions],
    ) -> dict[str, str]:
        """Start the torch profiler in the engines, and one of functions in their worker processes. Return the folders
        of the files, on the engines' hosts.

        Args:
            prefix: begins the names of the files.
            with_stack: record the Python functions that call each operation.
            use_gzip: compress the traces.
            client_file: profile this client's thread as well, into this file at ``stop_profile``.
        """
        call = StartProfile(prefix, check_flag("with_stack", with_stack), check_flag("use_gzip", use_gzip))
        answers = await self._call_engines(call, ProfileStarted, options)
        if client_file is not None:
            self._own_profile = CodeProfile(), Path(client_file)
        return {engine_id: answer.folder for engine_id, answer in answers.items()}

    async def stop_profile(self, **options: Unpack[CallOptions]) -> dict[str, str]:
        """Stop profiling. Return the trace files, on the engines' hosts; open them in chrome://tracing or Perfetto.

        Next to a trace is the profile of its worker process, for ``pstats``: the same name with ``.worker.prof``.
        """
        own_profile, self._own_profile = self._own_profile, None
        if own_profile is not None:
            profile, path = own_profile
            await profile.save(path)
        answers = await self._call_engines(StopProfile(), ProfileSaved, options)
        return {engine_id: answer.path for engine_id, answer in answers.items()}

    async def save_sharded_state(
        self, path: str, pattern: str | None = None, max_size: int | None = None, **options: Unpack[CallOptions]
    ) -> dict[str, ShardedStateSaved]:
        """Write the loaded weights into a new folder on the engine's host, which ``worker start --model`` can serve.

        Each engine holds all weights, so one engine is enough. If the model has several, choose one with ``engine_id``.

        Args:
            path: absolute; must not exist yet, or be empty.
            pattern: of the file names; "model-rank-{rank}-part-{part}.safetensors" by default, where the rank is 0.
            max_size: limit of the bytes of tensors per file; one file by default.
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
        """Run a registered method in the engines, between two of their steps, and return its results by engine.

        An engine of several ranks runs it in all of them, and its result is a list in the order of ranks.

        Engines have "device_info", "memory_summary" and "check_invariants", and the ``@rpc_method`` functions of the
        modules of ``worker start --rpc-module``.

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
        """Run one token that belongs to no request through each model, and return the seconds it took."""
        answers = await self._call_engines(ExecuteDummyBatch(), DummyBatchDone, options)
        return {engine_id: answer.time_s for engine_id, answer in answers.items()}


class WeightsControl(ClientCore):
    """The part of the client for weights. Its methods raise the errors of ``EngineControl``."""

    async def reload_weights(
        self,
        path: str | None = None,
        *,
        version: str = "",
        mode: str = "wait",
        drain_timeout_s: float = 30.0,
        only_check: bool = False,
        **options: Unpack[CallOptions],
    ) -> dict[str, WeightsReloaded]:
        """Have engines serve the weights of another folder, one engine after another, while the others serve.

        First all engines check the folder; if one refuses it, none changes. An engine that reloads claims nothing until
        it serves again; waiting requests go to other engines, or wait for it. If an engine fails, it serves its former
        weights, and the engines after it are not called; ``answers`` of the error are those that have changed. Calling
        again reloads all engines once more.

        An engine that restarts after a crash serves the weights that it served before. A new engine serves the weights
        of its command line.

        Args:
            path: absolute, on every engine's host, of a model of the same architecture, shapes and tokenizer; None
                reads again the folder from which the engine's weights came.
            version: name of the weights in answers and heartbeats; a digest of the weights by default.
            mode: of running requests: "wait" lets them end on their weights, and changes nothing if they have not ended
                within ``drain_timeout_s``; "keep" requeues them, to resume after their last token, on the new weights
                here or on those of another engine (the first delta after the resume says which); "abort" ends them with
                finish_reason "abort".
            only_check: check the folder, and change nothing.
            options: ``timeout_s``, 600 here, applies to each engine.
        """
        call = ReloadWeights(
            path=path,
            version=version,
            mode=mode,
            drain_timeout_s=drain_timeout_s,
            only_check=check_flag("only_check", only_check),
        )
        timeout_s = options.get("timeout_s", RELOAD_TIMEOUT_S)
        check_timeout("timeout_s", timeout_s)
        options["timeout_s"] = timeout_s + (drain_timeout_s if mode == "wait" else 0.0)
        target = options.get("engine_id") or options.get("model") or "all engines"
        details = {"path": path or "", "version": version, "mode": mode}
        checking = msgspec.structs.replace(call, only_check=True)
        if only_check:
            return await self._call_engines(checking, WeightsReloaded, options)
        model = options.get("model") or ""
        async with self._operations.audit.audited("engine.reload_weights", target, model=model, **details):
            answers: dict[str, WeightsReloaded] = {}
            waiting = sorted(await self._call_engines(checking, WeightsReloaded, options))
            while waiting:
                await self._reload_in_turn(call, waiting, options, answers)
                if options.get("engine_id") is not None:
                    break
                # Engines may have started meanwhile, with the weights of their command lines.
                waiting = sorted((await self._call_engines(IsSleeping(), SleepState, options)).keys() - answers.keys())
            return answers

    async def _reload_in_turn(
        self, call: ReloadWeights, engine_ids: list[str], options: CallOptions, answers: dict[str, WeightsReloaded]
    ) -> None:
        """Reload one engine after another, and add their answers to ``answers``."""
        for place, engine_id in enumerate(engine_ids):
            engine_options: CallOptions = {**options, "engine_id": engine_id}
            try:
                answers |= await self._call_engines(call, WeightsReloaded, engine_options)
            except PenstockError as error:
                # An engine that died after the check has no answer in the error.
                errors = error.errors if isinstance(error, EngineCallError) else {engine_id: error}
                left = ", ".join(engine_ids[place + 1 :]) or "none"
                raise EngineCallError(
                    f"{error}; changed before: {', '.join(answers) or 'none'}; not asked: {left}",
                    answers=dict(answers),
                    errors=errors,
                ) from error
