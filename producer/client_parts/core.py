"""Base class of all parts of the client, and control calls to engines: from sending a call to the last answer."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, Generic, TypedDict, TypeVar

import msgspec

from ...shared.broker import EngineCalls, Queue
from ...shared.connection import CommandConnection, Subscriber
from ...shared.control.calls import ControlCommand, ControlReply, Utility
from ...shared.deployment.presence import read_heartbeats
from ...shared.deployment.records import EngineHeartbeat, ModelCard
from ...shared.errors import (
    BrokerError,
    EngineCallError,
    EngineDeadError,
    EngineNotFoundError,
    EngineTimeoutError,
    PenstockError,
    from_wire,
)
from ...shared.keys import Keys
from ...shared.partitions import open_queue
from ...shared.process.waiting import wait_at_most
from ...shared.values.arguments import check_argument_names
from ...shared.values.checks import check_timeout
from ...shared.values.shown import shown
from ..control.operations import Operations
from ..inputs.lora import AdapterResolver
from ..requests.health import DEAF_STATES, Health, HealthWatch
from ..requests.request_builder import RequestBuilder
from ..requests.single_requests import SingleRequests

CALL_TIMEOUT_S = 60.0
# A call is sent again, and the engine's heartbeat checked, until it answers: its connection may have been lost briefly.
RESEND_INTERVAL_S = 0.5
A = TypeVar("A")
_decoder = msgspec.msgpack.Decoder(ControlReply)


class CallOptions(TypedDict, total=False):
    """Options of every control call.

    Args:
        engine_id: as shown by ``worker list``; by default all engines of the model that can receive calls.
        model: may be left out as for a request.
        timeout_s: how long to wait for all answers (60).
    """

    engine_id: str | None
    model: str | None
    timeout_s: float


class CallRound(Generic[A]):
    """A control call and its answers. Run it once.

    Args:
        kind: the expected type of an answer.
    """

    def __init__(
        self,
        connection: CommandConnection,
        subscriber: Subscriber,
        keys: Keys,
        model: str,
        call: Utility,
        kind: type[A],
    ) -> None:
        self._connection = connection
        self._subscriber = subscriber
        self._keys = keys
        self._model = model
        self._calls = EngineCalls(connection, keys.model(model))
        self._call = call
        self._kind = kind
        self._call_id = uuid.uuid4().hex
        self._name = str(call.__struct_config__.tag)
        self._waiting: dict[str, EngineHeartbeat] = {}
        self._answers: dict[str, A] = {}
        self._errors: dict[str, PenstockError] = {}
        self._has_outcome = asyncio.Event()

    async def run(self, options: CallOptions) -> dict[str, A]:
        """Call the selected engines, and return their answers by engine id.

        Raises:
            ValidationError: an option is wrong.
            EngineNotFoundError, EngineDeadError: no engine can be called; nothing was sent.
            EngineCallError: an engine failed, died or did not answer in time; carries all answers and errors.
        """
        check_argument_names(f"the call {self._name}", options, CallOptions.__annotations__)
        timeout_s = options.get("timeout_s", CALL_TIMEOUT_S)
        check_timeout("timeout_s", timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                self._waiting = await self._select_engines(options.get("engine_id"))
                await self._send_until_answered(timeout_s)
        except TimeoutError:
            if not (self._waiting or self._answers or self._errors):
                raise EngineTimeoutError(f"Redis did not list the engines within {timeout_s:g} s") from None
            for engine_id in list(self._waiting):
                self._record_outcome(
                    engine_id,
                    EngineTimeoutError(f"no answer within {timeout_s:g} s; the engine may still run the call"),
                )
        if self._errors:
            raise self._failure()
        return self._answers

    async def _select_engines(self, engine_id: str | None) -> dict[str, EngineHeartbeat]:
        heartbeats = {heartbeat.engine_id: heartbeat for heartbeat in await self._read_heartbeats()}
        callable_engines = {
            name: heartbeat for name, heartbeat in heartbeats.items() if heartbeat.state not in DEAF_STATES
        }
        if engine_id is None:
            if not callable_engines:
                causes = [_describe(heartbeat) for heartbeat in heartbeats.values()] or ["none has a heartbeat"]
                raise EngineDeadError(f"no engine of model {shown(self._model)} can be called: {'; '.join(causes)}")
            return callable_engines
        if not isinstance(engine_id, str) or engine_id not in heartbeats:
            known_ids = ", ".join(sorted(heartbeats)) or "none"
            raise EngineNotFoundError(
                f"no engine {shown(engine_id)} of model {shown(self._model)} has a heartbeat; "
                f"engines with one: {known_ids}"
            )
        if engine_id not in callable_engines:
            raise EngineDeadError(f"{_describe(heartbeats[engine_id])}; it cannot be called now")
        return {engine_id: callable_engines[engine_id]}

    async def _send_until_answered(self, timeout_s: float) -> None:
        expires_at_ms = await self._calls.now_ms() + int(timeout_s * 1000)
        command = ControlCommand(call_id=self._call_id, call=self._call, expires_at_ms=expires_at_ms)
        # Subscribe before sending the call, so that a reply can only be missed if the connection is lost.
        subscription = await self._subscriber.subscribe(
            self._calls.keys.call_replies(self._call_id), self._handle_reply
        )
        try:
            while self._waiting:
                await asyncio.gather(*(self._calls.send(engine_id, command) for engine_id in self._waiting))
                await wait_at_most(RESEND_INTERVAL_S, self._wait_for_outcomes())
                if self._waiting:
                    await self._check_engines()
        finally:
            self._subscriber.unsubscribe(subscription)

    async def _wait_for_outcomes(self) -> None:
        while self._waiting:
            self._has_outcome.clear()
            await self._has_outcome.wait()

    async def _check_engines(self) -> None:
        """Read replies that were missed, and fail the engines that have exited without a reply."""
        # Read the heartbeats first: then the answer of an engine that answered and exited is still found.
        heartbeats = {heartbeat.engine_id: heartbeat for heartbeat in await self._read_heartbeats()}
        for data in await self._calls.read_replies(self._call_id, list(self._waiting)):
            self._handle_reply(data)
        for engine_id, called in list(self._waiting.items()):
            heartbeat = heartbeats.get(engine_id)
            if heartbeat is None or heartbeat.state in DEAF_STATES or heartbeat.worker_pid != called.worker_pid:
                cause = "it has no heartbeat" if heartbeat is None else _describe(heartbeat)
                self._record_outcome(engine_id, EngineDeadError(f"the engine exited before it answered: {cause}"))

    def _handle_reply(self, data: bytes) -> None:
        try:
            reply = _decoder.decode(data)
        except msgspec.ValidationError as error:  # an answer of a later version
            _, _, engine_id, *_ = msgspec.msgpack.decode(data)
            self._record_outcome(engine_id, BrokerError(f"the engine's answer cannot be read: {error}"))
            return
        if reply.error is not None:
            self._record_outcome(reply.engine_id, from_wire(reply.error.code, reply.error.message, retryable=False))
        elif isinstance(reply.answer, self._kind):
            self._record_outcome(reply.engine_id, reply.answer)
        else:
            kind = type(reply.answer).__name__
            self._record_outcome(
                reply.engine_id, BrokerError(f"the engine answered with {kind} instead of {self._kind.__name__}")
            )

    def _record_outcome(self, engine_id: str, outcome: A | PenstockError) -> None:
        """Record the outcome of the call at an engine. Later outcomes of this engine are ignored."""
        if self._waiting.pop(engine_id, None) is None:
            return
        if isinstance(outcome, PenstockError):
            self._errors[engine_id] = outcome
        else:
            self._answers[engine_id] = outcome
        self._has_outcome.set()

    def _failure(self) -> EngineCallError:
        num_called = len(self._errors) + len(self._answers)
        causes = "; ".join(f"{engine_id}: {error}" for engine_id, error in sorted(self._errors.items()))
        return EngineCallError(
            f"{self._name} failed at {len(self._errors)} of {num_called} engines: {causes}",
            answers=dict[str, Any](self._answers),
            errors=self._errors,
        )

    async def _read_heartbeats(self) -> list[EngineHeartbeat]:
        heartbeats = await read_heartbeats(self._connection.execute, self._keys)
        return [heartbeat for heartbeat in heartbeats if heartbeat.model == self._model]


def _describe(heartbeat: EngineHeartbeat) -> str:
    error = f" ({heartbeat.error})" if heartbeat.error else ""
    return f"engine {heartbeat.engine_id} is {heartbeat.state}{error}"


class ClientCore:
    """The base of each part of ``Client``.

    Args:
        commands, subscriber: the client's two connections.
        keys: the keys of its namespace.
        requests: enqueues and follows requests.
        builder: builds requests from a caller's arguments.
        adapters: resolves the adapters that a caller names.
        health: the known state of engines.
    """

    def __init__(
        self,
        commands: CommandConnection,
        subscriber: Subscriber,
        keys: Keys,
        requests: SingleRequests,
        builder: RequestBuilder,
        adapters: AdapterResolver,
        health: Health,
    ) -> None:
        self._commands = commands
        self._subscriber = subscriber
        self._keys = keys
        self._requests = requests
        self._builder = builder
        self._adapters = adapters
        self._health = health
        self._health_watch = HealthWatch(health)
        self._operations = Operations(commands, keys)

    async def _card(self, model: str | None) -> ModelCard:
        """Return the card of a model; the model may be left out as for a request."""
        return await self._builder.card(model)

    async def _queue(self, model: str | None) -> Queue:
        """Return the queue of a model."""
        return await open_queue(self._commands, self._keys, (await self._card(model)).model)

    async def _call_engines(self, call: Utility, kind: type[A], options: CallOptions) -> dict[str, A]:
        """Send ``call`` and return the engines' answers, of type ``kind``, by engine id."""
        card = await self._card(options.get("model"))
        return await CallRound(self._commands, self._subscriber, self._keys, card.model, call, kind).run(options)
