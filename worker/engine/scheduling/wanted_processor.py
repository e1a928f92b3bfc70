"""Interface of a logits processor that a request has chosen. The request carries it to the sampler."""

from __future__ import annotations

from typing import Any, Protocol


class ProcessorFactory(Protocol):
    """Creates a logits processor for one request, each time that the request enters a batch."""

    @property
    def name(self) -> str:
        """Name by which the request chose the processor."""
        ...

    def make(self) -> Any:
        """Create the processor (``engine/logits_processors.py``)."""
        ...
