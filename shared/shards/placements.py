"""The shard of each model, and the scripts that record it.

Home records it once: at first use by a rendezvous hash over the shards that there are, afterwards only by ``penstock
shard move``. So shards may be added at any time, and nothing moves by itself. A model that has keys at home before it
has a record stays there.

A Redis that a process may ask for a model by mistake has a mark that names the right one. Scripts look at the mark
first and refuse (``lib.lua``). So a process with an old record does no harm: the refusal tells it where to look.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from ..connection import CommandConnection
from ..errors import ConfigurationError
from ..keys import Keys, ModelKeys
from ..redis_access.script import Script, load_scripts
from ..values.shown import shown
from .addresses import HOME, SHARDS_VARIABLE

_NAMES = ("place", "open_move", "depart", "arrive", "write_keys", "settle", "switch", "close_move")
SCRIPTS: dict[str, Script] = load_scripts(__name__.rpartition(".")[0], _NAMES)


class Placements:
    """Shards of models as this process knows them; it reads each from home once.

    Args:
        home: runs commands at home.
        names: of the shards that this process knows.

    Attributes:
        on_change: called with a model that was found elsewhere than it was known to be.
    """

    def __init__(self, home: CommandConnection, keys: Keys, names: Iterable[str]) -> None:
        self._home = home
        self._keys = keys
        self._names = (*names,)
        self._known: dict[str, str] = {}
        self.on_change: list[Callable[[str], None]] = []

    def known(self, model: str) -> str | None:
        return self._known.get(model)

    async def find(self, model: str) -> str:
        """Return the shard of a model by the word of home, which gives it one if it has none.

        Raises:
            ConfigurationError: this process does not know that shard.
        """
        keys = self._keys.model(model)
        place = await self._home.run_script(
            SCRIPTS["place"],
            [self._keys.placements(), keys.place, *lives_here(keys)],
            [keys.prefix, model, choose_shard(model, self._names)],
        )
        return self.note(model, place.decode())

    def note(self, model: str, place: str) -> str:
        """Record that a model is at ``place``, which is returned.

        Raises:
            ConfigurationError: this process does not know that shard.
        """
        if place != HOME and place not in self._names:
            raise ConfigurationError(
                f"model {shown(model)} lives on shard {shown(place)}, which this process does not know "
                f"({', '.join(self._names)}); name it in {SHARDS_VARIABLE}, or move the model with "
                "'penstock shard move' from where all shards are named"
            )
        former = self._known.get(model)
        self._known[model] = place
        if former not in (None, place):
            for tell in self.on_change:
                tell(model)
        return place


async def recorded_places(home: CommandConnection, keys: Keys) -> dict[str, str]:
    """Return the shard of each model that has one, by the word of home."""
    flat = await home.execute("HGETALL", keys.placements())
    return {name.decode(): place.decode() for name, place in zip(flat[::2], flat[1::2], strict=True)}


def lives_here(keys: ModelKeys) -> list[str]:
    """Return keys of which a model has one on the Redis where it was used."""
    return [keys.queue, keys.policy, keys.tenant_policies, keys.leases, keys.homes, keys.dead]


def choose_shard(model: str, names: Iterable[str]) -> str:
    """Return the shard that a new model is to have: one more shard takes its part of the models, and moves no other.

    Source: Thaler and Ravishankar 1998, "Using name-based mappings to increase hit rates" (rendezvous hashing).
    """
    return max(names, key=lambda name: (hashlib.sha256(f"{name}\0{model}".encode()).digest(), name))
