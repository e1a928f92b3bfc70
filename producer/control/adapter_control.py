"""What a client may do with adapters: names for them, and what engines have loaded."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

from ...shared.control.lora import AddLora, ListLoras, LoraChanged, LoraList, PinLora, RemoveLora
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
from ..client_core import ClientCore
from ..engine_calls import CallOptions
from ..long_work import LongWork, in_long_thread
from ..lora.folder import copy_into, inspect_folder
from ..lora.resolver import owner_of

# With these an engine has said nothing of an adapter: it may load it yet, or serves none.
_NO_JUDGEMENT = EngineTimeoutError | EngineDeadError | UnsupportedCallError


class AdapterControl(ClientCore):
    """The part of the client that is about adapters.

    A name points to an adapter, which is its content: requests say the name, and keep what it pointed to when they were
    enqueued. Names are in Redis, so they outlive clients and engines; an engine loads an adapter when the first request
    with it comes, or when it is told to here. ``tenant`` is whose a name is: everybody's when None.

    All methods raise as those of ``EngineControl``, but for an engine that is not up: it has nothing to load.
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
        """Register an adapter and load it at the engines; False where it is loaded already.

        A name that pointed to another adapter points to this one from now on, at once for everybody; if it is pinned,
        engines keep this one, and the other no longer. An engine that
        refuses to load it raises. The name is registered all the same if any engine has loaded it, has not answered or
        serves no adapters; if all refuse, it means again what it meant before.

        Args:
            lora: a ``LoRARequest``, whose number counts; or a name, with ``path``. A registered name alone, and a
                ``LoRARequest`` with a digest, are loaded and nothing else.
            path: the folder that PEFT wrote, seen from here; engines look for it at the same path.
            copy_to: a folder that all hosts see, into which it is copied, under its digest.

        Raises:
            ValidationError: name or number are another adapter's.
            AdapterFileError: the folder lacks a file, or one of them says what makes no sense.
            UnsupportedAdapterError: no engine computes such an adapter.
            UnknownAdapterError: only a name was given, and nobody registered it.
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
        return await self._change(AddLora(request), options)

    async def load_registered(
        self, record: AdapterRecord, former: AdapterRecord | None, **options: Unpack[CallOptions]
    ) -> dict[str, bool]:
        """Load what ``register_lora`` has named, given what that returned; the second half of ``add_lora``."""
        options["model"] = record.model
        try:
            loaded = await self._change(AddLora(record.request()), options)
        except EngineCallError as error:
            may_load = any(isinstance(one, _NO_JUDGEMENT) for one in error.errors.values())
            if error.answers or may_load or not await self._take_back(record, former):
                raise
            means = "means nothing" if former is None else f"means adapter {former.digest[:12]} again"
            told = f"{error}; no engine has loaded it, so lora_name {shown(record.name)} {means}"
            raise EngineCallError(told, answers=error.answers, errors=error.errors) from error
        if former is not None and former.pinned and former.number != record.number:
            await self._unpin_unnamed(former.number, options)
        if record.pinned:
            await self._change(PinLora(record.number), options)
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
        """``add_lora`` without loading it anywhere; returns what the name points to, and what it pointed to before."""
        given = (
            lora if isinstance(lora, LoRARequest) else LoRARequest(check_name("lora_name", lora), 1, str(path or ""))
        )
        if path is not None and isinstance(lora, LoRARequest):
            raise ValidationError("path is that of the LoRARequest; pass a name with it, or the LoRARequest alone")
        name, whose = check_name("lora_name", given.lora_name), owner_of(tenant)
        cards = await self._builder.fresh_cards()
        if name in cards:
            raise ValidationError(f"lora_name {shown(name)} is the name of a model; choose another")
        base = (await self._card(model)).model
        folder = await in_long_thread(LongWork.ADAPTERS, inspect_folder, given.lora_path)
        if copy_to is not None:
            folder = await in_long_thread(LongWork.ADAPTERS, copy_into, copy_to, folder)
        record = AdapterRecord(
            name=name,
            model=base,
            digest=folder.digest,
            path=str(folder.path),
            tenant=whose,
            rank=folder.config.largest_rank,
            target_modules=folder.config.target_modules,
            base_model_name=folder.config.base_model_name,
            num_bytes=folder.num_bytes,
            added_at=time.time(),
        )
        number = given.lora_int_id if isinstance(lora, LoRARequest) and not lora.load_inplace else 0
        async with self._operations.audit.audited(
            "adapter.add", name, model=base, owner=owner(whose), digest=record.digest, path=record.path
        ):
            return await self._adapters.registry.register(record, number)

    async def adapters(self, model: str | None = None) -> list[AdapterRecord]:
        """Return the adapters that have names: of all models, or of one; by model, name and tenant."""
        return await self._adapters.registry.read(model)

    async def visible_adapters(self, tenant: str | None = None) -> list[AdapterRecord]:
        """Return those that a tenant may name, the client's own by default: its own, and everybody's."""
        return await self._adapters.registry.visible(self._tenant_or(tenant))

    async def remove_lora(
        self, lora: int | str, *, tenant: str | None = None, **options: Unpack[CallOptions]
    ) -> dict[str, bool]:
        """Take an adapter's name away, or all names of a number, and unload it; False where it is not loaded.

        Requests that were enqueued before end with it: engines unload it behind them. As long as it has another name
        it stays loaded.

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
        return await self._change(RemoveLora(number), options)

    async def list_loras(self, **options: Unpack[CallOptions]) -> dict[str, set[int]]:
        """Return the numbers of the adapters that each engine has loaded; ``adapters`` has their names."""
        answers = await self._call_engines(ListLoras(), LoraList, options)
        return {engine_id: set(answer.lora_ids) for engine_id, answer in answers.items()}

    async def pin_lora(
        self, lora: int | str, *, tenant: str | None = None, **options: Unpack[CallOptions]
    ) -> dict[str, bool]:
        """Have engines load an adapter, now and whenever they start, and keep it whatever others are added.

        Raises:
            UnknownAdapterError: no adapter has that name or number.
        """
        record = await self._mark(lora, owner_of(tenant), pinned=True)
        if record is None:
            return await self._change(PinLora(RemoveLora(int(lora)).lora_id), options)
        options.setdefault("model", record.model)
        await self._change(AddLora(record.request()), options)
        return await self._change(PinLora(record.number), options)

    async def unpin_lora(
        self, lora: int | str, *, tenant: str | None = None, **options: Unpack[CallOptions]
    ) -> dict[str, bool]:
        """Have engines keep an adapter no longer than any other. Raises: as ``pin_lora``."""
        record = await self._mark(lora, owner_of(tenant), pinned=False)
        if record is not None:
            options.setdefault("model", record.model)
        number = record.number if record is not None else RemoveLora(int(lora)).lora_id
        return await self._change(PinLora(number, pinned=False), options)

    async def _change(self, call: AddLora | RemoveLora | PinLora, options: CallOptions) -> dict[str, bool]:
        try:
            return _successes(await self._call_engines(call, LoraChanged, options))
        except EngineDeadError:
            if options.get("engine_id") is not None:
                raise
            return {}  # what starts later reads the registry

    async def _numbered(self, number: int) -> list[AdapterRecord]:
        return [record for record in await self._adapters.registry.read() if record.number == number]

    async def _unpin_unnamed(self, number: int, options: CallOptions) -> None:
        """Have engines keep an adapter no longer than others, unless a pinned name points to it."""
        if not any(record.pinned for record in await self._numbered(number)):
            await self._change(PinLora(number, pinned=False), options)

    async def _remove(self, name: str, whose: str) -> AdapterRecord:
        async with self._operations.audit.audited("adapter.remove", name, owner=owner(whose)) as told:
            record = await self._adapters.registry.remove(name, whose)
            told["digest"] = record.digest
            return record

    async def _take_back(self, record: AdapterRecord, former: AdapterRecord | None) -> bool:
        audited = self._operations.audit.audited
        if former is None:
            told = audited("adapter.remove", record.name, owner=owner(record.tenant), digest=record.digest)
        else:
            said = {"model": former.model, "owner": owner(former.tenant), "digest": former.digest, "path": former.path}
            told = audited("adapter.add", former.name, **said)
        async with told:
            return await self._adapters.registry.take_back(record, former)

    async def _mark(self, lora: int | str, whose: str, *, pinned: bool) -> AdapterRecord | None:
        """Write a pin down for a name, or for all names of a number; returns one of them, None if there is none."""
        names = [(lora, whose)]
        if not isinstance(lora, str):
            names = [(one.name, one.tenant) for one in await self._numbered(RemoveLora(lora).lora_id)]
        record: AdapterRecord | None = None
        for name, tenant in names:
            async with self._operations.audit.audited("adapter.pin", str(name), owner=owner(tenant), pinned=pinned):
                record = await self._adapters.registry.pin(str(name), tenant, pinned=pinned)
        return record

    def _tenant_or(self, tenant: str | None) -> str:
        return self._builder.tenant if tenant is None else check_name("tenant", tenant)


def _successes(answers: Mapping[str, LoraChanged]) -> dict[str, bool]:
    return {engine_id: answer.success for engine_id, answer in answers.items()}
