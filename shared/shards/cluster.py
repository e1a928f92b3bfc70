"""Connections to a Redis cluster: one for commands and one for subscriptions per primary.

A model's keys have one tag, so they are on one node, and so are its channels: where the server has sharded channels,
scripts publish on those, and messages stay at the node; elsewhere a message goes to every node. Either way subscribers
listen at the node that serves the model, since scripts count them there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from ..connection import RETRY_FOR_S, CommandConnection
from ..errors import RedisUnavailableError
from ..redis_access.link import LOST, Outage, sends_away, tells_of_move, unavailable_error
from ..redis_access.script import script_of
from ..redis_access.subscriber import Subscriber, Subscription
from .cluster_topology import Topology, routing_key

MAX_REDIRECTIONS = 3

T = TypeVar("T")

_SHARDED = {"'PUBLISH'": "'SPUBLISH'", "'NUMSUB'": "'SHARDNUMSUB'"}


class ClusterCommands(CommandConnection):
    """Runs commands of any number of tasks, each at the node that serves its key.

    A command that was refused by a node that no longer serves the key, or lost with one, is sent where the topology
    says now, as ``CommandConnection`` sends one again.
    """

    def __init__(self, topology: Topology, *, retry_for_s: float = RETRY_FOR_S) -> None:
        super().__init__(topology.seed, retry_for_s=retry_for_s)
        self._topology = topology
        self._nodes: dict[str, CommandConnection] = {}
        self._away = Outage(topology.seed, "commands")
        self._sharded: dict[str, Any] = {}

    @property
    def shown_url(self) -> str:
        return self._topology.shown_url

    def link_to(self, key: str) -> CommandConnection:
        url = self._topology.node_of(key)
        return self if url is None else self._node(url)

    async def open(self) -> None:
        try:
            await self._topology.ask()
        except LOST as error:
            raise unavailable_error(self._topology.seed, error) from error

    async def execute(self, *args: Any, retry: bool = True, waits_if_full: bool = True) -> Any:
        def run(node: CommandConnection) -> Awaitable[Any]:
            named = _in_sharded_words(args) if self._topology.has_sharded_channels else args
            return node.execute(*named, retry=retry, waits_if_full=waits_if_full)

        return await self._at_owner(routing_key(args), run, retry=retry)

    async def run_script(self, script: Any, keys: list[str], args: list[Any], **how: bool) -> Any:
        def run(node: CommandConnection) -> Awaitable[Any]:
            text = self._sharded_script(script) if self._topology.has_sharded_channels else script
            return node.run_script(text, keys, args, **how)

        return await self._at_owner(keys[0], run, retry=how.get("retry", True))

    async def close(self) -> None:
        await asyncio.gather(super().close(), *(node.close() for node in self._nodes.values()))

    async def _at_owner(self, key: str | None, run: Callable[[CommandConnection], Awaitable[T]], *, retry: bool) -> T:
        give_up_at = asyncio.get_running_loop().time() + self._retry_for_s
        is_lost, num_heard = False, 0
        while True:
            has_asked = has_heard = False
            try:
                url = self._topology.node_of(key)
                if url is None or is_lost:
                    await self._topology.ask()
                    url = self._topology.node_of(key)
                if url is None:
                    raise RedisConnectionError("a part of the cluster has no primary")
                has_asked = True
                reply = await run(self._node(url))
            except ResponseError as error:
                # A slot on its way the old way asks for more than we say; once it has arrived we are sent there.
                if not sends_away(error):
                    raise
                problem: Exception = error
                has_heard = tells_of_move(error) and self._topology.note_moved(error)
            except (RedisUnavailableError, *LOST) as error:
                if self._closed or (has_asked and not retry):
                    raise
                problem = error
            else:
                self._away.over()
                return reply
            if asyncio.get_running_loop().time() > give_up_at:
                raise unavailable_error(self._topology.seed, problem) from problem
            if not isinstance(problem, ResponseError):
                self._away.note(problem)
            # Two nodes that send us to each other are asked, which takes its time.
            num_heard = num_heard + 1 if has_heard else 0
            is_lost = not 0 < num_heard <= MAX_REDIRECTIONS

    def _node(self, url: str) -> CommandConnection:
        node = self._nodes.get(url)
        if node is None:
            # What is lost with it is sent again from here, to whoever serves the key then.
            node = self._nodes[url] = CommandConnection(url, retry_for_s=0.0)
        return node

    def _sharded_script(self, script: Any) -> Any:
        variant = self._sharded.get(script.sha)
        if variant is None:
            text = script.text
            for word, sharded in _SHARDED.items():
                text = text.replace(word, sharded)
            variant = self._sharded[script.sha] = script_of(script.name, text)
        return variant


class ClusterSubscriber(Subscriber):
    """Follows channels, each at the node that serves its slot, and goes along when that is another."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology.seed)
        self._topology = topology
        self._nodes: dict[str, Subscriber] = {}
        self._followed: dict[Subscription, str | None] = {}
        self._looking: asyncio.Task[None] | None = None
        topology.on_change.append(self._go_along)

    async def open(self) -> None:
        try:
            await self._topology.ask()
        except LOST as error:
            raise unavailable_error(self._topology.seed, error) from error

    def start(self) -> None:
        if not self._topology.nodes:
            self._look()

    def follow(self, subscription: Subscription) -> None:
        url = self._topology.node_of(subscription.channel.decode())
        self._followed[subscription] = url
        if url is None:
            self._look()  # it is followed when the node is known
        else:
            self._node(url).follow(subscription)

    def unsubscribe(self, subscription: Subscription) -> None:
        url = self._followed.pop(subscription, None)
        if url is not None:
            self._nodes[url].unsubscribe(subscription)

    def reconnect(self) -> None:
        for node in self._nodes.values():
            node.reconnect()

    async def close(self) -> None:
        self._followed.clear()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await asyncio.gather(*(node.close() for node in self._nodes.values()))

    def _go_along(self) -> None:
        for subscription, url in [*self._followed.items()]:
            if self._topology.node_of(subscription.channel.decode()) != url:
                self.unsubscribe(subscription)
                self.follow(subscription)

    def _on_sent_away(self, error: ResponseError | None) -> None:
        if error is None or not self._topology.note_moved(error):
            self._look()

    def _look(self) -> None:
        """Read the topology, however long it takes."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_until_known())

    async def _look_until_known(self) -> None:
        while True:
            try:
                await self._topology.ask()
            except LOST as error:
                self._outage.note(error)
            else:
                self._outage.over()
                if None not in self._followed.values():
                    return

    def _node(self, url: str) -> Subscriber:
        node = self._nodes.get(url)
        if node is None:
            if self._topology.has_sharded_channels:
                node = _ShardedChannels(url, on_sent_away=self._on_sent_away)
            else:
                node = Subscriber(url)
            node.start()
            self._nodes[url] = node
        return node


class _ShardedChannels(Subscriber):
    """Sharded channels of one node.

    Args:
        on_sent_away: called when the node does not serve a channel, or no longer.
    """

    SUBSCRIBE, UNSUBSCRIBE, MESSAGE, CHANNELS_AT_ONCE = "SSUBSCRIBE", "SUNSUBSCRIBE", b"smessage", 1
    SUBSCRIBED, UNSUBSCRIBED = b"ssubscribe", b"sunsubscribe"

    def __init__(self, url: str, *, on_sent_away: Callable[[ResponseError | None], None]) -> None:
        super().__init__(url)
        self._on_sent_away = on_sent_away

    def _pass_reply(self, reply: Any) -> None:
        if isinstance(reply, ResponseError) and sends_away(reply):
            self._on_sent_away(reply)
            return
        super()._pass_reply(reply)
        if isinstance(reply, list) and reply[0] == self.UNSUBSCRIBED and reply[1] in self._subscriptions:
            self._on_sent_away(None)


def _in_sharded_words(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if args[0] == "PUBLISH":
        return ("SPUBLISH", *args[1:])
    return ("PUBSUB", "SHARDNUMSUB", *args[2:]) if args[:2] == ("PUBSUB", "NUMSUB") else args
