"""Methods that an engine's operator has registered, called by name; under the rules of ``calls``."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import ValidationError
from ..values.encodable import check_text
from ..values.timeouts import check_timeout


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
