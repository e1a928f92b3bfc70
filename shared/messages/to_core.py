"""Messages of a worker process to its engine core, in addition to requests."""

from __future__ import annotations

import msgspec

from ..control.calls import Utility
from .requests import EngineCoreRequest
from .waves import LeaveWave, StartWave


class AbortRequests(msgspec.Struct, array_like=True, tag="abort"):
    """Stop these requests; unknown and finished ids are ignored."""

    request_ids: list[str]


class Configure(msgspec.Struct, array_like=True, tag="configure"):
    """The worker's answer to ``Hello``: the engine's whole configuration, as JSON (``worker.config.EngineConfig``)."""

    config_json: bytes


class UtilityCall(msgspec.Struct, array_like=True, tag="utility"):
    """A question to the engine core that is answered by a ``UtilityOutput`` of the same ``call_id``."""

    call_id: int
    call: Utility


class Shutdown(msgspec.Struct, array_like=True, tag="shutdown"):
    """Leave the busy loop and exit with status 0."""


CoreInput = EngineCoreRequest | AbortRequests | Configure | UtilityCall | Shutdown | StartWave | LeaveWave
