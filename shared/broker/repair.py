"""Runs scripts. A script that fails on damage is run once more after the shared data was repaired."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from ..connection import CommandConnection
from ..errors import ConfigurationError
from ..keys import ModelKeys
from ..process.log import get_logger
from ..redis_access.link import parse_redirect
from ..values.shown import shown
from .script import SCRIPTS

T = TypeVar("T")
MAX_LOGGED = 20

log = get_logger(__name__)


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
