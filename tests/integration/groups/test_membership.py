"""Ranks of a group's generations, as Redis gives them out."""

from __future__ import annotations

import asyncio

import pytest

from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.groups import Membership, Place, Standing, resize_group
from penstock.shared.errors import GroupSizeError
from penstock.shared.keys import Keys, ModelKeys

LONG_MS = 600_000


@pytest.fixture
def keys(namespace: str) -> ModelKeys:
    return Keys(namespace).model("m")


class Group:
    def __init__(self, commands: CommandConnection, keys: ModelKeys) -> None:
        self.commands, self.keys = commands, keys

    def engine(self, name: str, ttl_ms: int = LONG_MS) -> Membership:
        return Membership(self.commands, self.keys, "g", name, ttl_ms=ttl_ms)

    async def form(self, *names: str, num_experts: int = 0) -> list[Place]:
        """All of them join, meet and serve."""
        places = [await self.joined(name, len(names)) for name in names]
        for serves in (False, True):
            for name, place in zip(names, places, strict=True):
                address = "" if place.rank else "here:1"
                renewal = await self.engine(name).renew(place, address=address, serves=serves, num_experts=num_experts)
                assert renewal.standing is Standing.OK
        return places

    async def joined(self, name: str, size: int) -> Place:
        place = await self.engine(name).join(size)
        assert place is not None
        return place

    async def standing(self, name: str, place: Place) -> Standing:
        return (await self.engine(name).renew(place)).standing

    async def expire(self, *ranks: int) -> None:
        for rank in ranks:
            await self.commands.execute("HSET", self.keys.group("g"), f"until:{rank}", 1)


@pytest.fixture
def group(commands: CommandConnection, keys: ModelKeys) -> Group:
    return Group(commands, keys)


async def test_engines_become_ranks_in_order_and_learn_the_meeting_address(group: Group) -> None:
    first, second = await group.joined("a", 2), await group.joined("b", 2)
    assert (first.rank, second.rank) == (0, 1)
    assert first.generation == second.generation > 0
    told = await group.engine("b").renew(second)
    assert not told.is_full
    await group.engine("a").renew(first, address="host:4711")
    told = await group.engine("b").renew(second)
    assert told.is_full
    assert told.address == "host:4711"


async def test_a_rank_of_a_generation_is_refused_once_the_next_has_begun(group: Group) -> None:
    before = await group.form("a", "b")
    # The second has died, and comes again.
    again = await group.joined("b", 2)
    assert again.generation > before[0].generation
    assert again.rank == 0
    assert await group.standing("a", before[0]) is Standing.STALE
    assert await group.standing("b", before[1]) is Standing.STALE
    assert not await group.engine("a").finish(before[0])
    # And the one that is left finds its place in the next one.
    assert (await group.joined("a", 2)).rank == 1
    assert await group.standing("b", again) is Standing.OK


async def test_a_generation_ends_for_all_when_one_rank_ends_it(group: Group) -> None:
    places = await group.form("a", "b")
    assert await group.engine("b").finish(places[1])
    assert await group.standing("a", places[0]) is Standing.OVER
    assert (await group.joined("a", 2)).generation > places[0].generation


async def test_a_group_with_a_missing_rank_starts_a_new_generation(group: Group) -> None:
    first = await group.joined("a", 3)
    await group.joined("b", 3)
    await group.expire(1)
    assert await group.standing("a", first) is Standing.OVER
    third = await group.joined("c", 3)
    assert third.generation > first.generation


async def test_a_rank_that_serves_may_be_late(group: Group) -> None:
    places = await group.form("a", "b")
    past = int((await group.commands.execute("TIME"))[0]) * 1000 - 2_000
    await group.commands.execute("HSET", group.keys.group("g"), "until:1", past)
    assert await group.standing("a", places[0]) is Standing.OK
    assert await group.engine("c").join(2) is None
    await group.expire(1)
    assert await group.engine("c").join(2) is not None


async def test_whoever_finds_all_places_taken_stands_by(group: Group) -> None:
    places = await group.form("a", "b")
    assert await group.engine("c").join(2) is None
    await group.engine("a").finish(places[0])
    assert (await group.joined("c", 2)).rank == 0


async def test_the_generation_after_a_failover_is_a_new_one(group: Group) -> None:
    before = await group.form("a", "b")
    await group.commands.execute("DEL", group.keys.group("g"))
    again = await group.joined("a", 2)
    assert again.generation > before[0].generation
    assert await group.standing("b", before[1]) is Standing.STALE


async def test_a_size_that_was_chosen_stays_until_engines_ask_for_another(group: Group) -> None:
    await group.form("a", "b")
    assert await group.engine("c").join(2) is None
    await resize_group(group.commands, group.keys, "g", 3)
    assert await group.engine("c").join(2) is None  # the two have not left yet
    places = [await group.joined(name, 2) for name in ("a", "b", "c")]
    assert [place.rank for place in places] == [0, 1, 2]
    assert {place.size for place in places} == {3}
    assert (await group.engine("d").join(2)) is None
    await group.expire(0, 1, 2)
    assert (await group.joined("a", 2)).size == 3
    await group.expire(0)
    assert (await group.joined("a", 4)).size == 4


async def test_only_the_first_rank_is_requested_to_leave(group: Group) -> None:
    places = await group.form("a", "b", "c", num_experts=4)
    await resize_group(group.commands, group.keys, "g", 2)
    assert await group.standing("b", places[1]) is Standing.OK
    assert await group.standing("a", places[0]) is Standing.LEAVE
    # It is over when the ranks have left.
    assert await group.engine("a").finish(places[0])
    assert [(await group.joined(name, 3)).rank for name in ("c", "a")] == [0, 1]
    assert await group.engine("b").join(3) is None


async def test_a_size_that_cannot_be_is_refused(group: Group) -> None:
    with pytest.raises(GroupSizeError, match="no group 'g'"):
        await resize_group(group.commands, group.keys, "g", 2)
    await group.form("a", "b", num_experts=4)
    with pytest.raises(GroupSizeError, match="does not divide the 4 experts"):
        await resize_group(group.commands, group.keys, "g", 3)
    with pytest.raises(GroupSizeError, match="has 2 engines"):
        await resize_group(group.commands, group.keys, "g", 4)


async def test_simultaneous_engines_get_different_ranks(group: Group) -> None:
    places = await asyncio.gather(*(group.joined(f"e{number}", 8) for number in range(8)))
    assert sorted(place.rank for place in places) == list(range(8))
    assert len({place.generation for place in places}) == 1
