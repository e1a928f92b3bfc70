"""Scripts are run here: one that fails on damage is run once more, after what all requests share was put right."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from ..connection import CommandConnection
from ..errors import ConfigurationError
from ..keys import ModelKeys
from ..log import get_logger
from ..redis_access.link import told_place
from ..shown import shown
from .script import SCRIPTS

T = TypeVar("T")
MAX_TOLD = 20

log = get_logger(__name__)


async def run_script(
    connection: CommandConnection,
    keys: ModelKeys,
    name: str,
    own_keys: list[str],
    args: list[Any],
    **how: bool,
) -> Any:
    """Run the script ``name`` with the model's prefix and ``args``; ``how`` is as of ``CommandConnection.execute``."""

    def run() -> Awaitable[Any]:
        return connection.run_script(SCRIPTS[name], own_keys, [keys.prefix, *args], **how)

    return await repairing(connection, keys, run)


async def repairing(connection: CommandConnection, keys: ModelKeys, run: Callable[[], Awaitable[T]]) -> T:
    """Return what ``run`` returns; should it meet what the scripts did not write, what it returns after a repair.

    Scripts may be run twice, so one that stopped half-way may be, too.
    """
    try:
        return await run()
    except ResponseError as error:
        place = told_place(error)
        if place is not None:
            raise ConfigurationError(
                f"model {shown(keys.name)} lives on shard {shown(place)} of this deployment, and this process knows no "
                "shards; set PENSTOCK_SHARDS"
            ) from error
        if not _tells_of_damage(error):
            raise
        found = await connection.run_script(SCRIPTS["repair"], [keys.leases], [keys.prefix])
        log.error(
            "redis_damage_repaired",
            remedy="find out what else writes to this Redis",
            model=keys.name,
            found=[one.decode(errors="replace") for one in found[:MAX_TOLD]],
            error=str(error),
        )
        return await run()


def _tells_of_damage(error: ResponseError) -> bool:
    """What a script raises of a value it cannot use, or a command of a key; not what the server refuses as a whole."""
    text = str(error)
    return ("user_script" in text or "WRONGTYPE" in text) and "OOM" not in text and "NOPERM" not in text
