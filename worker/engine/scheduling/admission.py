"""Interfaces of the resources that a request needs before it may run: grammars, adapters, and blocks to read.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ....shared.errors import UnsupportedParameterError
from ....shared.messages.outcome import RequestError
from ....shared.params.lora import LoRARequest
from ....shared.stats import KVOffloadStats
from .ordering import RequestQueue
from .request import Request


class Residency(Protocol):
    """Adapters in slots; implemented by ``engine/adapters/library.py``."""

    def acquire_slot(self, request: Request) -> bool:
        """Reserve a slot for the adapter of ``request``, if it has one, and set ``request.lora_index``.

        Return False if other running requests hold all slots: then ``request`` must wait.
        """
        ...

    def release_slot(self, request: Request) -> None:
        """Release the slot of ``request``, which was preempted or has finished."""
        ...


class NoResidency:
    """Admits every request, since none has an adapter."""

    def acquire_slot(self, request: Request) -> bool:
        return True

    def release_slot(self, request: Request) -> None:
        pass


_NOT_SERVED = "this engine serves no adapters; start it with --enable-lora"


class Adapters(Residency, Protocol):
    """Adapters, and requests that wait for theirs; implemented by ``engine/adapters/library.py``."""

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        ...

    def __contains__(self, request_id: object) -> bool:
        """Return whether the request waits here."""
        ...

    def check(self, adapter: LoRARequest | None) -> None:
        """Refuse an adapter that this engine cannot serve.

        Raises:
            UnsupportedParameterError: there is an adapter, and the engine serves none.
        """
        ...

    def add(self, request: Request) -> bool:
        """Give a request with a ``lora_request`` its adapter; False if it must wait until ``pop_ready`` returns it."""
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests; unknown ones are ignored."""
        ...

    @property
    def is_loading(self) -> bool:
        """Whether an adapter is being loaded, for a request or for an operator."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until an operation has finished."""
        ...

    def pop_ready(self) -> Sequence[tuple[Request, RequestError | None]]:
        """Return the requests that no longer wait, in order: each with its adapter, or with the error."""
        ...

    def pop_changed_digests(self) -> list[str] | None:
        """Return the digests of all loaded adapters, sorted; None if they have not changed since the last call."""
        ...


class NoAdapters(NoResidency):
    """Refuses every request with an adapter."""

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

    def pop_ready(self) -> Sequence[tuple[Request, RequestError | None]]:
        return ()

    def pop_changed_digests(self) -> list[str] | None:
        return None


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


class BlockLoads(Protocol):
    """Reads stored blocks of waiting requests before they are admitted; implemented by ``offload/request_loads.py``."""

    def attach(self, running: RequestQueue, waiting: RequestQueue) -> None:
        """Use the scheduler's queues. A request leaves ``waiting`` while its blocks are read."""
        ...

    def begin_step(self) -> None:
        """Requeue requests with finished loads, and begin the loads of the next requests."""
        ...

    def collect(self) -> None:
        """Requeue requests with finished loads."""
        ...

    def requeue(self, request_ids: Iterable[str]) -> None:
        """Put these requests back into ``waiting``, if they wait for loads."""
        ...

    def forget(self, request_id: str) -> None:
        """Forget a request that was admitted or has finished."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until a load has ended."""
        ...

    def drain(self) -> None:
        """Wait until no block is being read or written."""
        ...

    def clear_storage(self) -> None:
        """Forget the stored blocks of this model."""
        ...

    def requests(self) -> Iterable[Request]:
        """Return the requests that wait for loads."""
        ...

    def block_tables(self) -> Iterable[list[int]]:
        """Return the blocks that are held for loads."""
        ...

    def stats(self) -> KVOffloadStats | None:
        """Return statistics; None without storage."""
        ...


class NoLoads:
    """The ``BlockLoads`` of an engine that stores no blocks outside of its KV cache."""

    def attach(self, running: RequestQueue, waiting: RequestQueue) -> None:
        pass

    def begin_step(self) -> None:
        pass

    def collect(self) -> None:
        pass

    def requeue(self, request_ids: Iterable[str]) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        pass

    def drain(self) -> None:
        pass

    def clear_storage(self) -> None:
        pass

    def requests(self) -> Iterable[Request]:
        return ()

    def block_tables(self) -> Iterable[list[int]]:
        return ()

    def stats(self) -> KVOffloadStats | None:
        return None
