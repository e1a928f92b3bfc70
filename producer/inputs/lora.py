"""Adapters on the client's side: folders of adapters, and the adapter that a caller names with a request.

The functions for folders block on the disk. A name is resolved when a request is enqueued, and the request keeps the
result.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from ...shared.connection import CommandConnection
from ...shared.errors import AdapterFileError, ConfigurationError, UnknownAdapterError, ValidationError
from ...shared.keys import Keys
from ...shared.lora.peft_config import PeftConfig, read_peft_config
from ...shared.lora.registry import EVERYBODY, AdapterRecord, AdapterRegistry
from ...shared.params.lora import ADAPTER_FILES, CONFIG_FILE, WEIGHTS_FILE, LoRARequest, adapter_digest
from ...shared.values.checks import check_path
from ...shared.values.names import check_name
from ...shared.values.shown import shown
from ..background.concurrency import LongWork, in_long_thread

# Limit of folders whose digest is cached; a caller has few.
MAX_FOLDERS = 256


class AdapterFolder(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter on this host's disk; ``num_bytes`` is the size of the files that are its content."""

    path: Path
    digest: str
    config: PeftConfig
    num_bytes: int


def inspect_folder(path: str | Path) -> AdapterFolder:
    """Read a folder as written by PEFT's ``save_pretrained``.

    Raises:
        ValidationError: ``path`` is not a path.
        AdapterFileError: a file is missing or invalid.
        UnsupportedAdapterError: no engine of this version can compute such an adapter.
    """
    if not isinstance(path, str | Path) or not str(path):
        raise ValidationError(f"lora_path must be the path of a folder, got {shown(path)}")
    check_path("lora_path", str(path))
    # os.path leaves the home of an unknown user unchanged, where pathlib raises.
    folder = Path(os.path.abspath(os.path.expanduser(path)))
    # First, because an invalid config must be reported before a large file is read.
    config = read_peft_config(folder) if os.path.isdir(folder) else None
    digest = adapter_digest(folder)
    assert config is not None  # otherwise adapter_digest has raised
    num_bytes = sum((folder / name).stat().st_size for name in (CONFIG_FILE, WEIGHTS_FILE))
    return AdapterFolder(path=folder, digest=digest, config=config, num_bytes=num_bytes)


def copy_into(shared_folder: str | Path, adapter: AdapterFolder) -> AdapterFolder:
    """Copy an adapter into the folder that all hosts share, under its digest, and return the copy.

    The copy appears whole or not at all. An existing copy is left unchanged.

    Raises:
        ConfigurationError: the folder cannot be written to.
        AdapterFileError: the adapter has changed meanwhile, or the existing copy under its digest has other contents.
    """
    into = Path(os.path.abspath(os.path.expanduser(shared_folder)))
    target = into / adapter.digest
    try:
        into.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            _copy(adapter, into, target)
    except OSError as error:
        raise ConfigurationError(
            f"the folder {into} for adapters cannot be used ({error.strerror}); name another one"
        ) from error
    if adapter_digest(target) != adapter.digest:
        raise AdapterFileError(f"{target} does not have the contents of its name: remove that folder, and try again")
    return msgspec.structs.replace(adapter, path=target)


def _copy(adapter: AdapterFolder, into: Path, target: Path) -> None:
    incoming = Path(tempfile.mkdtemp(prefix=".incoming-", dir=into))
    try:
        for name in ADAPTER_FILES:
            copy = Path(shutil.copyfile(adapter.path / name, incoming / name))
            with copy.open("rb") as file:
                os.fsync(file.fileno())
        if adapter_digest(incoming) != adapter.digest:
            raise AdapterFileError(f"the adapter in {adapter.path} changed while it was copied; try again")
        incoming.chmod(0o755)
        try:
            os.rename(incoming, target)
        except OSError:
            if not target.exists():  # otherwise another process copied it first
                raise
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


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
