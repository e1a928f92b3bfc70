"""Which adapter a caller means, by a name or by a folder: asked when a request is enqueued, which keeps the answer."""

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

# Folders whose digest is remembered; a caller has few.
MAX_FOLDERS = 256


class AdapterResolver:
    """Finds adapters in the registry, and makes digests of folders that are not in it."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self.registry = AdapterRegistry(connection, keys)
        self._digests: dict[tuple[object, ...], str] = {}

    async def named(self, name: str, tenant: str) -> AdapterRecord | None:
        """Return what a tenant means by a name that is no model's; None if nothing is called so."""
        return await self.registry.find(check_name("model", name), tenant)

    async def named_by_anybody(self, name: str, tenant: str) -> AdapterRecord | None:
        """As ``named``, or else an adapter of that name of another tenant, where all of them are of one model.

        For what only asks for the model, such as for a request by its id.
        """
        found = await self.named(name, tenant)
        if found is not None:
            return found
        others = [record for record in await self.registry.read() if record.name == name]
        return others[0] if len({record.model for record in others}) == 1 else None

    async def resolve(self, given: object, model: str, tenant: str) -> LoRARequest:
        """Return the adapter with its digest.

        Args:
            given: a name, or a ``LoRARequest``: one with a digest is taken as it is, one whose name and path are
                registered is what the name points to, and any other is the folder at its path, seen from here.

        Raises:
            ValidationError: it is neither, or an adapter of another model.
            UnknownAdapterError: no adapter of that name is the tenant's or everybody's.
            AdapterFileError: there is no such folder here, or a file of it is missing.
        """
        if not isinstance(given, LoRARequest | str):
            raise ValidationError(f"lora_request must be a LoRARequest or a name, got {shown(given)}")
        if isinstance(given, LoRARequest) and given.digest:
            return given
        name = check_name("lora_request", given if isinstance(given, str) else given.lora_name)
        record = await self.registry.find(name, tenant)
        if isinstance(given, str):
            return self._of_model(name, record, model, tenant).request()
        if record is not None and record.model == model and record.path == given.lora_path:
            return record.request()
        try:
            digest = await in_long_thread(LongWork.ADAPTERS, self._digest, Path(given.lora_path))
        except AdapterFileError as error:
            raise AdapterFileError(f"lora_path: {error}; or register the adapter by penstock lora add") from error
        return msgspec.structs.replace(given, digest=digest)

    def _of_model(self, name: str, record: AdapterRecord | None, model: str, tenant: str) -> AdapterRecord:
        if record is None:
            raise UnknownAdapterError(
                f"model {shown(model)} has no adapter {shown(name)} for tenant {shown(tenant)}, nor for everybody; "
                f"penstock lora list --model {model} shows what it has, penstock lora add makes one known"
            )
        if record.model != model:
            raise ValidationError(
                f"lora_request {shown(name)} is an adapter of model {shown(record.model)}, not of {shown(model)}"
            )
        return record

    def _digest(self, folder: Path) -> str:
        """Made anew when a file has changed."""
        try:
            stats = [(folder / name).stat() for name in ADAPTER_FILES]
        except OSError:
            return adapter_digest(folder)  # says what is wrong
        key = (str(folder), *((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats))
        if key not in self._digests:
            if len(self._digests) == MAX_FOLDERS:
                self._digests.clear()
            self._digests[key] = adapter_digest(folder)
        return self._digests[key]


def owner_of(tenant: str | None) -> str:
    """What a caller means by a tenant that may be left out: everybody."""
    return EVERYBODY if tenant is None else check_name("tenant", tenant)
