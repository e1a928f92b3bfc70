"""Receive control calls from Redis and answer each once, in the worker process or in the core.

Calls are executed one after the other in the order of arrival, except for queries. Callers repeat a call that may have
been lost: a call with a known id is ignored, since its reply is in Redis or will be.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import msgspec
import structlog

from ....shared.broker import EngineCalls
from ....shared.control.calls import CallError, ControlCommand, ControlReply, Utility, UtilityAnswer
from ....shared.control.engine import CollectiveRpc, IsSleeping, ResetPrefixCache, Sleep, WakeUp
from ....shared.control.model import Detokenize, GetTokenizer, Tokenize
from ....shared.errors import EngineCallError, EngineDeadError, EngineTimeoutError, PenstockError, ValidationError
from ....shared.messages.supervision import CancelCommand, EngineCommand
from ....shared.values.shown import shown
from ..core.client import CoreClient
from ..leaving import LEAVE_PATIENCE_S
from .sleep import SleepControl

MAX_KNOWN_CALLS = 4096
# Queries change nothing, so they wait for no other call and are not logged.
_QUERIES = IsSleeping | Tokenize | Detokenize | GetTokenizer

log = structlog.get_logger()


class UndecodableCall(msgspec.Struct, frozen=True):
    """Placeholder for a control command that this version cannot decode. It gets a reply too."""

    call_id: str
    reason: str


class ControlCalls:
    """Control calls of one engine.

    Args:
        core: executes the calls that this process does not.
        sleep: executes the calls about sleep and the prefix cache.
    """

    def __init__(self, engine_id: str, calls: EngineCalls, core: CoreClient, sleep: SleepControl) -> None:
        self._engine_id = engine_id
        self._calls = calls
        self._core = core
        self._tasks: set[asyncio.Task[None]] = set()
        self._recent_ids: OrderedDict[str, None] = OrderedDict()
        self._turn = asyncio.Lock()
        self._is_closed = False
        self._functions: dict[type, Callable[[Any], Awaitable[UtilityAnswer]]] = {
            Sleep: sleep.sleep,
            WakeUp: sleep.wake_up,
            ResetPrefixCache: sleep.reset_prefix_cache,
            CollectiveRpc: self._collective_rpc,
        }

    def add_functions(self, functions: dict[type, Callable[[Any], Awaitable[UtilityAnswer]]]) -> None:
        """Add functions for further types of calls, which exist only once the core is ready."""
        self._functions |= functions

    def receive(self, command: ControlCommand | UndecodableCall) -> None:
        """Start a call, unless its id is known. Does not block."""
        call_id = command.call_id
        if call_id in self._recent_ids:
            return
        self._recent_ids[call_id] = None
        if len(self._recent_ids) > MAX_KNOWN_CALLS:
            self._recent_ids.popitem(last=False)
        if isinstance(command, UndecodableCall):
            work = self._refuse(call_id, ValidationError(f"the engine cannot read the call: {command.reason}"))
        elif self._is_closed:
            work = self._refuse(call_id, EngineDeadError("the engine is stopping"))
        else:
            work = self._carry_out(command)
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel the calls in flight, reply to their callers, and refuse further calls."""
        self._is_closed = True
        tasks = {*self._tasks}
        # Each cancellation ends one wait of a call, so repeat it: the last wait is that for the reply.
        while tasks:
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=LEAVE_PATIENCE_S)

    async def _carry_out(self, command: ControlCommand) -> None:
        try:
            async with self._turn_of(command.call):
                if await self._calls.now_ms() >= command.expires_at_ms:
                    raise EngineTimeoutError("the call expired before the engine could start it")
                if not isinstance(command.call, _QUERIES):
                    log.info("control_call", call=type(command.call).__name__, call_id=command.call_id)
                answer = await self._functions.get(type(command.call), self._core.call)(command.call)
        except asyncio.CancelledError:
            await self._refuse(command.call_id, EngineDeadError("the engine is stopping and has cancelled the call"))
            raise
        except PenstockError as error:
            await self._refuse(command.call_id, error)
        except Exception as error:
            log.exception("control_call_failed", call=type(command.call).__name__)
            await self._refuse(command.call_id, EngineCallError(f"{type(error).__name__}: {error}"))
        else:
            await self._calls.reply(ControlReply(call_id=command.call_id, engine_id=self._engine_id, answer=answer))

    def _turn_of(self, call: Utility) -> AbstractAsyncContextManager[None]:
        return nullcontext() if isinstance(call, _QUERIES) else self._turn

    async def _collective_rpc(self, call: CollectiveRpc) -> UtilityAnswer:
        try:
            async with asyncio.timeout(call.timeout_s):
                return await self._core.call(call)
        except TimeoutError:
            raise EngineTimeoutError(
                f"RPC method {shown(call.method)} did not return within {call.timeout_s:g} s; it continues to run"
            ) from None

    async def _refuse(self, call_id: str, error: PenstockError) -> None:
        failure = CallError(error.code, str(error))
        await self._calls.reply(ControlReply(call_id=call_id, engine_id=self._engine_id, error=failure))


def decode_command(data: bytes) -> CancelCommand | ControlCommand | UndecodableCall:
    """Read what came on an engine's channel.

    Raises:
        msgspec.DecodeError: it is nothing that could be answered.
    """
    try:
        return msgspec.msgpack.decode(data, type=EngineCommand)
    except msgspec.ValidationError as error:
        fields = msgspec.msgpack.decode(data)
        if isinstance(fields, list) and len(fields) > 2 and fields[0] == "control" and isinstance(fields[2], str):
            return UndecodableCall(fields[2], str(error))
        raise
