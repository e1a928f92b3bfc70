"""The client's methods for LoRA adapters: names for them, and loading them at engines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

from ...shared.control.model import AddLora, ListLoras, LoraChanged, LoraList, PinLora, RemoveLora
from ...shared.errors import (
    EngineCallError,
    EngineDeadError,
    EngineTimeoutError,
    UnsupportedCallError,
    ValidationError,
)
from ...shared.lora.registry import AdapterRecord, owner
from ...shared.params.lora import LoRARequest
from ...shared.values.names import check_name
from ...shared.values.shown import shown
from ..background.concurrency import LongWork, in_long_thread
from ..client_parts.core import CallOptions, ClientCore
from ..inputs.lora import copy_into, inspect_folder, owner_of

# These errors do not say whether an engine accepts an adapter: it may still load it, or serves none.
_INCONCLUSIVE = EngineTimeoutError | EngineDeadError | UnsupportedCallError


class AdapterControl(ClientCore):
    """The part of the client for adapters.

    A name points to an adapter, which is identified by its content. Requests carry the name, and keep the adapter to
    which it pointed when they were enqueued. Names are stored in Redis, so they outlive clients and engines. An engine
    loads an adapter when the first request with it arrives, or when a method of this class requests it. ``tenant`` is
    the owner of a name; None for a name that every tenant may use.

    All methods raise the errors of ``EngineControl``, except that an engine that is not up is no error: it has nothing
    to load.
    """

    async def add_lora(
        self,
        lora: LoRARequest | str,
        path: str | Path | None = None,
        *,
        tenant: str | None = None,
        copy_to: str | Path | None = None,
        **options: Unpack[CallOptions],
    ) -> dict[str, bool]:
        """Register an adapter and load it at the engines. False for an engine that had loaded it already.

        A name that pointed to another adapter points to this one from now on, for every tenant. If the name is pinned,
        engines keep this adapter instead of the former one. An engine that refuses to load the adapter raises an error.
        The name stays registered if any engine has loaded it, has not answered or serves no adapters. If all engines
        refuse, the name points to its former adapter again.

        Args:
            lora: a ``LoRARequest``, whose number counts; or a name, with ``path``. A registered name without ``path``,
                and a ``LoRARequest`` with a digest, are only loaded.
            path: the folder that PEFT wrote, as seen from this host; engines read it at the same path.
            copy_to: a folder that all hosts share. The adapter is copied into it, under its digest.

        Raises:
            ValidationError: the name or number belongs to another adapter.
            AdapterFileError: the folder lacks a file, or a file is invalid.
            UnsupportedAdapterError: no engine can compute such an adapter.
            UnknownAdapterError: only a name was passed, and it is not registered.
        """
        if isinstance(lora, LoRARequest) and lora.digest:
            request = lora
        elif path is None and isinstance(lora, str):
            model = (await self._card(options.get("model"))).model
            request = await self._adapters.resolve(lora, model, self._tenant_or(tenant))
        else:
            model = options.get("model")
            record, former = await self.register_lora(lora, path, tenant=tenant, copy_to=copy_to, model=model)
            return await self.load_registered(record, former, **options)
        return await self._change_at_engines(AddLora(request), options)

    async def load_registered(
        self, record: AdapterRecord, former: AdapterRecord | None, **options: Unpack[CallOptions]
    ) -> dict[str, bool]:
        """Load the adapter that ``register_lora`` registered. Takes the two values that it returned."""
        options["model"] = record.model
        try:
            loaded = await self._change_at_engines(AddLora(record.request()), options)
        except EngineCallError as error:
            may_load = any(isinstance(cause, _INCONCLUSIVE) for cause in error.errors.values())
            if error.answers or may_load or not await self._restore_name(record, former):
                raise
            outcome = "is not registered" if former is None else f"points to adapter {former.digest[:12]} again"
            message = f"{error}; no engine has loaded it, so lora_name {shown(record.name)} {outcome}"
            raise EngineCallError(message, answers=error.answers, errors=error.errors) from error
        if former is not None and former.pinned and former.number != record.number:
            await self._unpin_unnamed(former.number, options)
        if record.pinned:
            await self._change_at_engines(PinLora(record.number), options)
        return loaded

    async def register_lora(
        self,
        lora: LoRARequest | str,
        path: str | Path | None = None,
        *,
        tenant: str | None = None,
        copy_to: str | Path | None = None,
        model: str | None = None,
    ) -> tuple[AdapterRecord, AdapterRecord | None]:
        """Register an adapter without loading it. Return the new record of the name and the former one; see
        ``add_lora``.
        """
        request = (
            lora if isinstance(lora, LoRARequest) else LoRARequest(check_name("lora_name", lora), 1, str(path or ""))
        )
        if path is not None and isinstance(lora, LoRARequest):
            raise ValidationError("path is that of the LoRARequest; pass a name with it, or the LoRARequest alone")
        name, owner_tenant = check_name("lora_name", request.lora_name), owner_of(tenant)
        cards = await self._builder.fresh_cards()
        if name in cards:
            raise ValidationError(f"lora_name {shown(name)} is the name of a model; choose another")
        base = (await self._card(model)).model
        folder = await in_long_thread(LongWork.ADAPTERS, inspect_folder, request.lora_path)
        if copy_to is not None:
            folder = await in_long_thread(LongWork.ADAPTERS, copy_into, copy_to, folder)
        record = AdapterRecord(
            name=name,
            model=base,
            digest=folder.digest,
            path=str(folder.path),
            tenant=owner_tenant,
            rank=folder.config.largest_rank,
            target_modules=folder.config.target_modules,
            base_model_name=folder.config.base_model_name,
            num_bytes=folder.num_bytes,
            added_at=time.time(),
        )
        number = request.lora_int_id if isinstance(lora, LoRARequest) and not lora.load_inplace else 0
        async with self._operations.audit.audited(
            "adapter.add", name, model=base, owner=owner(owner_tenant), digest=record.digest, path=record.path
        ):
            return await self._adapters.registry.register(record, number)

    async def adapters(self, model: str | None = None) -> list[AdapterRecord]:
        """Return the adapters that have names, of one model or of all; sorted by model, name and tenant."""
        return await self._adapters.registry.read(model)

    async def visible_adapters(self, tenant: str | None = None) -> list[AdapterRecord]:
        """Return the adapters that a tenant may name: its own and the shared ones. The client's tenant by default."""
        return await self._adapters.registry.visible(self._tenant_or(tenant))

    async def remove_lora(
        self, lora: int | str, *, tenant: str | None = None, **options: Unpack[CallOptions]
    ) -> dict[str, bool]:
        """Remove an adapter's name, or all names of a number, and unload the adapter. False for an engine that had not
        loaded it.

        Requests that were enqueued before still run with it; engines unload it after them. An adapter that has another
        name stays loaded.

        Raises:
            UnknownAdapterError: the tenant has no adapter of that name.
        """
        if isinstance(lora, str):
            record = await self._remove(lora, owner_of(tenant))
            number = record.number
            options.setdefault("model", record.model)
        else:
            number = RemoveLora(lora).lora_id
            for record in await self._numbered(number):
                await self._remove(record.name, record.tenant)
        if await self._numbered(number):
            await self._unpin_unnamed(number, options)
            return {}
        return await self._change_at_engines(RemoveLora(number), options)

    async def list_loras(self, **options: Unpack[CallOptions]) -> dict[str, set[int]]:
        """Return the numbers of the adapters that each engine has loaded; ``adapters`` returns their names."""
        answers = await self._call_engines(ListLoras(), LoraList, options)
        return {engine_id: set(answer.lora_ids) for engine_id, answer in answers.items()}

    async def pin_lora(
        self, lora: int | str, *, tenant: str | None = None, **options: Unpack[CallOptions]
    ) -> dict[str, bool]:
        """Have engines load an adapter now and at every start, and never unload it to load others.

        Raises:
            UnknownAdapterError: no adapter has that name or number.
        """
        record = await self._mark(lora, owner_of(tenant), pinned=True)
        if record is None:
            return await self._change_at_engines(PinLora(RemoveLora(int(lora)).lora_id), options)
        options.setdefault("model", record.model)
        await self._change_at_engines(AddLora(record.request()), options)
        return await self._change_at_engines(PinLora(record.number), options)

    async def unpin_lora(
        self, lora: int | str, *, tenant: str | None = None, **options: Unpack[CallOptions]
    ) -> dict[str, bool]:
        """Let engines unload an adapter again when they need its slot for others. Raises: as ``pin_lora``."""
        record = await self._mark(lora, owner_of(tenant), pinned=False)
        if record is not None:
            options.setdefault("model", record.model)
        number = record.number if record is not None else RemoveLora(int(lora)).lora_id
        return await self._change_at_engines(PinLora(number, pinned=False), options)

    async def _change_at_engines(self, call: AddLora | RemoveLora | PinLora, options: CallOptions) -> dict[str, bool]:
        try:
            return _successes(await self._call_engines(call, LoraChanged, options))
        except EngineDeadError:
            if options.get("engine_id") is not None:
                raise
            return {}  # engines that start later read the registry

    async def _numbered(self, number: int) -> list[AdapterRecord]:
        return [record for record in await self._adapters.registry.read() if record.number == number]

    async def _unpin_unnamed(self, number: int, options: CallOptions) -> None:
        """Unpin an adapter at the engines, unless a pinned name points to it."""
        if not any(record.pinned for record in await self._numbered(number)):
            await self._change_at_engines(PinLora(number, pinned=False), options)

    async def _remove(self, name: str, tenant: str) -> AdapterRecord:
        async with self._operations.audit.audited("adapter.remove", name, owner=owner(tenant)) as details:
            record = await self._adapters.registry.remove(name, tenant)
            details["digest"] = record.digest
            return record

    async def _restore_name(self, record: AdapterRecord, former: AdapterRecord | None) -> bool:
        audited = self._operations.audit.audited
        if former is None:
            entry = audited("adapter.remove", record.name, owner=owner(record.tenant), digest=record.digest)
        else:
            details = {
                "model": former.model,
                "owner": owner(former.tenant),
                "digest": former.digest,
                "path": former.path,
            }
            entry = audited("adapter.add", former.name, **details)
        async with entry:
            return await self._adapters.registry.take_back(record, former)

    async def _mark(self, lora: int | str, tenant: str, *, pinned: bool) -> AdapterRecord | None:
        """Record a pin for a name, or for all names of a number. Return one of their records, None if there is none."""
        names = [(lora, tenant)]
        if not isinstance(lora, str):
            records = await self._numbered(RemoveLora(lora).lora_id)
            names = [(record.name, record.tenant) for record in records]
        pinned_record: AdapterRecord | None = None
        for name, name_owner in names:
            async with self._operations.audit.audited("adapter.pin", str(name), owner=owner(name_owner), pinned=pinned):
                pinned_record = await self._adapters.registry.pin(str(name), name_owner, pinned=pinned)
        return pinned_record

    def _tenant_or(self, tenant: str | None) -> str:
        return self._builder.tenant if tenant is None else check_name("tenant", tenant)


def _successes(answers: Mapping[str, LoraChanged]) -> dict[str, bool]:
    return {engine_id: answer.success for engine_id, answer in answers.items()}
