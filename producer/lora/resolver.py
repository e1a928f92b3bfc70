"""Resolve the adapter that a caller names, when a request is enqueued; the request keeps the result."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...shared.connection import CommandConnection
from ...shared.errors import AdapterFileError, UnknownAdapterError, ValidationError
from ...shared.keys import Keys
from ...shared.lora.registry import EVERYBODY, AdapterRecord, AdapterRegistry
from ...shared.params.adapters import ADAPTER_FILES, adapter_digest
from ...shared.params.lora import LoRARequest
from ...shared.values.names import check_name
from ...shared.values.shown import shown
from ..long_work import LongWork, in_long_thread

# Limit of folders whose digest is cached; a caller has few.
MAX_FOLDERS = 256


class AdapterResolver:
    """Finds adapters in the registry, and computes digests of folders that are not registered."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self.registry = AdapterRegistry(connection, keys)
        self._digests: dict[tuple[object, ...], str] = {}

    async def named(self, name: str, tenant: str) -> AdapterRecord | None:
        """Return the adapter of a name that is no model's, as a tenant sees it; None if no adapter has the name."""
        return await self.registry.find(check_name("model", name), tenant)

    async def named_by_any_tenant(self, name: str, tenant: str) -> AdapterRecord | None:
        """Return the adapter as ``named`` does; otherwise one of another tenant, if all of that name belong to one
        model.

        For callers that only need the model, such as the lookup of a request by its id.
        """
        record = await self.named(name, tenant)
        if record is not None:
            return record
        others = [record for record in await self.registry.read() if record.name == name]
        return others[0] if len({record.model for record in others}) == 1 else None

    async def resolve(self, adapter: object, model: str, tenant: str) -> LoRARequest:
        """Return the adapter with its digest.

        Args:
            adapter: a name, or a ``LoRARequest``. One with a digest is returned unchanged; one whose name and path are
                registered is resolved by the registry; any other is the folder at its path, as seen from this host.

        Raises:
            ValidationError: it is neither, or an adapter of another model.
            UnknownAdapterError: neither the tenant nor the shared names have an adapter of that name.
            AdapterFileError: the folder does not exist on this host, or lacks a file.
        """
        if not isinstance(adapter, LoRARequest | str):
            raise ValidationError(f"lora_request must be a LoRARequest or a name, got {shown(adapter)}")
        if isinstance(adapter, LoRARequest) and adapter.digest:
            return adapter
        name = check_name("lora_request", adapter if isinstance(adapter, str) else adapter.lora_name)
        record = await self.registry.find(name, tenant)
        if isinstance(adapter, str):
            return self._check_model(name, record, model, tenant).request()
        if record is not None and record.model == model and record.path == adapter.lora_path:
            return record.request()
        try:
            digest = await in_long_thread(LongWork.ADAPTERS, self._digest, Path(adapter.lora_path))
        except AdapterFileError as error:
            raise AdapterFileError(f"lora_path: {error}; or register the adapter by penstock lora add") from error
        return msgspec.structs.replace(adapter, digest=digest)

    def _check_model(self, name: str, record: AdapterRecord | None, model: str, tenant: str) -> AdapterRecord:
        if record is None:
            raise UnknownAdapterError(
                f"model {shown(model)} has no adapter {shown(name)} for tenant {shown(tenant)}, nor for everybody; "
                f"penstock lora list --model {model} lists its adapters, penstock lora add registers one"
            )
        if record.model != model:
            raise ValidationError(
                f"lora_request {shown(name)} is an adapter of model {shown(record.model)}, not of {shown(model)}"
            )
        return record

    def _digest(self, folder: Path) -> str:
        """Return the digest of a folder, computed again when a file has changed."""
        try:
            stats = [(folder / name).stat() for name in ADAPTER_FILES]
        except OSError:
            return adapter_digest(folder)  # raises the error
        key = (str(folder), *((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats))
        if key not in self._digests:
            if len(self._digests) == MAX_FOLDERS:
                self._digests.clear()
            self._digests[key] = adapter_digest(folder)
        return self._digests[key]


def owner_of(tenant: str | None) -> str:
    """Return the owner that a caller's optional tenant means: every tenant when None."""
    return EVERYBODY if tenant is None else check_name("tenant", tenant)
