"""Connections that send each command, and each subscription, to the Redis that holds its model.

They stand where the plain ones do, so who uses them knows nothing of shards. What carries no model's tag is home's. A
script refuses by itself where its model is not; after any other command the model's mark is looked at, so that a read
of what has moved away is not taken for an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from ..connection import RETRY_FOR_S, CommandConnection
from ..errors import RedisUnavailableError
from ..keys import Keys
from ..redis_access.link import MOVING, parse_redirect
from ..redis_access.subscriber import Subscriber, Subscription
from ..values.shown import shown
from .addresses import HOME
from .cluster_topology import routing_key
from .placements import Placements

# How often a model on its way is looked for.
LOOK_AGAIN_S = 0.1

T = TypeVar("T")


class ShardedCommands(CommandConnection):
    """Commands of a deployment with shards; itself it is the connection to home.

    Args:
        shards: by name; closed with this one. Each is opened when it is first used, so one that is away keeps nobody
            from the others.
    """

    def __init__(
        self,
        url: str,
        shards: Mapping[str, CommandConnection],
        keys: Keys,
        *,
        retry_for_s: float = RETRY_FOR_S,
        on_moved: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(url, retry_for_s=retry_for_s, on_moved=on_moved)
        self._keys = keys
        self._shards = dict(shards)
        self.placements = Placements(self, keys, shards)

    def link_to(self, key: str) -> CommandConnection:
        model = self._keys.model_of(key)
        place = HOME if model is None else self.placements.known(model) or HOME
        return self if place == HOME else self._shards[place].link_to(key)

    async def execute(self, *args: Any, retry: bool = True, waits_if_full: bool = True) -> Any:
        # ``run_script`` has found the server of a script. If this did so again, the script's text, which follows a hash
        # that a server does not know, would be sent each time the model is looked for.
        model = None if args[0] in ("EVAL", "EVALSHA") else self._keys.model_of(routing_key(args))
        if model is None:
            return await super().execute(*args, retry=retry, waits_if_full=waits_if_full)
        mark = self._keys.model(model).place

        def run(place: str, *command: Any) -> Awaitable[Any]:
            if place == HOME:
                return CommandConnection.execute(self, *command, retry=retry, waits_if_full=waits_if_full)
            return self._shards[place].execute(*command, retry=retry, waits_if_full=waits_if_full)

        async def checked(place: str) -> Any:
            reply = await run(place, *args)
            elsewhere = await run(place, "GET", mark)
            if elsewhere:
                raise ResponseError(f"ELSEWHERE {elsewhere.decode()}")
            return reply

        return await self._where_it_is(model, checked)

    async def run_script(self, script: Any, keys: list[str], args: list[Any], **how: bool) -> Any:
        model = self._keys.model_of(keys[0])
        home = super()

        def run(place: str) -> Awaitable[Any]:
            at = home if place == HOME else self._shards[place]
            return at.run_script(script, keys, args, **how)

        return await (home.run_script(script, keys, args, **how) if model is None else self._where_it_is(model, run))

    async def close(self) -> None:
        await asyncio.gather(super().close(), *(shard.close() for shard in self._shards.values()))

    async def _where_it_is(self, model: str, run: Callable[[str], Awaitable[T]]) -> T:
        """Return what ``run`` returns at the shard that holds the model.

        Raises:
            RedisUnavailableError: the model was on its way for as long as a command waits for Redis.
            ConfigurationError: this process does not know the shard.
        """
        give_up_at = asyncio.get_running_loop().time() + self._retry_for_s
        placements, num_refusals = self.placements, 0
        while True:
            place = placements.known(model) or await placements.find(model)
            try:
                return await run(place)
            except ResponseError as error:
                redirect = parse_redirect(error)
                if redirect is None:
                    raise
            num_refusals += 1
            if asyncio.get_running_loop().time() > give_up_at:
                raise RedisUnavailableError(
                    f"model {shown(model)} is on its way to another shard for {self._retry_for_s:g} s now; run the "
                    "'penstock shard move' that was cut short again"
                )
            if redirect.startswith(MOVING) or num_refusals > 2:
                await asyncio.sleep(LOOK_AGAIN_S)
                await placements.find(model)
            elif placements.known(model) == place:
                placements.note(model, redirect)


class ShardedSubscriber(Subscriber):
    """Subscriptions of a deployment with shards; itself it is the connection to home.

    Subscriptions go along when the commands of the process are told that their model is elsewhere.
    """

    def __init__(self, url: str, shards: Mapping[str, Subscriber], keys: Keys, placements: Placements) -> None:
        super().__init__(url)
        self._keys = keys
        self._shards = dict(shards)
        self._placements = placements
        self._followed: dict[str, dict[Subscription, str]] = {}
        placements.on_change.append(self._go_along)

    async def begin(
        self, channel: str, on_message: Callable[[bytes], None], on_restored: Callable[[], None] | None = None
    ) -> Subscription:
        model = self._keys.model_of(channel)
        if model is not None and self._placements.known(model) is None:
            await self._placements.find(model)
        return await super().begin(channel, on_message, on_restored)

    def follow(self, subscription: Subscription) -> None:
        model = self._keys.model_of(subscription.channel.decode())
        place = HOME if model is None else self._placements.known(model) or HOME
        if model is not None:
            self._followed.setdefault(model, {})[subscription] = place
        if place == HOME:
            super().follow(subscription)
        else:
            self._shards[place].start()
            self._shards[place].follow(subscription)

    def unsubscribe(self, subscription: Subscription) -> None:
        model = self._keys.model_of(subscription.channel.decode())
        place = HOME
        if model is not None:
            followed = self._followed.get(model, {})
            place = followed.pop(subscription, HOME)
            if not followed:
                self._followed.pop(model, None)
        if place == HOME:
            super().unsubscribe(subscription)
        else:
            self._shards[place].unsubscribe(subscription)

    async def close(self) -> None:
        self._followed.clear()
        await asyncio.gather(super().close(), *(shard.close() for shard in self._shards.values()))

    def _go_along(self, model: str) -> None:
        for subscription in [*self._followed.get(model, ())]:
            self.unsubscribe(subscription)
            self.follow(subscription)
