"""Adapters of a rank: it reads its part of each, and its slots change between the same steps as those of rank 0."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from ...config.engine_config import EngineConfig
from ...models.adapters.attach import attach_adapters
from ...models.adapters.files import LoadedAdapter
from ...models.adapters.load import load_adapter
from ...models.adapters.slots import AdapterSlots
from ...models.loaded import LoadedModel
from .messages import AskAdapter, AssignAdapter, DropAdapter, LoadAdapter, NotYet, ReleaseAdapters, RestoreAdapters


def attach_slots(
    config: EngineConfig, model: LoadedModel, make_slots: Callable[..., AdapterSlots] = AdapterSlots
) -> AdapterSlots:
    """Attach slots to ``model``, the part of a rank. All ranks do so together. Raises as ``attach_adapters``."""
    return attach_adapters(
        model.forward,
        model.architecture,
        config.max_loras,
        config.max_lora_rank,
        is_deterministic=config.deterministic,
        shares=model.shares,
        make_slots=make_slots,
    )


class _Load:
    """A thread that reads an adapter; it does not delay the end of the process."""

    def __init__(self, command: LoadAdapter, slots: AdapterSlots) -> None:
        self._command = command
        self._slots = slots
        self._adapter: LoadedAdapter | None = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._read, name="adapter", daemon=True)
        self.thread.start()

    def result(self) -> LoadedAdapter:
        """Return the adapter, once the thread has ended. Raises as ``load_adapter``."""
        if self._error is not None:
            raise self._error
        assert self._adapter is not None
        return self._adapter

    def _read(self) -> None:
        try:
            self._adapter = load_adapter(Path(self._command.folder), self._command.digest, self._slots)
        except BaseException as error:  # torch and file systems may raise anything
            self._error = error


class FollowingSlots:
    """The adapters of a rank above 0, and its slots."""

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots
        self._loads: dict[str, _Load] = {}

    def begin_load(self, command: LoadAdapter) -> None:
        """Let a thread read this rank's part of an adapter, so that steps run meanwhile."""
        self._loads[command.digest] = _Load(command, self._slots)

    def check_load(self, command: AskAdapter) -> NotYet | None:
        """Return ``NotYet`` until the adapter has been read. Raises as ``load_adapter``."""
        load = self._loads[command.digest]
        if load.thread.is_alive():
            return NotYet()
        load.result()
        return None

    @torch.inference_mode()
    def assign_part(self, command: AssignAdapter) -> None:
        self._slots.assign(command.slot, self._loads[command.digest].result().prepared)
        self._slots.flush()

    def drop_part(self, command: DropAdapter) -> None:
        self._loads.pop(command.digest, None)

    def release_slots(self, command: ReleaseAdapters) -> None:
        self._slots.release(command.level)

    @torch.inference_mode()
    def restore_slots(self, _: RestoreAdapters) -> None:
        self._slots.restore()
        self._slots.flush()
