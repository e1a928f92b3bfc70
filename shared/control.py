"""What may be asked of an engine, and what it answers.

    client ──ControlCommand──▶ the engine's channel ──▶ worker process ──UtilityCall──▶ engine core
    client ◀──ControlReply── channel and key of the call ◀── worker process ◀──UtilityOutput── engine core

The calls and answers are the same on both legs. Each call is a type of its own, and so is each kind of answer; the one
name that travels, the method of ``CollectiveRpc``, is looked up among those that the engine's operator has registered.
A call checks itself when it is made, so a wrong one is refused by the client already, and by an engine that decodes it.
Same rules as in ``messages``: positional arrays, new fields are only appended and carry a default.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import msgspec

from .encodable import check_text
from .errors import ValidationError
from .lora_control import AddLora, ListLoras, LoraChanged, LoraList, PinLora, RemoveLora
from .shown import shown
from .text_control import Detokenize, DetokenizedText, GetTokenizer, Tokenize, TokenizedText, TokenizerFile
from .timeouts import check_timeout
from .weights_control import ReloadWeights, WeightsReloaded

CONTROL_VERSION = 1
SLEEP_LEVELS = (1, 2)
SLEEP_MODES = ("keep", "wait", "abort")
WEIGHTS, KV_CACHE = SLEEP_TAGS = ("weights", "kv_cache")
MULTIMODAL, ENCODER = INPUT_CACHES = ("multimodal", "encoder")
DEFAULT_SHARD_PATTERN = "model-rank-{rank}-part-{part}.safetensors"


# --------------------------------------------------------------------- calls


class CheckInvariants(msgspec.Struct, array_like=True, tag="check_invariants"):
    """Verify the block pool and the scheduler. Answer: ``Invariants``."""


class ResetPrefixCache(msgspec.Struct, array_like=True, omit_defaults=True, tag="reset_prefix_cache"):
    """Forget what earlier requests have left in the KV cache. Answer: ``PrefixCacheReset``.

    With ``reset_running_requests`` what runs is queued again first, to go on after its last token.
    """

    reset_running_requests: bool = False


class ResetInputCache(msgspec.Struct, array_like=True, tag="reset_input_cache"):
    """Forget what was kept of earlier images, sounds and videos. Answer: ``InputCacheReset``.

    ``cache`` is "multimodal" for processed inputs, or "encoder" for what the model's encoders made of them.
    """

    cache: str

    def __post_init__(self) -> None:
        if self.cache not in INPUT_CACHES:
            raise ValidationError(f"cache must be one of {', '.join(INPUT_CACHES)}, got {shown(self.cache)}")


class Sleep(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, tag="sleep"):
    """Give the device's memory back; does nothing where that is done. Answer: ``SleepState``.

    Args:
        level: 1 frees the KV cache and moves the weights into host memory (where those of a CPU engine are already);
            2 frees the KV cache and discards the weights, which are loaded from their folder again at ``WakeUp``.
        mode: what becomes of running requests: "keep" queues them again, to go on after their last token here or
            elsewhere; "wait" lets them end, as long as ``drain_timeout_s``, and queues the rest again; "abort" ends
            them with finish_reason "abort".
    """

    level: int = 1
    mode: str = "keep"
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.level, bool) or self.level not in SLEEP_LEVELS:
            raise ValidationError(f"level must be 1 or 2, got {shown(self.level)}")
        if self.mode not in SLEEP_MODES:
            raise ValidationError(f"mode must be one of {', '.join(SLEEP_MODES)}, got {shown(self.mode)}")
        check_timeout("drain_timeout_s", self.drain_timeout_s)


class WakeUp(msgspec.Struct, array_like=True, omit_defaults=True, tag="wake_up"):
    """Bring back what sleeps, all of it or what ``tags`` name; serve again once all is back. Answer: ``SleepState``."""

    tags: list[str] | None = None

    def __post_init__(self) -> None:
        unknown = [tag for tag in self.tags or () if tag not in SLEEP_TAGS]
        if unknown or self.tags == []:
            raise ValidationError(
                f"tags must be some of {', '.join(SLEEP_TAGS)}, or None for all, got {shown(self.tags)}"
            )


class IsSleeping(msgspec.Struct, array_like=True, tag="is_sleeping"):
    """Say what sleeps. Answer: ``SleepState``."""


class StartProfile(msgspec.Struct, array_like=True, tag="start_profile"):
    """Record what torch does from now on. Answer: ``ProfileStarted``."""


class StopProfile(msgspec.Struct, array_like=True, tag="stop_profile"):
    """Write what was recorded to a file. Answer: ``ProfileSaved``."""


class SaveShardedState(msgspec.Struct, array_like=True, omit_defaults=True, tag="save_sharded_state"):
    """Write the loaded weights to a new folder of the engine's host, to be served. Answer: ``ShardedStateSaved``.

    Args:
        path: absolute; does not exist yet, or is empty.
        pattern: of the files' names; ``{part}`` counts from 0, ``{rank}`` is 0.
        max_size: most bytes of tensors in a file; a larger tensor has one of its own. None makes one file.
    """

    path: str
    pattern: str | None = None
    max_size: int | None = None

    def __post_init__(self) -> None:
        check_text("path", self.path)
        if self.pattern is not None:
            check_text("pattern", self.pattern)
        if not PurePosixPath(self.path).is_absolute():
            raise ValidationError(f"path must be absolute, since it is on the engine's host, got {shown(self.path)}")
        try:
            names = {self.shard_name(part) for part in range(2)}
        except (KeyError, IndexError, ValueError):
            names = set()
        if len(names) < 2 or any("/" in name or not name.endswith(".safetensors") for name in names):
            raise ValidationError(
                f"pattern must name a file with {{part}} in it that ends in .safetensors, got {shown(self.pattern)}"
            )
        if self.max_size is not None and (isinstance(self.max_size, bool) or self.max_size < 1):
            raise ValidationError(f"max_size must be a positive number of bytes, got {shown(self.max_size)}")

    def shard_name(self, part: int) -> str:
        """Name of the ``part``-th file."""
        return (self.pattern or DEFAULT_SHARD_PATTERN).format(rank=0, part=part)


class CollectiveRpc(msgspec.Struct, array_like=True, omit_defaults=True, tag="collective_rpc"):
    """Run a registered method in the engine core, between two steps. Answer: ``RpcResult``.

    Args:
        timeout_s: how long its caller waits; None leaves it to the call's own. A method that runs is not broken off.
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


class ExecuteDummyBatch(msgspec.Struct, array_like=True, tag="execute_dummy_batch"):
    """Run one token through the model that belongs to no request and is stored nowhere. Answer: ``DummyBatchDone``."""


Utility = (
    CheckInvariants
    | ResetPrefixCache
    | Sleep
    | WakeUp
    | IsSleeping
    | StartProfile
    | StopProfile
    | SaveShardedState
    | CollectiveRpc
    | ExecuteDummyBatch
    | Tokenize
    | Detokenize
    | ResetInputCache
    | GetTokenizer
    | AddLora
    | RemoveLora
    | ListLoras
    | PinLora
    | ReloadWeights
)


# --------------------------------------------------------------------- answers


class Invariants(msgspec.Struct, array_like=True, tag="invariants"):
    """All is as it should be, with so many blocks and requests."""

    num_free_blocks: int
    num_blocks: int
    num_running_reqs: int
    num_waiting_reqs: int


class PrefixCacheReset(msgspec.Struct, array_like=True, tag="prefix_cache_reset"):
    """``success`` is False, and nothing is done, while any block is in use."""

    success: bool


class InputCacheReset(msgspec.Struct, array_like=True, tag="input_cache_reset"):
    """So many entries were forgotten."""

    num_entries: int


class SleepState(msgspec.Struct, array_like=True, omit_defaults=True, tag="sleep_state"):
    """``level`` is 0 for an engine that is awake; ``tags`` name what sleeps."""

    level: int = 0
    tags: list[str] = []

    @property
    def is_sleeping(self) -> bool:
        return self.level > 0


class ProfileStarted(msgspec.Struct, array_like=True, tag="profile_started"):
    """``folder``, on the engine's host, is where the trace will be."""

    folder: str


class ProfileSaved(msgspec.Struct, array_like=True, tag="profile_saved"):
    """``path``, on the engine's host, holds a trace for chrome://tracing and Perfetto."""

    path: str
    num_bytes: int


class ShardedStateSaved(msgspec.Struct, array_like=True, tag="sharded_state_saved"):
    """``files`` of ``path`` hold the weights, ``num_bytes`` in all."""

    path: str
    files: list[str]
    num_bytes: int


class RpcResult(msgspec.Struct, array_like=True, tag="rpc_result"):
    """What the method returned: plain data."""

    result: Any


class DummyBatchDone(msgspec.Struct, array_like=True, tag="dummy_batch_done"):
    """The forward took ``time_s``."""

    time_s: float


UtilityAnswer = (
    Invariants
    | PrefixCacheReset
    | SleepState
    | ProfileStarted
    | ProfileSaved
    | ShardedStateSaved
    | RpcResult
    | DummyBatchDone
    | TokenizedText
    | DetokenizedText
    | InputCacheReset
    | TokenizerFile
    | LoraChanged
    | LoraList
    | WeightsReloaded
)


# --------------------------------------------------------------------- between client and worker process


class ControlCommand(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, tag="control"):
    """A call to one engine. Where the reply goes follows from ``call_id`` (``ModelKeys.call_replies``, ``call_reply``).

    The same ``call_id`` twice is one call, so that it may be sent again while no reply has come.
    After ``expires_at_ms``, by the clock of Redis, nobody waits for it, and it is not begun any more.
    """

    version: int = CONTROL_VERSION
    call_id: str
    call: Utility
    expires_at_ms: int


class CallError(msgspec.Struct, array_like=True, frozen=True):
    """Why a call failed; ``code`` is that of an exception class in ``errors``."""

    code: str
    message: str


class ControlReply(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True):
    """One engine's answer to a call, or its error."""

    version: int = CONTROL_VERSION
    call_id: str
    engine_id: str
    answer: UtilityAnswer | None = None
    error: CallError | None = None
