"""Receive control calls from Redis and answer each once, in the worker process or in the core.

Calls are executed one after the other in the order of arrival, except for queries. Callers repeat a call that may have
been lost: a call with a known id is ignored, since its reply is in Redis or will be.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import structlog

from ....shared.broker import EngineCalls
from ....shared.control.calls import CallError, ControlCommand, ControlReply, Utility, UtilityAnswer
from ....shared.control.engine import CollectiveRpc, IsSleeping, Sleep, SleepState, StartProfile, StopProfile, WakeUp
from ....shared.control.model import Detokenize, DetokenizedText, GetTokenizer, Tokenize, TokenizedText, TokenizerFile
from ....shared.errors import EngineCallError, EngineDeadError, EngineTimeoutError, PenstockError, ValidationError
from ....shared.messages.supervision import CancelCommand, EngineCommand, SleepOrder, SleepOrderDone
from ....shared.values.shown import shown
from ...text.thread import LONG_TEXT_CHARS, TextThread
from ...text.tokenizer import TOKENIZER_FILE, TextCodec
from ..core.client import CoreClient
from ..redis_waiting import LEAVE_PATIENCE_S
from .profile import WorkerProfile
from .shared_device import OwnDevice

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
        beat: writes the heartbeat. Called before the reply to a call that changes the state of the engine.
        device: holds back calls of operators until the supervisor has done what they need.
    """

    def __init__(
        self,
        engine_id: str,
        calls: EngineCalls,
        core: CoreClient,
        beat: Callable[[], Awaitable[None]],
        device: OwnDevice,
    ) -> None:
        self._engine_id = engine_id
        self._calls = calls
        self._core = core
        self._beat = beat
        self._device = device
        self._tasks: set[asyncio.Task[None]] = set()
        self._recent_ids: OrderedDict[str, None] = OrderedDict()
        self._turn = asyncio.Lock()
        self._is_closed = False
        profile = WorkerProfile(core)
        self._functions: dict[type, Callable[[Any], Awaitable[UtilityAnswer]]] = {
            CollectiveRpc: self._collective_rpc,
            StartProfile: profile.start_both,
            StopProfile: profile.stop_both,
        }

    def add_functions(self, functions: dict[type, Callable[[Any], Awaitable[UtilityAnswer]]]) -> None:
        """Add functions for further types of calls, or replace some: more calls have one once the core is ready."""
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
            reason = f"the engine cannot read the call: {command.reason}"
            self._start(self._reply(call_id, CallError(ValidationError.code, reason)))
        else:
            self._start(self._carry_out(command))

    def receive_order(self, order: SleepOrder, report: Callable[[SleepOrderDone], None]) -> None:
        """Start a call of the supervisor, and report its outcome. Does not block."""
        self._start(self._carry_out_order(order, report))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, patience_s: float = 0.0) -> None:
        """Refuse further calls. Cancel those in flight after ``patience_s``, and reply to their callers."""
        self._is_closed = True
        tasks = {*self._tasks}
        if tasks and patience_s:
            _, tasks = await asyncio.wait(tasks, timeout=patience_s)
        # Each cancellation ends one wait of a call, so repeat it: the last wait is that for the reply.
        while tasks:
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=LEAVE_PATIENCE_S)

    async def _carry_out(self, command: ControlCommand) -> None:
        async def execute() -> UtilityAnswer:
            # Outside of the turn, which the supervisor's order needs.
            await self._device.hold_back(command.call)
            async with self._turn_of(command.call):
                if await self._calls.now_ms() >= command.expires_at_ms:
                    raise EngineTimeoutError("the call expired before the engine could start it")
                return await self._execute(command.call, command.call_id)

        outcome = await self._outcome_of(execute(), command.call)
        self._device.record_outcome(command.call, outcome)
        if isinstance(command.call, Sleep | WakeUp):
            await self._beat()
        await self._reply(command.call_id, outcome)

    async def _carry_out_order(self, order: SleepOrder, report: Callable[[SleepOrderDone], None]) -> None:
        async def execute() -> UtilityAnswer:
            async with self._turn:
                return await self._execute(order.call, f"supervisor-{order.order_id}")

        outcome = await self._outcome_of(execute(), order.call)
        self._device.settle_order(order.call, outcome)
        if isinstance(outcome, CallError):
            report(SleepOrderDone(order_id=order.order_id, error=outcome))
        else:
            assert isinstance(outcome, SleepState)
            report(SleepOrderDone(order_id=order.order_id, state=outcome))

    async def _execute(self, call: Utility, call_id: str) -> UtilityAnswer:
        if not isinstance(call, _QUERIES):
            log.info("control_call", call=type(call).__name__, call_id=call_id)
        return await self._functions.get(type(call), self._core.call)(call)

    async def _outcome_of(self, work: Coroutine[Any, Any, UtilityAnswer], call: Utility) -> UtilityAnswer | CallError:
        """Return the answer of ``work``, or its error. A call that is cancelled still gets its reply."""
        if self._is_closed:
            work.close()
            return CallError(EngineDeadError.code, "the engine is stopping")
        try:
            return await work
        except asyncio.CancelledError:
            return CallError(EngineDeadError.code, "the engine is stopping and has cancelled the call")
        except PenstockError as error:
            return CallError(error.code, str(error))
        except Exception as error:
            log.exception("control_call_failed", call=type(call).__name__)
            return CallError(EngineCallError.code, f"{type(error).__name__}: {error}")

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

    async def _reply(self, call_id: str, outcome: UtilityAnswer | CallError) -> None:
        reply = ControlReply(call_id=call_id, engine_id=self._engine_id)
        if isinstance(outcome, CallError):
            reply.error = outcome
        else:
            reply.answer = outcome
        await self._calls.reply(reply)


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


class TextCalls:
    """Text calls to one model, answered with its tokenizer and chat template; ``folder`` is the model's folder."""

    def __init__(self, folder: Path, codec: TextCodec, max_model_len: int, vocab_size: int) -> None:
        self._folder = folder
        self._codec = codec
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._thread = TextThread("text-call")

    @property
    def functions(self) -> dict[type, Callable[[Any], Awaitable[UtilityAnswer]]]:
        """Functions that answer calls, by type of call."""
        return {Tokenize: self._tokenize, Detokenize: self._detokenize, GetTokenizer: self._get_tokenizer}

    async def _tokenize(self, call: Tokenize) -> TokenizedText:
        num_chars = LONG_TEXT_CHARS + 1 if call.prompt is None else len(call.prompt)
        return await self._thread.run(lambda: self._tokenized(call), num_chars)

    async def _detokenize(self, call: Detokenize) -> DetokenizedText:
        return await self._thread.run(lambda: self._detokenized(call.token_ids), len(call.token_ids))

    async def _get_tokenizer(self, _: GetTokenizer) -> TokenizerFile:
        return TokenizerFile(await asyncio.to_thread(self._compressed_file))

    def _compressed_file(self) -> bytes:
        return zlib.compress((self._folder / TOKENIZER_FILE).read_bytes())

    def _tokenized(self, call: Tokenize) -> TokenizedText:
        token_ids = self._encode(call)
        pieces = [self._codec.token_bytes[token_id] for token_id in token_ids] if call.has_pieces else []
        return TokenizedText(token_ids, self._max_model_len, pieces)

    def _detokenized(self, token_ids: list[int]) -> DetokenizedText:
        for position, token_id in enumerate(token_ids):
            if token_id >= self._vocab_size:
                raise ValidationError(f"tokens[{position}] must be in [0, {self._vocab_size}), got {token_id}")
        return DetokenizedText(self._codec.decode(token_ids, skip_special_tokens=False))

    def _encode(self, call: Tokenize) -> list[int]:
        if call.messages is not None:
            return self._codec.encode_chat(call.messages, call.chat_template_kwargs)
        assert call.prompt is not None
        return self._codec.encode(call.prompt) if call.add_special_tokens else self._codec.encode_chunk(call.prompt)
