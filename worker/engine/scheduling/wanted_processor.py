"""A logits processor that a request has chosen, as far as a request has to know: it carries it to the sampler."""

from __future__ import annotations

from typing import Any, Protocol


class WantedProcessor(Protocol):
    """What makes a processor for one request, whenever that comes into a batch."""

    @property
    def name(self) -> str:
        """By which it was chosen."""
        ...

    def make(self) -> Any:
        """Return the processor (``engine/logits_processors.py``)."""
        ...
