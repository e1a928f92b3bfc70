"""What the core asks of whoever loads adapters, before a request with one comes to the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from .....shared.errors import UnsupportedParameterError
from .....shared.messages.outcome import RequestError
from .....shared.params.lora import LoRARequest
from ..request import Request
from .residency import NoResidency, Residency

_NOT_SERVED = "this engine serves no adapters; have it started with --enable-lora"


class Adapters(Residency, Protocol):
    """Adapters, and requests that wait for theirs; ``engine/adapters/library.py`` has it."""

    def __len__(self) -> int:
        """Requests that wait."""
        ...

    def __contains__(self, request_id: object) -> bool:
        """Whether that request waits."""
        ...

    def check(self, adapter: LoRARequest | None) -> None:
        """Refuse what no request may have here.

        Raises:
            UnsupportedParameterError: an adapter, and the engine serves none.
        """
        ...

    def add(self, request: Request) -> bool:
        """Give a request with a ``lora_request`` its adapter. False if it has to wait: ``take_ready`` gives it back."""
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests; unknown ones are ignored."""
        ...

    @property
    def is_loading(self) -> bool:
        """Whether something is read, for a request or for an operator."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until something has been done, at most ``timeout_s``."""
        ...

    def take_ready(self) -> Sequence[tuple[Request, RequestError | None]]:
        """Requests that wait no longer, in their order: each with its adapter, or with why it has none."""
        ...

    def take_digests(self) -> list[str] | None:
        """Those of all adapters that are loaded, sorted, if they have changed since it was asked last."""
        ...


class NoAdapters(NoResidency):
    """No request may have one."""

    def __len__(self) -> int:
        return 0

    def __contains__(self, request_id: object) -> bool:
        return False

    def check(self, adapter: LoRARequest | None) -> None:
        if adapter is not None:
            raise UnsupportedParameterError(f"lora_request {adapter.lora_name!r}: {_NOT_SERVED}")

    def add(self, request: Request) -> bool:
        self.check(request.lora_request)
        return True

    def abort(self, request_ids: Iterable[str]) -> None:
        pass

    @property
    def is_loading(self) -> bool:
        return False

    def wait(self, timeout_s: float) -> None:
        pass

    def take_ready(self) -> Sequence[tuple[Request, RequestError | None]]:
        return ()

    def take_digests(self) -> list[str] | None:
        return None
