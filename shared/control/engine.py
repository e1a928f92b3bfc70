"""Calls about an engine: its caches, memory, profiles, registered methods; under the rules of ``calls``."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import ValidationError
from ..values.checks import check_text, check_timeout
from ..values.shown import shown

MULTIMODAL, ENCODER = INPUT_CACHES = ("multimodal", "encoder")
SLEEP_LEVELS = (1, 2)
SLEEP_MODES = ("keep", "wait", "abort")
WEIGHTS, KV_CACHE, ADAPTERS = SLEEP_TAGS = ("weights", "kv_cache", "adapters")


class ResetPrefixCache(msgspec.Struct, array_like=True, omit_defaults=True, tag="reset_prefix_cache"):
    """Drop the KV cache of earlier requests. Answer: ``PrefixCacheReset``.

    With ``reset_running_requests``, running requests are queued again first, to resume after their last token.
    """

    reset_running_requests: bool = False


class PrefixCacheReset(msgspec.Struct, array_like=True, tag="prefix_cache_reset"):
    """``success`` is False, and nothing is done, while any block is in use."""

    success: bool


class ResetInputCache(msgspec.Struct, array_like=True, tag="reset_input_cache"):
    """Drop cached images, sounds and videos of earlier requests. Answer: ``InputCacheReset``.

    ``cache`` is "multimodal" for processed inputs, or "encoder" for the outputs of the model's encoders.
    """

    cache: str

    def __post_init__(self) -> None:
        if self.cache not in INPUT_CACHES:
            raise ValidationError(f"cache must be one of {', '.join(INPUT_CACHES)}, got {shown(self.cache)}")


class InputCacheReset(msgspec.Struct, array_like=True, tag="input_cache_reset"):
    """The number of dropped entries."""

    num_entries: int


class CheckInvariants(msgspec.Struct, array_like=True, tag="check_invariants"):
    """Verify the block pool and the scheduler. Answer: ``Invariants``."""


class Invariants(msgspec.Struct, array_like=True, tag="invariants"):
    """All invariants hold, with this number of blocks and requests."""

    num_free_blocks: int
    num_blocks: int
    num_running_reqs: int
    num_waiting_reqs: int


class StartProfile(msgspec.Struct, array_like=True, omit_defaults=True, tag="start_profile"):
    """Start torch's profiler, and one of the worker process. Answer: ``ProfileStarted``.

    Args:
        prefix: begins the names of the files.
        with_stack: record the Python functions that call each operation.
        use_gzip: compress the trace.
    """

    prefix: str = ""
    with_stack: bool = False
    use_gzip: bool = False

    def __post_init__(self) -> None:
        if check_text("prefix", self.prefix) and ("/" in self.prefix or not self.prefix.isprintable()):
            raise ValidationError(f"prefix must be a part of a file's name, without '/', got {shown(self.prefix)}")


class ProfileStarted(msgspec.Struct, array_like=True, tag="profile_started"):
    """``folder``, on the engine's host, is where the trace will be."""

    folder: str


class StopProfile(msgspec.Struct, array_like=True, tag="stop_profile"):
    """Write the recorded profile to a file. Answer: ``ProfileSaved``."""


class ProfileSaved(msgspec.Struct, array_like=True, tag="profile_saved"):
    """``path``, on the engine's host, holds a trace for chrome://tracing and Perfetto."""

    path: str
    num_bytes: int


class ExecuteDummyBatch(msgspec.Struct, array_like=True, tag="execute_dummy_batch"):
    """Run one token of no request through the model, without storing it. Answer: ``DummyBatchDone``."""


class DummyBatchDone(msgspec.Struct, array_like=True, tag="dummy_batch_done"):
    """The forward took ``time_s``."""

    time_s: float


class CollectiveRpc(msgspec.Struct, array_like=True, omit_defaults=True, tag="collective_rpc"):
    """Run a registered method in the engine core, between two steps. Answer: ``RpcResult``.

    Args:
        timeout_s: how long its caller waits; None for the call's own limit. A running method is not interrupted.
        args, kwargs: plain data: None, bool, int, float, str, bytes, and lists and dicts of them.
    """

    method: str
    timeout_s: float | None = None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not check_text("method", self.method):
            raise ValidationError("method must be the name of a registered method, got ''")
        if self.timeout_s is not None:
            check_timeout("timeout_s", self.timeout_s)


class RpcResult(msgspec.Struct, array_like=True, tag="rpc_result"):
    """Result of the method: plain data. For an engine of several ranks a list, in the order of ranks."""

    result: Any


class Sleep(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, tag="sleep"):
    """Release the device's memory, if it is not released. Answer: ``SleepState``.

    Args:
        level: 1 frees the KV cache and moves the weights into host memory (where a CPU engine already has them);
            2 frees the KV cache and discards the weights, which are loaded from their folder again at ``WakeUp``.
        mode: for running requests: "keep" queues them again, to resume after their last token here or
            elsewhere; "wait" lets them end, as long as ``drain_timeout_s``, and queues the rest again; "abort" ends
            them with finish_reason "abort".
        cause: why, for the events of requests that return to the queue.
    """

    level: int = 1
    mode: str = "keep"
    drain_timeout_s: float = 30.0
    cause: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.level, bool) or self.level not in SLEEP_LEVELS:
            raise ValidationError(f"level must be 1 or 2, got {shown(self.level)}")
        if self.mode not in SLEEP_MODES:
            raise ValidationError(f"mode must be one of {', '.join(SLEEP_MODES)}, got {shown(self.mode)}")
        check_timeout("drain_timeout_s", self.drain_timeout_s)


class WakeUp(msgspec.Struct, array_like=True, omit_defaults=True, tag="wake_up"):
    """Restore everything, or what ``tags`` name; serve again once all is restored. Answer: ``SleepState``.

    With the weights, an engine restores the slots of its adapters, too.
    """

    tags: list[str] | None = None

    def __post_init__(self) -> None:
        unknown = [tag for tag in self.tags or () if tag not in SLEEP_TAGS]
        if unknown or self.tags == []:
            raise ValidationError(
                f"tags must be some of {', '.join(SLEEP_TAGS)}, or None for all, got {shown(self.tags)}"
            )


class IsSleeping(msgspec.Struct, array_like=True, tag="is_sleeping"):
    """Report which parts sleep. Answer: ``SleepState``."""


class SleepState(msgspec.Struct, array_like=True, omit_defaults=True, tag="sleep_state"):
    """``level`` is 0 for an engine that is awake; ``tags`` name the parts that sleep.

    An engine that ``is_unloaded`` has no core, because one died while it slept. ``WakeUp`` loads the whole model.
    """

    level: int = 0
    tags: list[str] = []
    is_unloaded: bool = False

    @property
    def is_sleeping(self) -> bool:
        return self.level > 0
