"""Requests that wait for their adapters, and the adapters that engines have for them.

A request comes here before it goes to the scheduler. Its adapter is on the shelf, or a thread reads it, once for all
that ask for it at a time; the step loop only looks whether that is done. While all that are on the shelf are used by
others, it waits, and those behind it do too: nothing overtakes it for the place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from ....shared.errors import AdapterFileError, EngineStateError, PenstockError
from ....shared.messages.outcome import RequestError
from ....shared.params.lora import LoRARequest
from ...models.adapters.load import LoadedAdapter, load_adapter
from ...models.adapters.slots import AdapterSlots
from ..scheduling.request import NO_LORA, Request, RequestStatus
from ..structured.threads import CompileThreads, Task
from .shelf import AdapterShelf, HeldAdapter

NUM_THREADS = 1
LOAD_FAILED = "adapter_load_failed"

log = structlog.get_logger(__name__)


@dataclass
class _Waiting:
    request: Request
    adapter: LoRARequest
    task: Task | None = None


class AdapterLibrary:
    """See ``scheduling.admission.adapters.Adapters``, and ``engine.control.adapters`` for what else it is asked.

    Args:
        max_held: most adapters in host memory, at least as many as slots.
        folder: where adapters lie by their digests; None for nowhere.
        load: reads one; a test holds it up.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        *,
        max_held: int,
        folder: Path | None,
        load: Callable[[Path, str, AdapterSlots], LoadedAdapter] = load_adapter,
    ) -> None:
        self._shelf = AdapterShelf(slots, max_held)
        self._folder = folder
        self._load = load
        self._threads = CompileThreads(NUM_THREADS, NUM_THREADS, "adapter")
        self._loading: dict[tuple[str, str], Task] = {}
        self._called: dict[tuple[str, str], Task] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._of_request: dict[str, HeldAdapter] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def check(self, adapter: LoRARequest | None) -> None:
        """Any may be named: whether there is one shows when it is loaded."""

    def add(self, request: Request) -> bool:
        assert request.lora_request is not None
        held = self._shelf.get(request.lora_request.digest)
        if held is not None:
            self._bind(request, request.lora_request, held)
            return True
        request.move_to(RequestStatus.WAITING_FOR_ADAPTER)
        self._waiting[request.request_id] = _Waiting(request, request.lora_request)
        return False

    def abort(self, request_ids: Iterable[str]) -> None:
        """What is being read for them is read to its end, and kept."""
        for request_id in request_ids:
            waiting = self._waiting.pop(request_id, None)
            if waiting is not None:
                waiting.request.move_to(RequestStatus.FINISHED_ABORTED)

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    def wait(self, timeout_s: float) -> None:
        self._threads.wait(timeout_s)

    def take_ready(self) -> list[tuple[Request, RequestError | None]]:
        ready: list[tuple[Request, RequestError | None]] = []
        may_load = True
        for request_id, waiting in list(self._waiting.items()):
            try:
                held = self._advance(waiting, may_load=may_load)
            except PenstockError as refused:
                ready.append(self._fail(request_id, RequestError(refused.code, str(refused), refused.retryable)))
            except Exception as failed:  # of torch, of a file system
                error = RequestError(LOAD_FAILED, f"lora_request: {type(failed).__name__}: {failed}", retryable=True)
                ready.append(self._fail(request_id, error))
            else:
                if held is not None:
                    del self._waiting[request_id]
                    waiting.request.move_to(RequestStatus.WAITING)
                    self._bind(waiting.request, waiting.adapter, held)
                    ready.append((waiting.request, None))
                elif waiting.task is None:
                    may_load = False
        self._keep_what_nobody_waits_for()
        return ready

    def hold(self, request: Request) -> bool:
        held = self._of_request.get(request.request_id)
        if held is None:
            return True
        if not self._shelf.enter_slot(held):
            return False
        assert held.slot is not None
        held.num_running += 1
        request.lora_index = held.slot
        return True

    def let_go(self, request: Request) -> None:
        held = self._of_request.get(request.request_id)
        if held is None:
            return
        if request.lora_index != NO_LORA:
            held.num_running -= 1
            request.lora_index = NO_LORA
        if request.is_finished:
            del self._of_request[request.request_id]
            held.num_users -= 1
            if held.is_leaving and not held.num_users:
                self._shelf.drop(held)

    def take_digests(self) -> list[str] | None:
        return self._shelf.take_digests()

    def load(self, adapter: LoRARequest) -> bool | None:
        """Load it for requests to come; False if it is here already, None while it is being read: ask again.

        Raises:
            EngineStateError: all that are here are used or pinned.
            AdapterFileError, UnsupportedAdapterError: see ``load_adapter``.
        """
        key, held = _key_of(adapter), self._shelf.get(adapter.digest)
        task = self._called.get(key)
        if task is None and held is None:
            task = self._loading.get(key) or self._begin(adapter)
            if task is None:
                raise EngineStateError("add_lora: all adapters in memory (--max-cpu-loras) are used or pinned")
            self._called[key] = task
        if task is not None:
            if not task.is_done:
                return None
            del self._called[key]
            held = self._take(task)
        assert held is not None
        held.is_leaving = False
        self._shelf.name(held, adapter.lora_int_id)
        return task is not None and task.result is held.loaded

    def remove(self, lora_id: int) -> bool:
        """Unload it, once the requests that have it have ended; False if it is not loaded."""
        held = self._shelf.by_id(lora_id)
        if held is None or held.is_leaving:
            return False
        held.is_pinned, held.is_leaving = False, True
        if not held.num_users:
            self._shelf.drop(held)
        return True

    def ids(self) -> list[int]:
        """Numbers of those that are loaded, sorted."""
        return self._shelf.ids()

    def pin(self, lora_id: int) -> bool:
        """Keep it, whatever others come; False if it is not loaded. Raises ``EngineStateError``: see the shelf."""
        held = self._shelf.by_id(lora_id)
        if held is None or held.is_leaving:
            return False
        self._shelf.pin(held)
        return True

    def unpin(self, lora_id: int) -> bool:
        """Keep it no longer than others; False if it is not loaded, or was not pinned."""
        held = self._shelf.by_id(lora_id)
        was_pinned = held is not None and held.is_pinned
        if held is not None:
            held.is_pinned = False
        return was_pinned

    def _advance(self, waiting: _Waiting, *, may_load: bool) -> HeldAdapter | None:
        """The adapter of a request that waits; None while there is none. Raises why there will be none."""
        adapter = waiting.adapter
        held = self._shelf.get(adapter.digest)
        if held is not None:
            return held
        if waiting.task is None:
            waiting.task = self._loading.get(_key_of(adapter))
        if waiting.task is None and may_load:
            waiting.task = self._begin(adapter)
        if waiting.task is None or not waiting.task.is_done:
            return None
        return self._take(waiting.task)

    def _begin(self, adapter: LoRARequest) -> Task | None:
        """Have it read by the thread; None if there would be no room for it."""
        if not self._shelf.make_room(1 + len(self._loading)):
            return None
        task = self._loading[_key_of(adapter)] = self._threads.submit(lambda _: self._read(adapter))
        return task

    def _take(self, task: Task) -> HeldAdapter:
        """What a task that is done has read; raises why it could not."""
        self._loading = {key: other for key, other in self._loading.items() if other is not task}
        if isinstance(task.error, Exception):
            raise task.error
        if task.error is not None:
            raise RuntimeError(f"{type(task.error).__name__}: {task.error}") from task.error
        # One that was asked for without its digest may be here already.
        return self._shelf.get(task.result.digest) or self._shelf.put(task.result)

    def _keep_what_nobody_waits_for(self) -> None:
        """Its requests were aborted while it was read."""
        wanted = {*(id(waiting.task) for waiting in self._waiting.values()), *map(id, self._called.values())}
        for task in [task for task in self._loading.values() if task.is_done and id(task) not in wanted]:
            try:
                self._take(task)
            except Exception as error:
                log.warning("adapter_load_failed", error=f"{type(error).__name__}: {error}")

    def _bind(self, request: Request, adapter: LoRARequest, held: HeldAdapter) -> None:
        """From now on until it is finished ``request`` has that adapter."""
        held.num_users += 1
        held.is_leaving = False
        self._shelf.name(held, adapter.lora_int_id)
        self._of_request[request.request_id] = held
        request.extra_keys = (*request.extra_keys, f"lora {held.digest}")

    def _fail(self, request_id: str, error: RequestError) -> tuple[Request, RequestError]:
        request = self._waiting.pop(request_id).request
        request.move_to(RequestStatus.FINISHED_ERROR)
        return request, error

    def _read(self, adapter: LoRARequest) -> LoadedAdapter:
        """In a thread beside the loop."""
        started = time.monotonic()
        loaded = self._load(self._folder_of(adapter), adapter.digest, self._shelf.slots)
        log.info(
            "adapter_loaded",
            digest=loaded.digest,
            name=adapter.lora_name,
            rank=loaded.rank,
            seconds=round(time.monotonic() - started, 3),
        )
        return loaded

    def _folder_of(self, adapter: LoRARequest) -> Path:
        named = Path(adapter.lora_path)
        if self._folder is not None and adapter.digest and not (named.is_absolute() and named.is_dir()):
            by_digest = self._folder / adapter.digest
            if by_digest.is_dir() or not named.is_absolute():
                return by_digest
        if not named.is_absolute():
            raise AdapterFileError(
                f"lora_path {adapter.lora_path!r} is no absolute path, and this engine has no folder of adapters where "
                f"its digest could be looked for; give a path that all hosts have, or start workers with --lora-folder"
            )
        return named


def _key_of(adapter: LoRARequest) -> tuple[str, str]:
    """What is read once for all that ask for it."""
    return adapter.digest, "" if adapter.digest else adapter.lora_path
