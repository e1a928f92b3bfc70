"""Requests that wait for their adapters, and the adapters of the engine.

A request is handled here before the scheduler. If its adapter is not in memory, a thread reads it, once for all
requests that need it at the time; the step loop only checks whether the thread is done. While all adapters in memory
are in use, the request waits, and so do later ones that need a load, so that none overtakes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import structlog

from ....shared.errors import AdapterFileError, EngineStateError, PenstockError
from ....shared.messages.outcome import RequestError
from ....shared.params.lora import LoRARequest
from ...models.adapters.files import LoadedAdapter
from ..scheduling.request import NO_LORA, Request, RequestStatus
from ..structured.threads import CompileThreads, Task
from .pool import AdapterEntry, AdapterPool, AnySlots

NUM_THREADS = 1
LOAD_FAILED = "adapter_load_failed"

log = structlog.get_logger(__name__)


@dataclass
class _Waiting:
    request: Request
    adapter: LoRARequest
    task: Task | None = None


class AdapterLibrary(Generic[AnySlots]):
    """Implements ``scheduling.admission.Adapters``, and the operations of ``engine.control.adapters``.

    Args:
        max_adapters: limit on adapters in host memory, at least the number of slots.
        folder: folder with adapters by digest; None for none.
        load: reads the adapter of a digest, in a thread.
    """

    def __init__(
        self,
        slots: AnySlots,
        *,
        max_adapters: int,
        folder: Path | None,
        load: Callable[[Path, str, AnySlots], LoadedAdapter],
    ) -> None:
        self._pool = AdapterPool(slots, max_adapters)
        self._folder = folder
        self._load = load
        self._threads = CompileThreads(NUM_THREADS, NUM_THREADS, "adapter")
        self._loading: dict[tuple[str, str], Task] = {}
        # Loads that an operator requested.
        self._operator_loads: dict[tuple[str, str], Task] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._of_request: dict[str, AdapterEntry] = {}

    @property
    def slots(self) -> AnySlots:
        """The adapters' slots on the device."""
        return self._pool.slots

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def check(self, adapter: LoRARequest | None) -> None:
        """Accept any adapter: whether it exists is known after the load."""

    def add(self, request: Request) -> bool:
        assert request.lora_request is not None
        entry = self._pool.get(request.lora_request.digest)
        if entry is not None:
            self._bind(request, request.lora_request, entry)
            return True
        request.move_to(RequestStatus.WAITING_FOR_ADAPTER)
        self._waiting[request.request_id] = _Waiting(request, request.lora_request)
        return False

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests. Adapters being read for them are loaded and kept."""
        for request_id in request_ids:
            waiting = self._waiting.pop(request_id, None)
            if waiting is not None:
                waiting.request.move_to(RequestStatus.FINISHED_ABORTED)

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    def wait(self, timeout_s: float) -> None:
        self._threads.wait(timeout_s)

    def pop_ready(self) -> list[tuple[Request, RequestError | None]]:
        ready: list[tuple[Request, RequestError | None]] = []
        may_load = True
        for request_id, waiting in list(self._waiting.items()):
            try:
                entry = self._advance(waiting, may_load=may_load)
            except PenstockError as error:
                ready.append(self._fail(request_id, RequestError(error.code, str(error), error.retryable)))
            except Exception as error:  # torch and file systems may raise anything
                reason = f"lora_request: {type(error).__name__}: {error}"
                ready.append(self._fail(request_id, RequestError(LOAD_FAILED, reason, retryable=True)))
            else:
                if entry is not None:
                    del self._waiting[request_id]
                    waiting.request.move_to(RequestStatus.WAITING)
                    self._bind(waiting.request, waiting.adapter, entry)
                    ready.append((waiting.request, None))
                elif waiting.task is None:
                    may_load = False
        self._keep_aborted_loads()
        return ready

    def acquire_slot(self, request: Request) -> bool:
        entry = self._of_request.get(request.request_id)
        if entry is None:
            return True
        if not self._pool.enter_slot(entry):
            return False
        assert entry.slot is not None
        entry.num_running += 1
        request.lora_index = entry.slot
        return True

    def release_slot(self, request: Request) -> None:
        entry = self._of_request.get(request.request_id)
        if entry is None:
            return
        if request.lora_index != NO_LORA:
            entry.num_running -= 1
            request.lora_index = NO_LORA
        if request.is_finished:
            del self._of_request[request.request_id]
            entry.num_users -= 1
            if entry.is_leaving and not entry.num_users:
                self._pool.drop(entry)

    def digest_of(self, request: Request) -> str:
        """Return the digest of the adapter of a request that has it; "" without one."""
        entry = self._of_request.get(request.request_id)
        return "" if entry is None else entry.digest

    def pop_changed_digests(self) -> list[str] | None:
        return self._pool.pop_changed_digests()

    def load(self, adapter: LoRARequest) -> bool | None:
        """Load an adapter for later requests; return False if it is loaded already, None while it is being read.

        Call it again after None.

        Raises:
            EngineStateError: all adapters in memory are in use or pinned.
            AdapterFileError, UnsupportedAdapterError: see ``load_adapter``.
        """
        key, entry = _key_of(adapter), self._pool.get(adapter.digest)
        task = self._operator_loads.get(key)
        if task is None and entry is None:
            task = self._loading.get(key) or self._begin(adapter)
            if task is None:
                raise EngineStateError("add_lora: all adapters in memory (--max-cpu-loras) are used or pinned")
            self._operator_loads[key] = task
        if task is not None:
            if not task.is_done:
                return None
            del self._operator_loads[key]
            entry = self._finish_load(task)
        assert entry is not None
        entry.is_leaving = False
        self._pool.name(entry, adapter.lora_int_id)
        return task is not None and task.result is entry.loaded

    def remove(self, lora_id: int) -> bool:
        """Unload an adapter after its requests have ended; return False if it is not loaded."""
        entry = self._pool.by_id(lora_id)
        if entry is None or entry.is_leaving:
            return False
        entry.is_pinned, entry.is_leaving = False, True
        if not entry.num_users:
            self._pool.drop(entry)
        return True

    def ids(self) -> list[int]:
        """Return the ids of the loaded adapters, sorted."""
        return self._pool.ids()

    def pin(self, lora_id: int) -> bool:
        """Pin an adapter in memory; return False if it is not loaded. Raises as ``AdapterPool.pin``."""
        entry = self._pool.by_id(lora_id)
        if entry is None or entry.is_leaving:
            return False
        self._pool.pin(entry)
        return True

    def unpin(self, lora_id: int) -> bool:
        """Unpin an adapter; return False if it is not loaded, or was not pinned."""
        entry = self._pool.by_id(lora_id)
        was_pinned = entry is not None and entry.is_pinned
        if entry is not None:
            entry.is_pinned = False
        return was_pinned

    def _advance(self, waiting: _Waiting, *, may_load: bool) -> AdapterEntry | None:
        """Return the adapter of a waiting request; None while it is not loaded. Raises the error of its load."""
        adapter = waiting.adapter
        entry = self._pool.get(adapter.digest)
        if entry is not None:
            return entry
        if waiting.task is None:
            waiting.task = self._loading.get(_key_of(adapter))
        if waiting.task is None and may_load:
            waiting.task = self._begin(adapter)
        if waiting.task is None or not waiting.task.is_done:
            return None
        return self._finish_load(waiting.task)

    def _begin(self, adapter: LoRARequest) -> Task | None:
        """Let the thread read an adapter; return None if it would not fit into memory."""
        if not self._pool.make_room(1 + len(self._loading)):
            return None
        task = self._loading[_key_of(adapter)] = self._threads.submit(lambda _: self._read_adapter(adapter))
        return task

    def _finish_load(self, task: Task) -> AdapterEntry:
        """Add the adapter of a completed task; raise the task's error if it has one."""
        self._loading = {key: other for key, other in self._loading.items() if other is not task}
        if isinstance(task.error, Exception):
            raise task.error
        if task.error is not None:
            raise RuntimeError(f"{type(task.error).__name__}: {task.error}") from task.error
        # An adapter that was requested without its digest may be loaded already.
        return self._pool.get(task.result.digest) or self._pool.put(task.result)

    def _keep_aborted_loads(self) -> None:
        """Keep adapters that were read for requests aborted meanwhile."""
        needed = {*(id(waiting.task) for waiting in self._waiting.values()), *map(id, self._operator_loads.values())}
        for task in [task for task in self._loading.values() if task.is_done and id(task) not in needed]:
            try:
                self._finish_load(task)
            except Exception as error:
                log.warning("adapter_load_failed", error=f"{type(error).__name__}: {error}")

    def _bind(self, request: Request, adapter: LoRARequest, entry: AdapterEntry) -> None:
        """Assign an adapter to ``request`` until the request is finished."""
        entry.num_users += 1
        entry.is_leaving = False
        self._pool.name(entry, adapter.lora_int_id)
        self._of_request[request.request_id] = entry
        request.extra_keys = (*request.extra_keys, f"lora {entry.digest}")

    def _fail(self, request_id: str, error: RequestError) -> tuple[Request, RequestError]:
        request = self._waiting.pop(request_id).request
        request.move_to(RequestStatus.FINISHED_ERROR)
        return request, error

    def _read_adapter(self, adapter: LoRARequest) -> LoadedAdapter:
        """Read an adapter, in the thread."""
        started = time.monotonic()
        loaded = self._load(self._folder_of(adapter), adapter.digest, self._pool.slots)
        self._pool.slots.share_adapter(loaded.folder, loaded.digest)
        log.info(
            "adapter_loaded",
            digest=loaded.digest,
            name=adapter.lora_name,
            rank=loaded.rank,
            seconds=round(time.monotonic() - started, 3),
        )
        return loaded

    def _folder_of(self, adapter: LoRARequest) -> Path:
        path = Path(adapter.lora_path)
        if self._folder is not None and adapter.digest and not (path.is_absolute() and path.is_dir()):
            by_digest = self._folder / adapter.digest
            if by_digest.is_dir() or not path.is_absolute():
                return by_digest
        if not path.is_absolute():
            raise AdapterFileError(
                f"lora_path {adapter.lora_path!r} is not an absolute path, and this engine has no folder of adapters "
                f"by digest; give a path that all hosts have, or start workers with --lora-folder"
            )
        return path


def _key_of(adapter: LoRARequest) -> tuple[str, str]:
    """Return the key by which requests share a load."""
    return adapter.digest, "" if adapter.digest else adapter.lora_path
