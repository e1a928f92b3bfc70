"""The broker's scripts, and how they are run: damage of stored data is detected, and repaired where it can be.

The folders of ``scripts`` say who calls a script: callers, engines, operators, or reapers. ``parts`` has the files that
scripts name in their first line (``redis_access/script.py``). A script uses only the parts that it needs, because each
call creates all functions of its text anew, which takes about 0.1 microseconds each.

``damage.lua`` detects damage within the scripts, ``refusing_damage`` outside of them. A script that fails on damage is
run once more after the shared data was repaired.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import resources
from typing import Any, TypeVar

import msgspec
from redis.exceptions import ResponseError

from ..connection import CommandConnection
from ..errors import ConfigurationError, DamagedRecordError
from ..keys import ModelKeys
from ..process.log import get_logger
from ..queue.lifecycle import moves_as_lua
from ..queue.policy import QueuePolicy
from ..redis_access.link import parse_redirect
from ..redis_access.script import Script, linked_text, read_texts
from ..values.shown import shown

_TEXTS = {
    folder.name: read_texts(folder)
    for folder in (resources.files(__name__.rpartition(".")[0]) / "scripts").iterdir()
    if folder.is_dir()
}
PARTS = _TEXTS.pop("parts")
WRONG_TYPE = "WRONGTYPE"
T = TypeVar("T")
MAX_LOGGED = 20
log = get_logger(__name__)


def _linked_text(text: str) -> str:
    tables = moves_as_lua() + f"local DEFAULT_POLICY = [==[{QueuePolicy().encode().decode()}]==]\n"
    return linked_text(text, PARTS, tables)


SCRIPTS: dict[str, Script] = {
    name: Script(name, partial(_linked_text, text)) for texts in _TEXTS.values() for name, text in texts.items()
}


@contextmanager
def refusing_damage(request_id: str, part: str) -> Iterator[None]:
    """Raise ``DamagedRecordError`` if the part of a request that is read is not as the scripts wrote it."""
    try:
        yield
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _damaged(request_id, part, error) from error
    except ResponseError as error:
        if WRONG_TYPE not in str(error):
            raise
        raise _damaged(request_id, part, error) from error


def _damaged(request_id: str, part: str, error: Exception) -> DamagedRecordError:
    return DamagedRecordError(
        f"the {part} of request {shown(request_id)} in Redis was damaged from outside ({str(error)[:200]}); send the "
        "request again, and find out what else writes to this Redis"
    )


async def run_script(
    connection: CommandConnection,
    keys: ModelKeys,
    name: str,
    own_keys: list[str],
    args: list[Any],
    **how: bool,
) -> Any:
    """Run the script ``name`` with the model's prefix and ``args``; ``how`` as in ``CommandConnection.execute``."""

    def run() -> Awaitable[Any]:
        return connection.run_script(SCRIPTS[name], own_keys, [keys.prefix, *args], **how)

    return await repairing(connection, keys, run)


async def repairing(connection: CommandConnection, keys: ModelKeys, run: Callable[[], Awaitable[T]]) -> T:
    """Return the result of ``run``. If it meets data that the scripts did not write, repair it and run again.

    Scripts may be run twice, and so may one that stopped half-way.
    """
    try:
        return await run()
    except ResponseError as error:
        place = parse_redirect(error)
        if place is not None:
            raise ConfigurationError(
                f"model {shown(keys.name)} is on shard {shown(place)} of this deployment, but this process has no "
                "shards configured; set PENSTOCK_SHARDS"
            ) from error
        if not _is_damage_error(error):
            raise
        damage = await connection.run_script(SCRIPTS["repair"], [keys.leases], [keys.prefix])
        log.error(
            "redis_damage_repaired",
            remedy="find out what else writes to this Redis",
            model=keys.name,
            found=[field.decode(errors="replace") for field in damage[:MAX_LOGGED]],
            error=str(error),
        )
        return await run()


def _is_damage_error(error: ResponseError) -> bool:
    """Whether a script failed on a value, or a command on a key's type. Not if the server refuses the whole call."""
    text = str(error)
    return ("user_script" in text or "WRONGTYPE" in text) and "OOM" not in text and "NOPERM" not in text
