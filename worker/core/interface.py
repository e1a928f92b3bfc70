"""Interface of an engine core to the loop that drives it.

``worker.engine`` implements it for Penstock's own engine, ``worker.other_engines`` for vLLM and HTTP servers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from ...shared.messages.core import (
    EngineCoreOutput,
    LeaveWave,
    Ready,
    SchedulerStats,
    StartWave,
    UtilityCall,
    UtilityOutput,
)
from ...shared.messages.requests import EngineCoreRequest
from ...shared.stats import StepStats
from ..config.engine_config import EngineConfig
from ..processes.progress import ProgressWriter


class Core(Protocol):
    """Computes the tokens of requests, without process, socket or clock. One thread calls it."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do any work."""
        ...

    @property
    def num_unfinished_requests(self) -> int: ...

    @property
    def device_memory_bytes(self) -> int:
        """Bytes of accelerator memory in use; 0 on a CPU. Reading it may cost as much as a small step."""
        ...

    @property
    def step_fn(self) -> Callable[[], list[EngineCoreOutput]]:
        """The function that computes one batch and returns its outputs.

        An exception ends the process. A core that knows which request caused an error ends only that request.
        """
        ...

    def add_request(self, message: EngineCoreRequest, /) -> EngineCoreOutput | None:
        """Queue a request; return its final output if it is refused, or was already complete when resumed."""
        ...

    def abort_requests(self, request_ids: list[str], /) -> None:
        """Stop computing these requests without an output. Unknown and finished ones are ignored."""
        ...

    def settle(self) -> list[EngineCoreOutput]:
        """Wait for the batches in flight and return their outputs. Call it before anything but a step."""
        ...

    def stats(self) -> SchedulerStats:
        """Return the state of requests and KV cache, without ``device_memory_bytes``."""
        ...

    def take_step_stats(self) -> StepStats | None:
        """Return the statistics of the last step; None if they are unknown or were already returned."""
        ...

    def take_lora_digests(self) -> list[str] | None:
        """Return the digests of the loaded adapters, sorted; None if they are unchanged since the last call."""
        ...

    @property
    def prepare_more(self) -> Callable[[], bool]:
        """The function that does a part of what makes later steps faster; it returns whether a part is left.

        Called between requests, when a step would do no work.
        """
        ...

    def check_invariants(self) -> None:
        """Verify the bookkeeping. Called whenever the core is idle."""
        ...


class GroupCore(ABC):
    """A ``Core`` that is a rank of a data-parallel group. Its ``stats`` report its wave."""

    @abstractmethod
    def handle_wave_message(self, message: StartWave | LeaveWave) -> None:
        """Handle a message from another rank or from an operator."""


class Control(Protocol):
    """Answers control calls between two steps."""

    def answer(self, message: UtilityCall, /) -> UtilityOutput | None:
        """Run the call; return its answer, which may be an error, or None to be called again after the next step."""
        ...


class Engine(Protocol):
    """A core that can take requests, its control calls, and the message that announces it to the worker process."""

    @property
    def core(self) -> Core: ...

    @property
    def control(self) -> Control: ...

    @property
    def ready(self) -> Ready: ...

    def close(self) -> None:
        """End the threads and processes that it started. Called after the loop has ended normally."""
        ...


# Builds the engine of a configuration; raises ConfigurationError or ModelLoadError if they do not fit.
BuildEngine = Callable[[EngineConfig, ProgressWriter], Engine]
