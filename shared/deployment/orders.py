"""Orders to workers, here or on other hosts: stop, run another number of engines, load or unload a model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

import msgspec

from ..errors import PenstockError, ValidationError
from ..keys import Keys
from ..messages.devices import DeviceModel, DeviceRecord, ModelPhase
from ..messages.supervision import EngineState, ModelAction, ModelCommand, ScaleCommand, WorkerCommand
from ..values.shown import shown
from .audit import change_words
from .presence import ProcessKind, ProcessRecord, read_devices, read_heartbeats, read_processes
from .records import EngineHeartbeat

# Time for the steps after the last request: releasing claims, unloading the model, the last heartbeat.
MARGIN_S = 15.0
POLL_INTERVAL_S = 0.1
Execute = Callable[..., Awaitable[Any]]
# Options of a supervisor's record in ``presence``.
WORKER_OPTION, ENGINES_OPTION, MAX_ENGINES_OPTION = "worker", "engines", "max_engines"
# Set if its engines are ranks of a data-parallel group.
GROUP_OPTION = "data_parallel_group"
_NOT_SERVING = frozenset(
    {EngineState.STARTING, EngineState.DRAINING, EngineState.DEAD, EngineState.FAILED, EngineState.STOPPED}
)


async def known_workers(execute: Execute, keys: Keys) -> set[str]:
    """Return the ids of the workers of which an engine sends heartbeats."""
    return {beat.worker_id for beat in await read_heartbeats(execute, keys)}


async def check_worker(execute: Execute, keys: Keys, worker_id: str) -> None:
    """Check that an engine of the worker sends heartbeats.

    Raises:
        ValidationError: none does.
    """
    worker_ids = await known_workers(execute, keys)
    if worker_id not in worker_ids:
        names = ", ".join(sorted(worker_ids)) or "none (no worker runs)"
        raise ValidationError(f"worker_id must be one of {names}, got {shown(worker_id)}")


class Drain(msgspec.Struct, frozen=True):
    """Running requests of a worker that drains.

    Args:
        left_s: time until they are handed back; 0 if it is unknown, as for engines of an earlier version.
    """

    worker_id: str
    num_running: int
    left_s: float

    def __str__(self) -> str:
        return f"{self.worker_id} is draining: {self.words}"

    @property
    def words(self) -> str:
        """The requests and their time: "2 requests are still running, for at most 21 s"."""
        if not self.num_running:
            return "no request is running any more"
        words = "1 request is" if self.num_running == 1 else f"{self.num_running:,} requests are"
        return f"{words} still running" + (f", for at most {self.left_s:.0f} s" if self.left_s > 0 else "")


def read_drains(beats: Iterable[EngineHeartbeat], at_s: float) -> list[Drain]:
    """Return the draining workers.

    Args:
        beats: heartbeats of engines; engines that do not drain are ignored.
        at_s: the current time, in seconds since the epoch.
    """
    draining: dict[str, list[EngineHeartbeat]] = {}
    for beat in beats:
        if beat.state is EngineState.DRAINING:
            draining.setdefault(beat.worker_id, []).append(beat)
    return [
        Drain(
            worker_id=worker_id,
            num_running=sum(engine.num_running_reqs for engine in engines),
            left_s=max(0.0, max(engine.drains_until for engine in engines) - at_s),
        )
        for worker_id, engines in draining.items()
    ]


async def make_leave(
    execute: Execute,
    keys: Keys,
    worker_ids: Collection[str],
    command: WorkerCommand,
    patience_s: float,
    on_beats: Callable[[list[EngineHeartbeat]], None] = lambda _: None,
) -> None:
    """Send ``command`` to workers and return when they have left; absent ones count as left.

    Args:
        execute: runs one command: ``CommandConnection.execute``.
        on_beats: gets the heartbeats of their engines again and again until they have left.

    Raises:
        PenstockError: some are still present after ``patience_s``; the message names them.
    """
    try:
        async with asyncio.timeout(patience_s):
            await asyncio.gather(*(send_to_worker(execute, keys, worker_id, command) for worker_id in worker_ids))
            # Poll, because no event crosses hosts.
            while beats := [beat for beat in await read_heartbeats(execute, keys) if beat.worker_id in worker_ids]:
                on_beats(beats)
                await asyncio.sleep(POLL_INTERVAL_S)
    except TimeoutError:
        staying = await known_workers(execute, keys) & set(worker_ids)
        raise PenstockError(
            f"still there after {patience_s:g} s: {', '.join(sorted(staying)) or 'none'}; "
            "look at their logs, or send their supervisors SIGKILL"
        ) from None


async def send_to_worker(execute: Execute, keys: Keys, worker_id: str, command: WorkerCommand) -> None:
    """Publish until a supervisor has received it, since one that lost its connection listens again soon."""
    data = msgspec.msgpack.encode(command)
    while not await execute("PUBLISH", keys.worker_commands(worker_id), data):
        if worker_id not in await known_workers(execute, keys):
            return
        await asyncio.sleep(POLL_INTERVAL_S)


async def scale_worker(execute: Execute, keys: Keys, worker_id: str, num_engines: int, patience_s: float) -> None:
    """Set the number of engines of a worker, and return when it serves with them.

    Args:
        execute: runs one command: ``CommandConnection.execute``.

    Raises:
        ValidationError: there is no such worker, it has no capacity for as many, or its engines are ranks of a group.
        PenstockError: it has another number of serving engines after ``patience_s``; the message says their states.
    """
    try:
        async with asyncio.timeout(patience_s):
            await order_scale(execute, keys, worker_id, num_engines)
            while not _is_scaled(await _beats(execute, keys, worker_id), num_engines):  # noqa: ASYNC110  # as in leave
                await asyncio.sleep(POLL_INTERVAL_S)
    except TimeoutError:
        beats = await _beats(execute, keys, worker_id)
        states = ", ".join(f"{beat.engine_id} is {beat.state}" for beat in beats) or "no engine beats"
        raise PenstockError(
            f"worker {worker_id} does not serve with {num_engines} engines after {patience_s:g} s: {states}; "
            "it goes on with that"
        ) from None


async def command_model(
    execute: Execute,
    keys: Keys,
    devices: Collection[DeviceRecord],
    model: str,
    action: ModelAction,
    patience_s: float,
) -> None:
    """Command a model of devices that several share, and return when their records show it done.

    Args:
        execute: runs one command: ``CommandConnection.execute``.
        devices: devices that have the model.

    Raises:
        PenstockError: the model could not be loaded, or the command is not carried out after ``patience_s``.
    """
    device_ids = {device.device_id for device in devices}
    command = ModelCommand(model, action)
    at_start = {device.device_id: _model_in(device, model) for device in devices}
    try:
        async with asyncio.timeout(patience_s):
            for worker_id in {device.worker_id for device in devices}:
                while not await execute("PUBLISH", keys.worker_commands(worker_id), msgspec.msgpack.encode(command)):  # noqa: ASYNC110  # as in leave
                    await asyncio.sleep(POLL_INTERVAL_S)
            while device_ids:
                await asyncio.sleep(POLL_INTERVAL_S)
                for device in await read_devices(execute, keys):
                    if device.device_id in device_ids and _is_done(device, model, action, at_start[device.device_id]):
                        device_ids.remove(device.device_id)
    except TimeoutError:
        raise PenstockError(
            f"{action.value} of {model} is not done after {patience_s:g} s on {', '.join(sorted(device_ids))}; see "
            "worker models"
        ) from None


def _is_done(device: DeviceRecord, name: str, action: ModelAction, before: DeviceModel | None) -> bool:
    """Return whether a record shows a command carried out.

    Raises:
        PenstockError: the model could not be loaded, or the command was refused; says why.
    """
    model = _model_in(device, name)
    if model is None:
        return False
    if action is ModelAction.UNPIN:
        return not model.is_pinned
    if action is ModelAction.UNLOAD:
        return model.is_kept_asleep and model.level > 0
    num_failures = sum(model.wake_failures.values())
    if before is not None and num_failures > sum(before.wake_failures.values()):
        raise PenstockError(f"model {name} could not be loaded: {model.error}")
    if before is not None and model.num_refusals > before.num_refusals:
        raise PenstockError(f"{action.value} of {name} was refused: {model.refusal}")
    if action is ModelAction.PIN:
        return model.phase == ModelPhase.AWAKE and model.is_pinned
    # It may have left again for a model with requests, before a record was written.
    return model.phase == ModelPhase.AWAKE or (before is not None and _num_wakes(model) > _num_wakes(before))


def _num_wakes(model: DeviceModel) -> int:
    return sum(times.count for times in model.wakes.values())


def _model_in(device: DeviceRecord, name: str) -> DeviceModel | None:
    return next((model for model in device.models if model.name == name), None)


async def order_scale(execute: Execute, keys: Keys, worker_id: str, num_engines: int) -> None:
    """Send the number of engines to a worker, without waiting for them.

    Raises:
        ValidationError: as ``scale_worker``.
    """
    if isinstance(num_engines, bool) or not isinstance(num_engines, int) or num_engines < 1:
        raise ValidationError(f"num_engines must be a number of at least 1, got {shown(num_engines)}; stop the worker")
    _check_room(await _supervisors(execute, keys), worker_id, num_engines)
    await send_to_worker(execute, keys, worker_id, ScaleCommand(num_engines))


async def scale_words(execute: Execute, keys: Keys, worker_id: str, num_engines: int) -> str:
    """Return the change of a worker's number of engines for the audit log; only the new number if it reports none."""
    supervisor = (await _supervisors(execute, keys)).get(worker_id)
    before = supervisor and supervisor.options.get(ENGINES_OPTION)
    return change_words(before, str(num_engines)) if before else str(num_engines)


async def _supervisors(execute: Execute, keys: Keys) -> dict[str, ProcessRecord]:
    processes = await read_processes(execute, keys)
    return {
        record.options[WORKER_OPTION]: record
        for record in processes
        if record.kind == ProcessKind.SUPERVISOR and WORKER_OPTION in record.options
    }


def _check_room(supervisors: dict[str, ProcessRecord], worker_id: str, num_engines: int) -> None:
    if worker_id not in supervisors:
        available = ", ".join(sorted(supervisors)) or "none that is there"
        raise ValidationError(f"worker_id must be one of {available}, got {shown(worker_id)}")
    group = supervisors[worker_id].options.get(GROUP_OPTION)
    if group is not None:
        raise ValidationError(group_refusal(worker_id, group))
    room = supervisors[worker_id].options.get(MAX_ENGINES_OPTION)
    if room is None:
        raise ValidationError(f"worker {worker_id} is of a version whose number of engines stays")
    if num_engines > int(room):
        raise ValidationError(f"num_engines must be at most {room}, for which worker {worker_id} has room")


def group_refusal(worker_id: str, group: str) -> str:
    """Return why the engines of ``worker_id`` are not scaled one by one, and the remedy."""
    return (
        f"worker {worker_id} has ranks of the data-parallel group {group}, which share the experts of a model: another "
        "number of them is agreed by all; call scale_elastic_ep (penstock engine scale); start and drain workers for "
        "the engines that stand by"
    )


async def _beats(execute: Execute, keys: Keys, worker_id: str) -> list[EngineHeartbeat]:
    return [beat for beat in await read_heartbeats(execute, keys) if beat.worker_id == worker_id]


def _is_scaled(beats: list[EngineHeartbeat], num_engines: int) -> bool:
    return len(beats) == num_engines and not any(beat.state in _NOT_SERVING for beat in beats)
