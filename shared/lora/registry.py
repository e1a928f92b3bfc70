"""The names of adapters in a deployment: a hash in Redis, which every change updates in one script.

A name is one adapter's, as a model's name is one model's; it may be pointed to another adapter of the same model. It
belongs to a tenant, or to everybody: a tenant's own goes before one of everybody's. Requests hold a digest from their
enqueuing on, so nothing here changes running requests.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..connection import CommandConnection
from ..deployment.records import note_unreadable
from ..errors import UnknownAdapterError, ValidationError
from ..keys import Keys
from ..messages import WIRE_VERSION
from ..params.lora import LoRARequest
from ..redis_access.script import Script, load_scripts
from ..values.names import check_name
from ..values.shown import shown

EVERYBODY = ""
_SCRIPT_NAMES = ("register", "remove", "swap")


class AdapterRecord(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """Record of a name. JSON, except for ``number``, which is stored before it.

    Args:
        digest: ``adapter_digest`` of the folder.
        tenant: its tenant; "" for all tenants.
        path: the folder, on every host with an engine of the model.
        rank: ``PeftConfig.largest_rank``; target_modules, base_model_name: as there.
        num_bytes: the size of both files.
        pinned: engines load it when they start, and keep it.
        added_at: Unix time in seconds.
        number: ``lora_int_id`` of vLLM's calls: one per digest.
    """

    version: int = WIRE_VERSION
    name: str
    model: str
    digest: str
    path: str
    tenant: str = EVERYBODY
    rank: int = 0
    target_modules: tuple[str, ...] = ()
    base_model_name: str = ""
    num_bytes: int = 0
    pinned: bool = False
    added_at: float = 0.0
    number: int = 0

    def request(self) -> LoRARequest:
        """Return the adapter as requests name it."""
        return LoRARequest(self.name, self.number, self.path, self.base_model_name or None, digest=self.digest)


SCRIPTS: dict[str, Script] = load_scripts(__name__.rpartition(".")[0], _SCRIPT_NAMES)


class AdapterRegistry:
    """Reads and changes the names of one deployment.

    All methods raise ``RedisUnavailableError`` when Redis stays away for longer than the connection retries.
    """

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._names, self._numbers = keys.adapters(), keys.adapter_numbers()

    async def register(
        self, record: AdapterRecord, wanted_number: int = 0
    ) -> tuple[AdapterRecord, AdapterRecord | None]:
        """Point a name to an adapter, also if it had another one of the model. Return the new and the former record.

        A name that is pinned stays so.

        Args:
            wanted_number: number that the caller requests; 0 for the next free one.

        Raises:
            ValidationError: the name is another model's adapter's, or the number another adapter's.
        """
        field = _field(record.tenant, check_name("lora_name", record.name))
        args = [field, check_name("model", record.model), record.digest, wanted_number]
        args += [_rest(record), _rest(msgspec.structs.replace(record, pinned=True))]
        answer = await self._run_registry_script("register", [self._names, self._numbers], args)
        if answer[0] == b"ok":
            return _decoded_record(answer[1]), None if answer[2] is None else _decoded_record(answer[2])
        raise _registration_refusal(answer[0], answer[1].decode(), record, wanted_number)

    async def find(self, name: str, tenant: str) -> AdapterRecord | None:
        """Return the adapter of a tenant's name: its own, or one of all tenants."""
        fields = [_field(tenant, name), _field(EVERYBODY, name)]
        own, common = await self._connection.execute("HMGET", self._names, *fields)
        value = own if own is not None else common
        return None if value is None else _decoded_record(value)

    async def read(self, model: str | None = None) -> list[AdapterRecord]:
        """Return all, or those of a model, by model, name and tenant."""
        records: list[AdapterRecord] = []
        flat = await self._connection.execute("HGETALL", self._names)
        for field, value in zip(flat[::2], flat[1::2], strict=True):
            try:
                records.append(_decoded_record(value))
            except ValueError as error:  # so are those of msgspec
                note_unreadable("adapter", field.decode().replace("\n", " "), error)
        chosen = [record for record in records if model is None or record.model == model]
        return sorted(chosen, key=lambda record: (record.model, record.name, record.tenant))

    async def visible(self, tenant: str) -> list[AdapterRecord]:
        """Return the adapters that a tenant may name: its own, and those of all tenants with other names."""
        records = await self.read()
        own = {record.name for record in records if record.tenant == tenant}
        return [one for one in records if one.tenant == tenant or (one.tenant == EVERYBODY and one.name not in own)]

    async def pin(self, name: str, tenant: str, *, pinned: bool) -> AdapterRecord:
        """Set whether engines keep it loaded. Return the new record.

        Raises:
            UnknownAdapterError: ``tenant`` has no adapter of that name; everybody's is not looked at.
        """
        while True:
            field, value = await self._read_value(name, tenant)
            record = msgspec.structs.replace(_decoded_record(value), pinned=pinned)
            if await self._run_registry_script("swap", [self._names], [field, value, _encoded_record(record)]):
                return record

    async def remove(self, name: str, tenant: str) -> AdapterRecord:
        """Remove a name. Return its record. Raises: as ``pin``."""
        while True:
            field, value = await self._read_value(name, tenant)
            record = _decoded_record(value)
            if await self._run_registry_script("remove", [self._names, self._numbers], [field, value, record.digest]):
                return record

    async def take_back(self, record: AdapterRecord, former: AdapterRecord | None) -> bool:
        """Undo a ``register`` that returned these; False if the name was changed since, and stays."""
        field, value = _field(record.tenant, record.name), _encoded_record(record)
        if former is None:
            return bool(
                await self._run_registry_script("remove", [self._names, self._numbers], [field, value, record.digest])
            )
        return bool(await self._run_registry_script("swap", [self._names], [field, value, _encoded_record(former)]))

    async def _read_value(self, name: str, tenant: str) -> tuple[str, bytes]:
        field = _field(tenant, check_name("lora_name", name))
        value = await self._connection.execute("HGET", self._names, field)
        if value is None:
            raise UnknownAdapterError(f"{owner(tenant)} has no adapter {shown(name)}; penstock lora list shows them")
        return field, value

    async def _run_registry_script(self, name: str, keys: list[str], args: list[Any]) -> Any:
        return await self._connection.run_script(SCRIPTS[name], keys, args)


def owner(tenant: str) -> str:
    """Return the owner of a name, in words."""
    return f"tenant {shown(tenant)}" if tenant else "everybody's list"


def _registration_refusal(reason: bytes, of: str, record: AdapterRecord, wanted_number: int) -> ValidationError:
    if reason == b"of_model":
        return ValidationError(
            f"lora_name {shown(record.name)} is that of an adapter of model {shown(of)} already, and one name is one "
            "model's; choose another, or remove that one first"
        )
    if reason == b"numbered":
        return ValidationError(
            f"lora_int_id of this adapter is {of} already, got {wanted_number}: equal files are one adapter"
        )
    return ValidationError(
        f"lora_int_id {wanted_number} is that of another adapter (digest {of[:12]}…); give each its own, or pass name "
        "and path alone to have one drawn"
    )


def _field(tenant: str, name: str) -> str:
    """Return the hash field of a name; neither part may contain a line feed."""
    return f"{tenant}\n{name}"


def _rest(record: AdapterRecord) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(record, number=0))


def _encoded_record(record: AdapterRecord) -> bytes:
    return f"{record.number}\n{record.model}\n".encode() + _rest(record)


def _decoded_record(value: bytes) -> AdapterRecord:
    number, _, rest = value.split(b"\n", 2)
    return msgspec.structs.replace(msgspec.json.decode(rest, type=AdapterRecord), number=int(number))
