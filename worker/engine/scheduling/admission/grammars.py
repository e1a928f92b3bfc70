"""Interface through which the core compiles a request's grammar before it queues the request in the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from .....shared.errors import UnsupportedParameterError
from .....shared.messages.outcome import RequestError
from ..request import Request


class Grammars(Protocol):
    """Requests that wait for their grammars; implemented by ``structured/admission.py``."""

    def __len__(self) -> int: ...

    def __contains__(self, request_id: object) -> bool: ...

    def add(self, request: Request) -> None:
        """Compile the grammar of a request with ``structured_outputs``.

        Raises:
            ValidationError: it cannot be compiled.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests; unknown ones are ignored."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until a grammar is ready."""
        ...

    def pop_ready(self) -> Sequence[tuple[Request, RequestError | None]]:
        """Return the requests that no longer wait, in order: each with its constraint, or with the error."""
        ...


class NoGrammars:
    """Refuses every request with a grammar."""

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

    def pop_ready(self) -> Sequence[tuple[Request, RequestError | None]]:
        return ()
