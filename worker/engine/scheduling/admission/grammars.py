"""What the core asks of whoever compiles grammars, before a request with one comes to the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from .....shared.errors import UnsupportedParameterError
from .....shared.messages.outcome import RequestError
from ..request import Request


class Grammars(Protocol):
    """Requests that wait for their grammars; ``structured/admission.py`` has it."""

    def __len__(self) -> int: ...

    def __contains__(self, request_id: object) -> bool: ...

    def add(self, request: Request) -> None:
        """Take a request with ``structured_outputs``.

        Raises:
            ValidationError: they cannot be compiled.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests; unknown ones are ignored."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until something has been done, at most ``timeout_s``."""
        ...

    def take_ready(self) -> Sequence[tuple[Request, RequestError | None]]:
        """Requests that wait no longer, in their order: each with its constraint, or with why it has none."""
        ...


class NoGrammars:
    """No request may have one."""

    def __len__(self) -> int:
        return 0

    def __contains__(self, request_id: object) -> bool:
        return False

    def add(self, request: Request) -> None:
        raise UnsupportedParameterError("structured_outputs: this engine was made without grammars")

    def abort(self, request_ids: Iterable[str]) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        pass

    def take_ready(self) -> Sequence[tuple[Request, RequestError | None]]:
        return ()
