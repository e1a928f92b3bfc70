"""What the core asks of whoever makes prompts of images, before a message with some becomes a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from ....shared.errors import UnsupportedParameterError
from ....shared.messages.outcome import RequestError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.stats.images import ImageStats
from ..scheduling.image_spans import ImageSpan


class ReadyMessage(NamedTuple):
    """A message that waits no longer.

    Args:
        message: with the tokens of its images in its prompt, and without ``images``.
        spans: where they are.
        error: why there is no such prompt.
    """

    message: EngineCoreRequest
    spans: tuple[ImageSpan, ...]
    error: RequestError | None


class Images(Protocol):
    """Messages that wait for their images; ``images/admission.py`` has it."""

    def __len__(self) -> int: ...

    def __contains__(self, request_id: object) -> bool: ...

    def add(self, message: EngineCoreRequest) -> None:
        """Take a message with ``images``.

        Raises:
            ValidationError: it can be told at once that there will be no prompt.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests; unknown ones are ignored."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until something has been done, at most ``timeout_s``."""
        ...

    def take_ready(self) -> Sequence[ReadyMessage]:
        """Messages that wait no longer, in their order."""
        ...

    def stats(self) -> ImageStats | None:
        """What was computed and is kept; None where no request may have an image."""
        ...

    def forget_processed(self) -> int:
        """Forget processed images; returns how many."""
        ...

    def forget_encoded(self) -> int:
        """Forget what was computed of images; returns of how many."""
        ...


class NoImages:
    """No request may have one.

    Args:
        reason: why.
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

    def take_ready(self) -> Sequence[ReadyMessage]:
        return ()

    def stats(self) -> ImageStats | None:
        return None

    def forget_processed(self) -> int:
        return 0

    def forget_encoded(self) -> int:
        return 0
