"""A rolling change of weights over engines that the test plays: who is asked when, and who is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.producer import Client, EngineCallError, SleepState
from penstock.shared import errors
from penstock.shared.connection import Subscriber
from penstock.shared.control.calls import CallError, ControlCommand, UtilityAnswer
from penstock.shared.control.engine import IsSleeping
from penstock.shared.control.model import ReloadWeights, WeightsReloaded

from ..test_engine_control import Play, PlayedEngine, play, two

__all__ = ["play", "two"]

DONE = WeightsReloaded(path="/new", version="v2", former_version="v1", load_time_s=1.0)
COULD = WeightsReloaded(path="/new", version="v2", former_version="v1")
Outcome = UtilityAnswer | CallError | None


def reloads(
    asked: list[tuple[str, bool]], engine: PlayedEngine, change: Outcome = DONE, check: Outcome = COULD
) -> None:
    """Have a played engine answer, and write down who is asked, and whether to look only."""

    def answer(command: ControlCommand) -> Outcome:
        if isinstance(command.call, IsSleeping):
            return SleepState()
        assert isinstance(command.call, ReloadWeights)
        asked.append((engine.name, command.call.only_check))
        return check if command.call.only_check else change

    engine.answer = answer


async def test_all_engines_check_before_the_first_reloads_and_they_reload_one_by_one(
    client: Client, two: tuple[PlayedEngine, PlayedEngine]
) -> None:
    asked: list[tuple[str, bool]] = []
    for engine in two:
        reloads(asked, engine)
    assert await client.reload_weights("/new", version="v2", mode="keep", model="m") == {"w-0": DONE, "w-1": DONE}
    assert sorted(asked[:2]) == [("w-0", True), ("w-1", True)]
    assert asked[2:] == [("w-0", False), ("w-1", False)]
    call = two[1].heard[1].call
    assert call == ReloadWeights(path="/new", version="v2", mode="keep")
    asked.clear()
    assert await client.reload_weights("/new", only_check=True) == {"w-0": COULD, "w-1": COULD}
    assert await client.reload_weights(engine_id="w-1") == {"w-1": DONE}
    assert asked[2:] == [("w-1", True), ("w-1", False)]


async def test_no_engine_reloads_if_one_refuses_the_folder(
    client: Client, two: tuple[PlayedEngine, PlayedEngine]
) -> None:
    asked: list[tuple[str, bool]] = []
    reloads(asked, two[0])
    reloads(asked, two[1], check=CallError("model_load_error", "its tokenizer.json is another one"))
    with pytest.raises(EngineCallError, match=r"w-1: its tokenizer\.json is another one"):
        await client.reload_weights("/new")
    assert all(only_check for _, only_check in asked)


@pytest.mark.parametrize("dies", [False, True])
async def test_reloading_stops_at_the_first_failure(
    client: Client, two: tuple[PlayedEngine, PlayedEngine], play: Play, subscriber: Subscriber, dies: bool
) -> None:
    """Covers an engine that returns an error and one that died; engines that have reloaded are reported."""
    asked: list[tuple[str, bool]] = []
    third = play("w-2")
    await third.beat()
    await third.listen(subscriber)
    for engine in (*two, third):
        reloads(asked, engine)
    if dies:
        # It is gone when its turn comes: the engine before it has taken it along.
        before, gone = two[0].answer, two[1]

        def answer(command: ControlCommand) -> Outcome:
            outcome = before(command)
            if outcome == DONE:
                gone.answer = lambda _: None
                gone.retire()
            return outcome

        two[0].answer = answer
    else:
        reloads(asked, two[1], change=CallError("engine_call_failed", "the former ones serve on"))
    with pytest.raises(EngineCallError, match="changed before: w-0; not asked: w-2") as caught:
        await client.reload_weights("/new", timeout_s=30.0)
    assert caught.value.answers == {"w-0": DONE}
    assert isinstance(caught.value.errors["w-1"], errors.EngineNotFoundError if dies else EngineCallError)
    assert ("w-2", False) not in asked


async def test_an_engine_that_begins_meanwhile_changes_too(
    client: Client, two: tuple[PlayedEngine, PlayedEngine], play: Play, subscriber: Subscriber
) -> None:
    asked: list[tuple[str, bool]] = []
    third = play("w-2")
    await third.listen(subscriber)
    for engine in (*two, third):
        reloads(asked, engine)
    before = two[1].answer

    def answer(command: ControlCommand) -> Outcome:
        third.appear()
        return before(command)

    two[1].answer = answer
    assert sorted(await client.reload_weights("/new")) == ["w-0", "w-1", "w-2"]
    assert asked[-1] == ("w-2", False)


async def test_wrong_arguments_are_refused_before_any_engine_is_called(
    client: Client, two: tuple[PlayedEngine, PlayedEngine]
) -> None:
    wrong: list[Callable[[], object]] = [
        lambda: client.reload_weights("new"),
        lambda: client.reload_weights("/new", mode="drop"),
        lambda: client.reload_weights("/new", only_check="yes"),  # type: ignore[arg-type]
        lambda: client.reload_weights("/new", timeout_s=-1.0),
    ]
    for call in wrong:
        with pytest.raises(errors.ValidationError):
            await call()  # type: ignore[misc]
    assert not two[0].heard
