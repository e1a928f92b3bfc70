"""Devices that several models share: their memory, the state of each model, and the last swap."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ....producer.control.secret_keys import Role
from ....shared.deployment.orders import command_model
from ....shared.deployment.presence import read_devices
from ....shared.errors import ValidationError
from ....shared.messages.devices import DeviceModel, DeviceRecord, ModelPhase, SwapRecord
from ....shared.messages.supervision import ModelAction
from ....shared.swap.rule import Reason
from ....shared.values.shown import shown
from ...words import format_duration, requests_in_words
from ..access import Access
from ..page import Action, ActionContext, Page, PageSection, Params, View, field_of
from ..source import PageSnapshot
from ..words import length_of_time

# A browser waits for the response.
COMMAND_TIMEOUT_S = 60.0
# Phases and reasons of newer versions are texts without words here.
_LIGHTS: dict[str, str] = {ModelPhase.AWAKE: "good", ModelPhase.BROKEN: "bad"}
_REASONS: dict[str, str] = {
    Reason.EMPTY: "no requests were left",
    Reason.LATE: "requests of the next model were late",
    Reason.MAX_WAIT: "requests of the next model had waited for their maximum",
    Reason.IDLE: "no requests came",
    Reason.OPERATOR: "an operator asked for it",
}


async def read_devices_view(snapshot: PageSnapshot) -> list[dict[str, Any]]:
    """Return the devices with their bars and rows, as ``parts/devices.html`` shows them."""
    return [_device(device, snapshot.at) for device in await snapshot.devices()]


async def _read_devices(snapshot: PageSnapshot, params: Params, _: Access) -> View:
    devices = await read_devices_view(snapshot)
    rows = [row for device in devices for row in device["rows"]]
    facts = [{name: value for name, value in device.items() if name not in ("rows", "bar")} for device in devices]
    return {"rows": rows, "devices": devices, "facts": {"devices": facts}}


def _device(device: DeviceRecord, now: float) -> dict[str, Any]:
    used_bytes = sum(model.device_bytes for model in device.models)
    return {
        "device": device.device_id,
        "name": f"{device.device} of {device.host}",
        "worker": device.worker_id,
        "budget_bytes": device.budget_bytes,
        "host_budget_bytes": device.host_budget_bytes,
        "used_bytes": used_bytes,
        "debt_s": device.debt_s,
        "swap_share": device.swap_share,
        "last_swap": "" if device.last_swap is None else swap_words(device.last_swap, now),
        "bar": _bar(device, max(used_bytes, device.budget_bytes, 1)),
        "rows": [_row(device, model) for model in device.models],
    }


def _bar(device: DeviceRecord, whole_bytes: int) -> list[dict[str, Any]]:
    """Return the parts of a device's bar, of a total width of 100: the largest model first."""
    parts, start = [], 0.0
    for model in sorted(device.models, key=lambda model: (-model.device_bytes, model.name)):
        width = 100 * model.device_bytes / whole_bytes
        if width > 0:
            parts.append(
                {"model": model.name, "start": round(start, 2), "width": round(width, 2), "light": _light(model)}
            )
        start += width
    return parts


def _row(device: DeviceRecord, model: DeviceModel) -> dict[str, Any]:
    return {
        "device": device.device_id,
        "model": model.name,
        "state": model.phase,
        "state_words": state_words(model),
        "light": _light(model),
        "lateness": model.lateness if model.standing_s else None,
        "standing_s": model.standing_s or None,
        "wake_s": model.wake_s or None,
        "device_bytes": model.device_bytes,
        "weight_bytes": model.weight_bytes,
        "is_pinned": model.is_pinned,
        "is_kept_asleep": model.is_kept_asleep,
        "engine": model.engine_id,
        "error": model.error,
        "retry_at": model.retry_at or None,
        "worker": device.worker_id,
    }


def _light(model: DeviceModel) -> str:
    return _LIGHTS.get(model.phase, "warn")


def state_words(model: DeviceModel) -> str:
    """Return the state of a model with what an operator has ordered: "asleep 1, by an operator"."""
    notes = [", pinned"] if model.is_pinned else []
    notes += [", by an operator"] if model.is_kept_asleep else []
    return model.phase_words + "".join(notes)


def swap_words(swap: SwapRecord, now: float) -> str:
    """Return a swap in words: "chat slept, coder woke in 1.2 s, 14 s ago, because no requests were left"."""
    steps = [f"{', '.join(swap.left)} left"] if swap.left else []
    steps += [f"{swap.entered} woke"] if swap.entered else []
    words = f"{', '.join(steps)}, in {length_of_time(swap.took_s)}, {format_duration(max(0.0, now - swap.at))} ago"
    if swap.num_handed_back:
        words += f"; {requests_in_words(swap.num_handed_back)} returned to the queue"
    reason = _REASONS.get(swap.reason)
    return f"{words}; {reason}" if reason else words


def _command(action: ModelAction, outcome: str) -> Callable[[ActionContext], Awaitable[str]]:
    """Return the action that commands a model of a device, and of the other devices of its worker."""

    async def do(context: ActionContext) -> str:
        source, model, device_id = context.source, field_of(context.form, "model"), field_of(context.form, "device")
        every = await read_devices(source.connection.execute, source.keys)
        workers = {device.worker_id for device in every if device.device_id == device_id}
        devices = [device for device in every if device.worker_id in workers and _has_model(device, model)]
        if not devices:
            raise ValidationError(f"device must be one that has model {shown(model)}, got {shown(device_id)}")
        async with source.audit.audited(f"model.{action.value}", model, device=device_id):
            await command_model(source.connection.execute, source.keys, devices, model, action, COMMAND_TIMEOUT_S)
        return f"{model} {outcome}"

    return do


def _has_model(device: DeviceRecord, name: str) -> bool:
    return any(model.name == name for model in device.models)


SECTION = PageSection(
    pages=(Page("devices", "/devices", "Devices", _read_devices),),
    actions=(
        Action("/devices/load", Role.OPERATOR, _command(ModelAction.LOAD, "is loaded"), "engines"),
        Action("/devices/unload", Role.OPERATOR, _command(ModelAction.UNLOAD, "sleeps until it is loaded"), "engines"),
        Action("/devices/pin", Role.OPERATOR, _command(ModelAction.PIN, "is loaded and pinned"), "engines"),
        Action("/devices/unpin", Role.OPERATOR, _command(ModelAction.UNPIN, "may leave the device"), "engines"),
    ),
)
