"""Interface of an engine core to the loop that drives it.

``worker.engine`` implements it for Penstock's own engine, ``worker.other_engines`` for vLLM and HTTP servers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from ...shared.messages.from_core import EngineCoreOutput, Ready, SchedulerStats, UtilityOutput
from ...shared.messages.requests import EngineCoreRequest
from ...shared.messages.to_core import UtilityCall
from ...shared.messages.waves import LeaveWave, StartWave
from ...shared.stats.engine import StepStats
from ..config.engine_config import EngineConfig
from ..progress import ProgressWriter


class Core(Protocol):
    """Everything between a request and its tokens, without process, socket or clock. One thread calls it."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        ...

    @property
    def num_unfinished_requests(self) -> int: ...

    @property
    def device_memory_bytes(self) -> int:
        """What it takes of an accelerator's memory; 0 on a CPU. May cost as much as a small step."""
        ...

    @property
    def step_fn(self) -> Callable[[], list[EngineCoreOutput]]:
        """Computes one batch, and returns what it gave.

        What it raises ends the process: a core that can tell which request is to blame ends that one alone.
        """
        ...

    def add_request(self, message: EngineCoreRequest, /) -> EngineCoreOutput | None:
        """Queue a request, or return its end if it has one already: it is refused, or was complete when resumed."""
        ...

    def abort_requests(self, request_ids: list[str], /) -> None:
        """Stop computing these, without a word; unknown and finished ones are ignored."""
        ...

    def settle(self) -> list[EngineCoreOutput]:
        """Have nothing in flight, and return the outputs of what was. Before anything but a step."""
        ...

    def stats(self) -> SchedulerStats:
        """Where requests and KV cache stand; ``device_memory_bytes`` is left out."""
        ...

    def take_step_stats(self) -> StepStats | None:
        """Return what the last step did; None if that is not known, or was asked for before."""
        ...

    def take_lora_digests(self) -> list[str] | None:
        """Return those of the adapters that are loaded, sorted; None if they are as they were when asked before."""
        ...

    def check_invariants(self) -> None:
        """Verify the bookkeeping; called whenever there is nothing else to do."""
        ...


class GroupCore(ABC):
    """What a core that is a rank of a data-parallel group has beside ``Core``; its ``stats`` tell of its wave."""

    @abstractmethod
    def hear(self, message: StartWave | LeaveWave) -> None:
        """Take what another rank, or an operator, has said."""


class Control(Protocol):
    """What a core can be asked between two steps."""

    def answer(self, message: UtilityCall, /) -> UtilityOutput | None:
        """Do what is asked; an error of any kind becomes the answer. None: ask again after the next step."""
        ...


class Engine(Protocol):
    """A core that can take requests, what else it can be asked, and what to tell the worker process about it."""

    @property
    def core(self) -> Core: ...

    @property
    def control(self) -> Control: ...

    @property
    def ready(self) -> Ready: ...

    def close(self) -> None:
        """End what it has started beside itself: the loop has ended in order."""
        ...


# Loads what a configuration says, and raises ConfigurationError or ModelLoadError where it does not fit.
BuildEngine = Callable[[EngineConfig, ProgressWriter], Engine]
