"""Take a model from one shard to another, with all that waits, has ended and is known of it.

    begin ▶ shut the target ▶ pause, put back ▶ the source sends all there ▶ copy ▶ open the target ▶ home ▶ resume

Invariant: at each moment at most one Redis serves the model. The target has its mark before the source sends anybody
there. From the mark at the source until the target's is taken away none does, and whoever asks waits; a request, a
token or an end that was refused meanwhile is sent again by who wanted it, and is there once, since all writes may be
repeated. Every step may be repeated, too: a move that was cut short is run again, under a higher number, by which the
servers refuse what the former one would still write.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from redis.exceptions import ResponseError

from ..broker import Queue
from ..connection import CommandConnection
from ..errors import BrokerError, ConfigurationError, UnknownModelError, ValidationError
from ..keys import Keys
from ..values.shown import shown
from .addresses import HOME
from .placements import SCRIPTS, Placements, lives_here

PAUSE_S = 0.1
SCAN_COUNT = 1000
# Of one script, which holds up the server.
MAX_BYTES = 1 << 20
MAX_ROWS = 200
# Read at the same time, so that round trips do not add up. Each key may have the largest payload of a request.
KEYS_AT_ONCE = 32
# A longer stream is copied in pieces; a lane may hold any number of requests.
MAX_ENTRIES = 500

Row = tuple[Any, ...]


class MoveReport(msgspec.Struct, frozen=True):
    """Result of a move. ``is_paused``: the queue was paused before by an operator, and still is."""

    model: str
    source: str
    target: str
    num_keys: int
    is_paused: bool


class ShardMover:
    """Moves models between the servers of a deployment.

    Args:
        servers: a plain connection to each, by name, home among them.
    """

    def __init__(self, servers: Mapping[str, CommandConnection], keys: Keys) -> None:
        self.servers = servers
        self._home = servers[HOME]
        self._keys = keys

    async def under_way(self) -> dict[str, str]:
        """Return the target of each unfinished move."""
        flat = await self._home.execute("HGETALL", self._keys.moves())
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return {name.decode(): msgspec.json.decode(move)["target"] for name, move in pairs if name}

    async def move(self, model: str, target: str) -> MoveReport:
        """Move ``model`` to the shard ``target``; returns when it is served there.

        Raises:
            ValidationError: there is no such shard; the model is there; or it is on its way to another.
            UnknownModelError: no shard has ever held it.
            ConfigurationError: a server does not let us, or cannot read what another wrote.
            BrokerError: somebody else moves the model.
        """
        if target not in self.servers:
            names = ", ".join(self.servers)
            raise ValidationError(f"to must be one of the shards {names}, got {shown(target)}")
        await self._record_home(model)
        place = await self._home.execute("HGET", self._keys.placements(), model)
        source = self._server(place.decode()) if place else None
        is_paused = source is not None and place.decode() != target and await self._is_paused(source, model)
        answer = await self._run_on_model(
            self._home, "open_move", [self._keys.placements(), self._keys.moves()], model, target, int(is_paused)
        )
        if answer[0] != b"begun":
            raise _move_refusal(model, target, answer)
        number, source_name = answer[1].decode(), answer[2].decode()
        was_paused, is_there, first = answer[3] == b"1", answer[4], answer[5]
        step = _Move(self._keys, model, number, self._server(source_name), self.servers[target], target)
        if not is_there:
            try:
                is_missing = await step.arrive(first)
            except ConfigurationError:
                await self._close(model, number)  # nothing was done
                raise
            await step.depart()
            if is_missing:
                await step.copy()
                await step.settle()
            await self._switch(model, target, number)
        if not was_paused:
            await Queue(self.servers[target], self._keys.model(model)).resume()
        await step.clear()
        await self._close(model, number)
        return MoveReport(model, source_name, target, step.num_keys, was_paused)

    async def _record_home(self, model: str) -> None:
        """Give a model its record that was at home before there were shards."""
        if await self._home.execute("EXISTS", *lives_here(self._keys.model(model))):
            await Placements(self._home, self._keys, [name for name in self.servers if name != HOME]).find(model)

    async def _close(self, model: str, number: str) -> None:
        await self._run_on_model(self._home, "close_move", [self._keys.placements(), self._keys.moves()], model, number)

    async def _switch(self, model: str, target: str, number: str) -> None:
        keys = [self._keys.placements(), self._keys.moves(), self._keys.model(model).place]
        if not await self._run_on_model(self._home, "switch", keys, model, target, number):
            raise _taken_up(model)

    async def _is_paused(self, source: CommandConnection, model: str) -> bool:
        keys = self._keys.model(model)
        # Of a move that was cut short the record says it.
        return await source.execute("GET", keys.place) is None and await Queue(source, keys).is_paused()

    def _server(self, name: str) -> CommandConnection:
        if name not in self.servers:
            raise ConfigurationError(
                f"the model lives on shard {shown(name)}, which is not among {', '.join(self.servers)}; name it in "
                "PENSTOCK_SHARDS"
            )
        return self.servers[name]

    async def _run_on_model(self, server: CommandConnection, name: str, keys: list[str], model: str, *args: Any) -> Any:
        return await server.run_script(SCRIPTS[name], keys, [self._keys.model(model).prefix, model, *args])


class _Move:
    """The steps of one move at its two servers."""

    def __init__(
        self, keys: Keys, model: str, number: str, source: CommandConnection, target: CommandConnection, name: str
    ) -> None:
        self._keys = keys.model(model)
        self._number = number
        self._source = source
        self._target = target
        self._target_name = name
        self.num_keys = 0

    async def depart(self) -> None:
        """Requeue the engines' requests, and redirect all processes to the target, which admits none yet."""
        keys = self._keys
        while True:
            if await self._source.execute("GET", keys.place) is None:
                await Queue(self._source, keys).pause(put_back=True)
            own_keys = [keys.place, keys.moved_by, keys.leases]
            num_held = await self._run_in_move(self._source, "depart", own_keys, self._target_name)
            if num_held < 0:
                raise _taken_up(keys.name)
            if num_held == 0:
                return
            await asyncio.sleep(PAUSE_S)

    async def arrive(self, first: bytes) -> bool:
        """Keep other processes out of the target; False if all keys are there since the move was cut short."""
        keys = self._keys
        reply = await self._run_in_move(self._target, "arrive", [keys.place, keys.moved_by, keys.queue], first)
        if reply < 0:
            raise _taken_up(keys.name)
        if reply == 0:
            raise ConfigurationError(
                f"shard {shown(self._target_name)} has a queue of model {shown(keys.name)} already, which would be "
                "lost; find out who wrote it, and delete its keys there"
            )
        return reply == 1

    async def copy(self) -> None:
        """Write all keys at the target, in place of what a move that was cut short has left there."""
        mark = f"*{self._number}"
        async for names in self._names(self._target):
            await self._restore_rows(self._target, mark, [("delete", name) for name in names])
        async for names in self._names(self._source):
            self.num_keys += len(names)
            async for rows in self._dump_rows(names):
                await self._restore_rows(self._target, mark, rows)

    async def settle(self) -> None:
        if not await self._run_in_move(self._target, "settle", [self._keys.place, self._keys.moved_by]):
            raise _taken_up(self._keys.name)

    async def clear(self) -> None:
        """Delete at the source what is at the target."""
        async for names in self._names(self._source):
            await self._restore_rows(self._source, self._target_name, [("delete", name) for name in names])

    async def _names(self, server: CommandConnection) -> AsyncIterator[list[bytes]]:
        """The model's keys at a server, in pieces; all but what the server itself has to remember."""
        own = {self._keys.place.encode(), self._keys.moved_by.encode()}
        link, cursor = server.link_to(self._keys.place), b"0"
        while True:
            cursor, names = await link.execute("SCAN", cursor, "MATCH", self._keys.pattern, "COUNT", SCAN_COUNT)
            for start in range(0, len(names), MAX_ROWS):
                if part := [name for name in names[start : start + MAX_ROWS] if name not in own]:
                    yield part
            if cursor == b"0":
                return

    async def _dump_rows(self, names: list[bytes]) -> AsyncIterator[list[Row]]:
        rows: list[Row] = []
        num_bytes = 0
        async for row in self._rows_of(names):
            rows.append(row)
            num_bytes += sum(len(part) for part in row if isinstance(part, bytes))
            if num_bytes > MAX_BYTES or len(rows) == MAX_ROWS:
                yield rows
                rows, num_bytes = [], 0
        if rows:
            yield rows

    async def _rows_of(self, names: list[bytes]) -> AsyncIterator[Row]:
        for start in range(0, len(names), KEYS_AT_ONCE):
            part = names[start : start + KEYS_AT_ONCE]
            are_long = await asyncio.gather(*map(self._is_long_stream, part))
            short = (name for name, is_long in zip(part, are_long, strict=True) if not is_long)
            for row in await asyncio.gather(*map(self._dump, short)):
                if row is not None:
                    yield row
            for name in itertools.compress(part, are_long):
                async for row in self._rows_of_long_stream(name):
                    yield row

    async def _is_long_stream(self, name: bytes) -> bool:
        """Return whether a key is a stream to be copied in pieces."""
        execute = self._source.link_to(self._keys.place).execute
        return await execute("TYPE", name) == b"stream" and await execute("XLEN", name) > MAX_ENTRIES

    async def _dump(self, name: bytes) -> Row | None:
        """Return the row of a whole key; None if the key has expired."""
        execute = self._source.link_to(self._keys.place).execute
        ttl_ms, dump = await asyncio.gather(execute("PTTL", name), execute("DUMP", name))
        return None if dump is None else ("restore", name, max(0, ttl_ms), dump)

    async def _rows_of_long_stream(self, name: bytes) -> AsyncIterator[Row]:
        execute = self._source.link_to(self._keys.place).execute
        yield "delete", name  # a piece may have come twice
        start = b"-"
        while entries := await execute("XRANGE", name, start, "+", "COUNT", MAX_ENTRIES):
            for entry_id, fields in entries:
                yield "add", name, entry_id, len(fields), *fields
            start = b"(" + entries[-1][0]
        flat = await execute("XINFO", "STREAM", name)
        yield "last", name, dict(zip(flat[::2], flat[1::2], strict=True))[b"last-generated-id"]

    async def _restore_rows(self, server: CommandConnection, mark: str, rows: list[Row]) -> None:
        try:
            is_ours = await self._run_in_move(
                server, "write_keys", [self._keys.place], mark, *(part for row in rows for part in row)
            )
        except ResponseError as error:
            raise ConfigurationError(
                f"shard {shown(self._target_name)} does not take the keys of model {shown(self._keys.name)} ({error}); "
                "it must be no older than the Redis that they come from, and permit RESTORE and XSETID"
            ) from error
        if not is_ours:
            raise _taken_up(self._keys.name)

    async def _run_in_move(self, server: CommandConnection, name: str, keys: list[str], *args: Any) -> Any:
        return await server.run_script(SCRIPTS[name], keys, [self._keys.prefix, self._number, *args])


def _move_refusal(model: str, target: str, answer: list[Any]) -> Exception:
    kind = answer[0].decode()
    if kind == "unknown":
        return UnknownModelError(f"model {shown(model)} has no place yet: nobody has used it with these shards")
    if kind == "there":
        return ValidationError(f"model {shown(model)} is on shard {shown(target)} already")
    other = answer[1].decode()
    return ValidationError(
        f"model {shown(model)} is on its way to shard {shown(other)}; run 'penstock shard move {model} {other}' to its "
        "end first"
    )


def _taken_up(model: str) -> BrokerError:
    return BrokerError(f"somebody else moves model {shown(model)} now; see 'penstock shard list'")
