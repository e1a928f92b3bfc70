"""Calls to an engine and their answers.

    client ──ControlCommand──▶ the engine's channel ──▶ worker process ──UtilityCall──▶ engine core
    client ◀──ControlReply── channel and key of the call ◀── worker process ◀──UtilityOutput── engine core

The calls and answers are the same on both legs. Each call and each kind of answer has its own type. The only name that
is sent, the method of ``CollectiveRpc``, is looked up among those that the engine's operator has registered. A call
checks itself when it is created, so the client already refuses a wrong one, and so does an engine that decodes it. The
rules of ``messages`` hold: positional arrays, new fields are only appended and have a default.
"""

from __future__ import annotations

import msgspec

from .engine import (
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
from .model import (
    AddLora,
    Detokenize,
    DetokenizedText,
    GetTokenizer,
    ListLoras,
    LoraChanged,
    LoraList,
    PinLora,
    ReloadWeights,
    RemoveLora,
    SaveShardedState,
    ShardedStateSaved,
    Tokenize,
    TokenizedText,
    TokenizerFile,
    WeightsReloaded,
)

CONTROL_VERSION = 1
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


class ControlCommand(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, tag="control"):
    """A call to one engine. ``call_id`` says where the reply goes (``ModelKeys.call_replies``, ``call_reply``).

    Calls with the same ``call_id`` are one call, so it may be sent again until a reply arrives. After
    ``expires_at_ms``, by the clock of Redis, no caller waits for it, and the engine does not start it.
    """

    version: int = CONTROL_VERSION
    call_id: str
    call: Utility
    expires_at_ms: int


class CallError(msgspec.Struct, array_like=True, frozen=True):
    """The reason why a call failed; ``code`` is that of an exception class in ``errors``."""

    code: str
    message: str


class ControlReply(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True):
    """Answer of an engine to a call, or its error."""

    version: int = CONTROL_VERSION
    call_id: str
    engine_id: str
    answer: UtilityAnswer | None = None
    error: CallError | None = None
