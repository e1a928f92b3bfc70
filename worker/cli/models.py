"""``worker models``: models of devices that several share, and commands to load, unload and pin them."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from ...shared.connection import checked_connection
from ...shared.deployment.audit import Audit, acting_as, process_actor
from ...shared.deployment.orders import command_model
from ...shared.deployment.presence import read_devices
from ...shared.keys import Keys
from ...shared.messages.devices import DeviceModel, DeviceRecord
from ...shared.messages.supervision import ModelAction
from ...shared.process.command_line import Command, UsageError, add_redis_arguments, format_table
from ...shared.redis_access.embedded import resolve_redis_url
from ...shared.values.shown import format_bytes

_HEADER = ("WORKER", "DEVICE", "MODEL", "STATE", "LATE", "WAKE", "MEMORY", "NOTE")


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker_id", nargs="?", help="as shown by worker list; all of them by default")
    actions = parser.add_mutually_exclusive_group()
    for action, words in (
        (ModelAction.LOAD, "wake this model now, even if it was broken"),
        (ModelAction.UNLOAD, "put it to sleep until --load"),
        (ModelAction.PIN, "wake it, and never put it to sleep"),
        (ModelAction.UNPIN, "let it leave again"),
    ):
        actions.add_argument(f"--{action.value}", metavar="NAME", help=words)
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="time until it is done (300)")
    parser.add_argument("--json", action="store_true", help="one array of device records, with every field")
    add_redis_arguments(parser)


def _run_models(arguments: argparse.Namespace) -> int:
    chosen = [(action, name) for action in ModelAction if (name := getattr(arguments, action.value)) is not None]
    with resolve_redis_url(arguments.redis_url) as url:
        devices = asyncio.run(_read_or_command(url, arguments, *(chosen[0] if chosen else (None, ""))))
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(devices)).decode())
    else:
        print(format_devices(devices) if devices else "no device has several models")
    return 0


def format_devices(devices: Sequence[DeviceRecord]) -> str:
    """Return a table with a row per model and device, and a line about the memory and swaps of each device."""
    rows = [_model_row(device, model) for device in devices for model in device.models]
    return "\n".join([format_table(_HEADER, rows), *map(_summary, devices)])


async def _read_or_command(
    url: str, arguments: argparse.Namespace, action: ModelAction | None, model: str
) -> list[DeviceRecord]:
    """Carry out the action, if there is one, and return the records of the devices."""
    keys = Keys(arguments.namespace)
    async with checked_connection(url, namespace=arguments.namespace) as connection:
        if action is not None:
            devices = _with_model(await read_devices(connection.execute, keys), arguments.worker_id, model)
            with acting_as(process_actor("cli")):
                async with Audit(connection, keys).audited(f"model.{action.value}", model):
                    await command_model(connection.execute, keys, devices, model, action, arguments.timeout)
        return [*_of_worker(await read_devices(connection.execute, keys), arguments.worker_id)]


def _of_worker(devices: Iterable[DeviceRecord], worker_id: str | None) -> list[DeviceRecord]:
    return [device for device in devices if worker_id in (None, device.worker_id)]


def _with_model(devices: Iterable[DeviceRecord], worker_id: str | None, name: str) -> list[DeviceRecord]:
    """Return the devices of the worker that have the model.

    Raises:
        UsageError: none has it; the message names the models there are.
    """
    every = _of_worker(devices, worker_id)
    chosen = [device for device in every if any(model.name == name for model in device.models)]
    if not chosen:
        names = sorted({model.name for device in every for model in device.models})
        raise UsageError(
            f"no device of {worker_id or 'any worker'} has a model {name!r}; there are {', '.join(names) or 'none'}"
        )
    return chosen


def _model_row(device: DeviceRecord, model: DeviceModel) -> list[str]:
    return [
        device.worker_id,
        device.device,
        model.name,
        model.phase_words,
        f"{model.lateness:.1f}" if model.standing_s else "-",
        f"{model.wake_s:.1f} s" if model.wake_s else "-",
        format_bytes(model.device_bytes) if model.device_bytes else "-",
        _note(model),
    ]


def _note(model: DeviceModel) -> str:
    notes = ["pinned"] if model.is_pinned else []
    notes += ["unloaded by an operator"] if model.is_kept_asleep else []
    return "; ".join([*notes, *filter(None, [model.error])]) or "-"


def _summary(device: DeviceRecord) -> str:
    used = sum(model.device_bytes for model in device.models)
    return (
        f"{device.worker_id} {device.device}: {format_bytes(used)} of {format_bytes(device.budget_bytes)}, swaps took "
        f"{device.swap_share:.1%} of the last 10 minutes, debt {device.debt_s:.1f} s"
    )


COMMAND = Command(
    "models", "Show and command models that share devices.", run=_run_models, add_arguments=_add_model_arguments
)
