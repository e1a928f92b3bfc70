"""One control call to one engine or to all of a model, from its sending to each engine's answer."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from typing import Any, Generic, TypedDict, TypeVar

import msgspec

from ..shared.broker import EngineCalls
from ..shared.connection import CommandConnection, Subscriber
from ..shared.control.calls import ControlCommand, ControlReply, Utility
from ..shared.deployment.heartbeats import read_heartbeats
from ..shared.deployment.records import EngineHeartbeat
from ..shared.errors import (
    BrokerError,
    EngineCallError,
    EngineDeadError,
    EngineNotFoundError,
    EngineTimeoutError,
    PenstockError,
    ValidationError,
    from_wire,
)
from ..shared.keys import Keys
from ..shared.values.shown import shown
from ..shared.values.timeouts import check_timeout
from .requests.health import DEAF_STATES

CALL_TIMEOUT_S = 60.0
# A call is sent again until it is answered, and the engine looked at: it may have lost its connection for a moment.
LOOK_EVERY_S = 0.5

A = TypeVar("A")

_decoder = msgspec.msgpack.Decoder(ControlReply)


class CallOptions(TypedDict, total=False):
    """Options of every control call.

    Args:
        engine_id: as ``worker list`` shows it; all engines of the model that can hear by default.
        model: may be left out as for a request.
        timeout_s: how long to wait for all answers (60).
    """

    engine_id: str | None
    model: str | None
    timeout_s: float


class CallRound(Generic[A]):
    """A call and what has come of it. To be run once.

    Args:
        kind: the type of a right answer.
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
        self._came = asyncio.Event()

    async def run(self, options: CallOptions) -> dict[str, A]:
        """Ask the engines meant and return their answers by engine id.

        Raises:
            ValidationError: an option is wrong.
            EngineNotFoundError, EngineDeadError: there is nobody to ask; nothing was sent.
            EngineCallError: an engine failed, died or did not answer in time; carries all answers and errors.
        """
        unknown = options.keys() - CallOptions.__annotations__.keys()
        if unknown:
            raise ValidationError(f"unknown option of a control call: {', '.join(sorted(unknown))}")
        timeout_s = options.get("timeout_s", CALL_TIMEOUT_S)
        check_timeout("timeout_s", timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                self._waiting = await self._engines_meant(options.get("engine_id"))
                await self._ask(timeout_s)
        except TimeoutError:
            if not (self._waiting or self._answers or self._errors):
                raise EngineTimeoutError(f"Redis did not say within {timeout_s:g} s which engines there are") from None
            for engine_id in list(self._waiting):
                self._settle(engine_id, EngineTimeoutError(f"no answer within {timeout_s:g} s; it may come to it yet"))
        if self._errors:
            raise self._failure()
        return self._answers

    async def _engines_meant(self, engine_id: str | None) -> dict[str, EngineHeartbeat]:
        beats = {beat.engine_id: beat for beat in await self._read_heartbeats()}
        able = {name: beat for name, beat in beats.items() if beat.state not in DEAF_STATES}
        if engine_id is None:
            if not able:
                causes = [_describe(beat) for beat in beats.values()] or ["none beats"]
                raise EngineDeadError(f"no engine of model {shown(self._model)} can be asked: {'; '.join(causes)}")
            return able
        if not isinstance(engine_id, str) or engine_id not in beats:
            known = ", ".join(sorted(beats)) or "none"
            raise EngineNotFoundError(
                f"no engine {shown(engine_id)} of model {shown(self._model)} beats (those that do: {known})"
            )
        if engine_id not in able:
            raise EngineDeadError(f"{_describe(beats[engine_id])}; it cannot be asked now")
        return {engine_id: able[engine_id]}

    async def _ask(self, timeout_s: float) -> None:
        expires_at_ms = await self._calls.now_ms() + int(timeout_s * 1000)
        command = ControlCommand(call_id=self._call_id, call=self._call, expires_at_ms=expires_at_ms)
        # Confirmed before the call goes out, so that a reply can only be missed with its connection.
        subscription = await self._subscriber.subscribe(self._calls.keys.call_replies(self._call_id), self._take)
        try:
            while self._waiting:
                await asyncio.gather(*(self._calls.send(engine_id, command) for engine_id in self._waiting))
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._all_replies()
                if self._waiting:
                    await self._look()
        finally:
            self._subscriber.unsubscribe(subscription)

    async def _all_replies(self) -> None:
        while self._waiting:
            self._came.clear()
            await self._came.wait()

    async def _look(self) -> None:
        """Read replies that were missed, and give up engines that have gone without one."""
        # The heartbeats first: who answered before it went has answered.
        beats = {beat.engine_id: beat for beat in await self._read_heartbeats()}
        for data in await self._calls.read_replies(self._call_id, list(self._waiting)):
            self._take(data)
        for engine_id, asked in list(self._waiting.items()):
            beat = beats.get(engine_id)
            if beat is None or beat.state in DEAF_STATES or beat.worker_pid != asked.worker_pid:
                cause = "it is gone" if beat is None else _describe(beat)
                self._settle(engine_id, EngineDeadError(f"the engine that was asked went before it answered: {cause}"))

    def _take(self, data: bytes) -> None:
        try:
            reply = _decoder.decode(data)
        except msgspec.ValidationError as error:  # an answer of a later version
            _, _, engine_id, *_ = msgspec.msgpack.decode(data)
            self._settle(engine_id, BrokerError(f"its answer cannot be read: {error}"))
            return
        if reply.error is not None:
            self._settle(reply.engine_id, from_wire(reply.error.code, reply.error.message, retryable=False))
        elif isinstance(reply.answer, self._kind):
            self._settle(reply.engine_id, reply.answer)
        else:
            kind = type(reply.answer).__name__
            self._settle(reply.engine_id, BrokerError(f"it answered with {kind} instead of {self._kind.__name__}"))

    def _settle(self, engine_id: str, outcome: A | PenstockError) -> None:
        """Note how the call went at an engine; what comes later counts no more."""
        if self._waiting.pop(engine_id, None) is None:
            return
        if isinstance(outcome, PenstockError):
            self._errors[engine_id] = outcome
        else:
            self._answers[engine_id] = outcome
        self._came.set()

    def _failure(self) -> EngineCallError:
        num_asked = len(self._errors) + len(self._answers)
        causes = "; ".join(f"{engine_id}: {error}" for engine_id, error in sorted(self._errors.items()))
        return EngineCallError(
            f"{self._name} failed at {len(self._errors)} of {num_asked} engines: {causes}",
            answers=dict[str, Any](self._answers),
            errors=self._errors,
        )

    async def _read_heartbeats(self) -> list[EngineHeartbeat]:
        beats = await read_heartbeats(self._connection.execute, self._keys)
        return [beat for beat in beats if beat.model == self._model]


def _describe(beat: EngineHeartbeat) -> str:
    return f"engine {beat.engine_id} is {beat.state}" + (f" ({beat.error})" if beat.error else "")
