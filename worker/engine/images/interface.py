"""Interface through which the core completes a message with images before it becomes a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from ....shared.errors import UnsupportedParameterError
from ....shared.messages.outcome import RequestError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.stats import ImageStats
from ..scheduling.prompt_inputs import ImageSpan


class ReadyMessage(NamedTuple):
    """A message that no longer waits.

    Args:
        message: message with the tokens of its images in its prompt, and without ``images``.
        spans: positions of the images.
        error: reason why there is no such prompt; None if there is.
    """

    message: EngineCoreRequest
    spans: tuple[ImageSpan, ...]
    error: RequestError | None


class Images(Protocol):
    """Messages that wait for their images; implemented by ``images/admission.py``."""

    def __len__(self) -> int: ...

    def __contains__(self, request_id: object) -> bool: ...

    def add(self, message: EngineCoreRequest) -> None:
        """Process a message with ``images``.

        Raises:
            ValidationError: the message is invalid for a reason that is known before processing.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests; unknown ones are ignored."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until an image has been processed."""
        ...

    def pop_ready(self) -> Sequence[ReadyMessage]:
        """Return the messages that no longer wait, in order."""
        ...

    def stats(self) -> ImageStats | None:
        """Return counters and cache sizes; None if no request may have an image."""
        ...

    def forget_processed(self) -> int:
        """Clear the cache of processed images; return how many it had."""
        ...

    def forget_encoded(self) -> int:
        """Clear the cache of features; return how many images it had."""
        ...


class NoImages:
    """Refuses every message with images.

    Args:
        reason: reason in the error message.
    """

    def __init__(self, reason: str = "this engine was made without images") -> None:
        self._reason = reason

    def __len__(self) -> int:
        return 0

    def __contains__(self, request_id: object) -> bool:
        return False

    def add(self, message: EngineCoreRequest) -> None:
        raise UnsupportedParameterError(f"images: {self._reason}; send text alone, or ask for another model")

    def abort(self, request_ids: Iterable[str]) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        pass

    def pop_ready(self) -> Sequence[ReadyMessage]:
        return ()

    def stats(self) -> ImageStats | None:
        return None

    def forget_processed(self) -> int:
        return 0

    def forget_encoded(self) -> int:
        return 0
