"""What may be asked of an engine, and what it answers.

    client ──ControlCommand──▶ the engine's channel ──▶ worker process ──UtilityCall──▶ engine core
    client ◀──ControlReply── channel and key of the call ◀── worker process ◀──UtilityOutput── engine core

The calls and answers are the same on both legs. Each call is a type of its own, and so is each kind of answer; the one
name that travels, the method of ``CollectiveRpc``, is looked up among those that the engine's operator has registered.
A call checks itself when it is made, so a wrong one is refused by the client already, and by an engine that decodes it.
Same rules as in ``messages``: positional arrays, new fields are only appended and carry a default.
"""

from __future__ import annotations

import msgspec

from .caches import InputCacheReset, PrefixCacheReset, ResetInputCache, ResetPrefixCache
from .diagnosis import (
    CheckInvariants,
    DummyBatchDone,
    ExecuteDummyBatch,
    Invariants,
    ProfileSaved,
    ProfileStarted,
    StartProfile,
    StopProfile,
)
from .lora import AddLora, ListLoras, LoraChanged, LoraList, PinLora, RemoveLora
from .rpc import CollectiveRpc, RpcResult
from .sleeping import IsSleeping, Sleep, SleepState, WakeUp
from .text import Detokenize, DetokenizedText, GetTokenizer, Tokenize, TokenizedText, TokenizerFile
from .weights import ReloadWeights, SaveShardedState, ShardedStateSaved, WeightsReloaded

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
