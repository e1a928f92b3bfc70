"""Control calls against engines that the test plays: who is asked, what is lost on the way, who fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from penstock.producer import Client, EngineCallError, SleepState
from penstock.shared import errors
from penstock.shared.broker import Broker, EngineCalls
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.control.calls import CallError, ControlCommand, ControlReply, UtilityAnswer
from penstock.shared.control.engine import CollectiveRpc, IsSleeping, PrefixCacheReset, RpcResult, Sleep
from penstock.shared.deployment.records import EngineHeartbeat
from penstock.shared.keys import Keys
from penstock.shared.messages.supervision import EngineCommand, EngineState

from ...processes import DEADLINE_S

Answer = Callable[[ControlCommand], UtilityAnswer | CallError | None]


class PlayedEngine:
    """Beats, listens, and answers what ``answer`` says; None is no answer.

    A call that has not been answered for half a second comes again, and has the answer that it had: as at an engine.
    """

    def __init__(self, name: str, commands: CommandConnection, keys: Keys) -> None:
        self.name = name
        self.answer: Answer = lambda command: SleepState()
        self.heard: list[ControlCommand] = []
        self.num_messages = 0
        self._outcomes: dict[str, UtilityAnswer | CallError] = {}
        self.heard_one = asyncio.Event()
        self._commands = commands
        self._keys = keys
        self.calls = EngineCalls(commands, keys.model("m"))
        self._tasks: set[asyncio.Task[None]] = set()

    async def beat(self, state: EngineState = EngineState.READY, *, worker_pid: int = 1, error: str = "") -> None:
        beat = EngineHeartbeat(
            worker_id="w", engine_id=self.name, model="m", state=state, host="h", worker_pid=worker_pid, core_pid=2
        )
        beat.error = error
        await self._commands.execute("SADD", self._keys.engines(), self.name)
        await self._commands.execute("SET", self._keys.engine(self.name), msgspec.json.encode(beat), "PX", 600_000)

    def appear(self) -> None:
        """``beat``, from an answer."""
        self._later(self.beat())

    def retire(self) -> None:
        """Beat no more, from an answer."""
        self._later(self._commands.execute("DEL", self._keys.engine(self.name)))

    async def listen(self, subscriber: Subscriber) -> None:
        await subscriber.subscribe(self.calls.keys.engine_commands(self.name), self._on_command)

    def _on_command(self, data: bytes) -> None:
        command = msgspec.msgpack.decode(data, type=EngineCommand)
        assert isinstance(command, ControlCommand)
        self.num_messages += 1
        if command.call_id not in [one.call_id for one in self.heard]:
            self.heard.append(command)
        self.heard_one.set()
        outcome = self._outcomes.get(command.call_id) or self.answer(command)
        if outcome is not None:
            self._outcomes[command.call_id] = outcome
            reply = ControlReply(call_id=command.call_id, engine_id=self.name)
            if isinstance(outcome, CallError):
                reply.error = outcome
            else:
                reply.answer = outcome
            self._later(self.calls.reply(reply))

    def _later(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


Play = Callable[[str], PlayedEngine]


@pytest.fixture
async def play(commands: CommandConnection, subscriber: Subscriber, namespace: str, broker: Broker) -> Play:
    return lambda name: PlayedEngine(name, commands, Keys(namespace))


@pytest.fixture
async def two(play: Play, subscriber: Subscriber) -> tuple[PlayedEngine, PlayedEngine]:
    engines = play("w-0"), play("w-1")
    for engine in engines:
        await engine.beat()
        await engine.listen(subscriber)
    return engines


async def test_a_call_reaches_all_ready_engines_or_the_named_one(
    client: Client, two: tuple[PlayedEngine, PlayedEngine], play: Play
) -> None:
    await play("w-2").beat(EngineState.STARTING)
    await play("w-3").beat(EngineState.DEAD)
    two[1].answer = lambda command: SleepState(2, ["weights"])
    assert await client.sleep_state() == {"w-0": SleepState(), "w-1": SleepState(2, ["weights"])}
    assert await client.is_sleeping(engine_id="w-1", model="m") == {"w-1": True}
    assert [len(engine.heard) for engine in two] == [1, 2]
    command = two[1].heard[0]
    assert isinstance(command.call, IsSleeping)
    assert 0 < command.expires_at_ms - await two[1].calls.now_ms() <= 60_000


async def test_a_call_arrives_with_all_its_arguments(client: Client, two: tuple[PlayedEngine, PlayedEngine]) -> None:
    two[0].answer = lambda command: RpcResult([1, {"a": b"b"}])
    result = await client.collective_rpc("method", [1, None], {"k": [2.5]}, engine_id="w-0", timeout_s=700)
    assert result == {"w-0": [1, {"a": b"b"}]}
    assert two[0].heard[0].call == CollectiveRpc("method", 700, [1, None], {"k": [2.5]})
    await client.sleep(2, mode="wait", drain_timeout_s=300, engine_id="w-1", timeout_s=400)
    assert two[1].heard[0].call == Sleep(level=2, mode="wait", drain_timeout_s=300)
    # The wait for requests comes on top of the wait for an answer.
    assert two[1].heard[0].expires_at_ms - await two[1].calls.now_ms() > 500_000


async def test_a_failure_of_one_leaves_the_others_answers(
    client: Client, two: tuple[PlayedEngine, PlayedEngine]
) -> None:
    two[0].answer = lambda command: CallError("engine_state", "it sleeps")
    two[1].answer = lambda command: PrefixCacheReset(True)
    with pytest.raises(EngineCallError, match="reset_prefix_cache failed at 1 of 2 engines: w-0: it sleeps") as caught:
        await client.reset_prefix_cache()
    assert caught.value.answers == {"w-1": PrefixCacheReset(True)}
    assert isinstance(caught.value.errors["w-0"], errors.EngineStateError)


async def test_an_engine_that_does_not_answer_is_not_waited_for_for_ever(
    client: Client, two: tuple[PlayedEngine, PlayedEngine]
) -> None:
    two[0].answer = lambda command: None
    for timeout_s in (1, 5, 25):  # as long as this machine needs for the other one's answer
        with pytest.raises(EngineCallError, match=rf"no answer within {timeout_s} s") as caught:
            await client.sleep_state(timeout_s=timeout_s)
        assert isinstance(caught.value.errors["w-0"], errors.EngineTimeoutError)
        if caught.value.answers:
            break
    assert caught.value.answers == {"w-1": SleepState()}


async def test_a_call_is_repeated_until_the_engine_receives_it(
    client: Client, two: tuple[PlayedEngine, PlayedEngine]
) -> None:
    two[0].answer = lambda command: SleepState() if two[0].num_messages > 1 else None
    assert await client.sleep_state() == {"w-0": SleepState(), "w-1": SleepState()}
    assert len({command.call_id for command in two[0].heard}) == 1


@pytest.mark.parametrize("fate", ["dies", "vanishes", "restarts"])
async def test_an_engine_that_goes_before_it_answers(
    client: Client, commands: CommandConnection, namespace: str, two: tuple[PlayedEngine, PlayedEngine], fate: str
) -> None:
    two[0].answer = lambda command: None
    asking = asyncio.create_task(client.wake_up(engine_id="w-0"))
    await two[0].heard_one.wait()
    if fate == "dies":
        await two[0].beat(EngineState.DEAD, error="out of memory")
    elif fate == "restarts":
        await two[0].beat(worker_pid=99)
    else:
        await commands.execute("DEL", Keys(namespace).engine("w-0"))
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineCallError, match="exited before it answered") as caught:
            await asking
    assert isinstance(caught.value.errors["w-0"], errors.EngineDeadError)
    if fate == "dies":
        assert "out of memory" in str(caught.value)


async def test_a_reply_with_a_lost_message_is_read_from_its_key(
    client: Client, commands: CommandConnection, two: tuple[PlayedEngine, PlayedEngine]
) -> None:
    """The engine's reply is in its key, and nothing is published: the connection had failed just then."""
    engine = two[0]
    engine.answer = lambda command: None
    asking = asyncio.create_task(client.is_sleeping(engine_id="w-0"))
    await engine.heard_one.wait()
    call_id = engine.heard[0].call_id
    reply = ControlReply(call_id=call_id, engine_id="w-0", answer=SleepState(1, ["kv_cache"]))
    key = engine.calls.keys.call_reply(call_id, "w-0")
    await commands.execute("SET", key, msgspec.msgpack.encode(reply), "PX", 600_000)
    async with asyncio.timeout(DEADLINE_S):
        assert await asking == {"w-0": True}


async def test_a_reply_does_not_stay_in_redis(
    client: Client, commands: CommandConnection, two: tuple[PlayedEngine, PlayedEngine]
) -> None:
    await client.is_sleeping(engine_id="w-0")
    key = two[0].calls.keys.call_reply(two[0].heard[0].call_id, "w-0")
    assert 0 < await commands.execute("PTTL", key) <= 60_000
    assert await two[0].calls.read_replies(two[0].heard[0].call_id, []) == []


async def test_an_answer_of_the_wrong_kind_or_of_a_later_version_is_an_error(
    client: Client, commands: CommandConnection, two: tuple[PlayedEngine, PlayedEngine]
) -> None:
    two[0].answer = lambda command: PrefixCacheReset(True)
    with pytest.raises(EngineCallError, match="the engine answered with PrefixCacheReset instead of SleepState"):
        await client.sleep_state(engine_id="w-0")
    two[1].answer = lambda command: None
    asking = asyncio.create_task(client.sleep_state(engine_id="w-1"))
    await two[1].heard_one.wait()
    call_id = two[1].heard[0].call_id
    later = msgspec.msgpack.encode([2, call_id, "w-1", ["dream_state", 1]])
    await commands.execute("PUBLISH", two[1].calls.keys.call_replies(call_id), later)
    with pytest.raises(EngineCallError, match="the engine's answer cannot be read"):
        await asking


async def test_engines_that_cannot_be_called_are_named_immediately(client: Client, play: Play) -> None:
    with pytest.raises(errors.EngineDeadError, match="no engine of model 'm' can be called: none has a heartbeat"):
        await client.sleep()
    await play("w-0").beat(EngineState.DEAD, error="out of memory")
    await play("w-1").beat(EngineState.STARTING)
    with pytest.raises(errors.EngineDeadError, match=r"w-0 is dead \(out of memory\); engine w-1 is starting"):
        await client.sleep()
    with pytest.raises(errors.EngineDeadError, match="engine w-1 is starting; it cannot be called now"):
        await client.sleep(engine_id="w-1")
    with pytest.raises(errors.EngineNotFoundError, match=r"no engine 'w-7' .* engines with one: w-0, w-1"):
        await client.sleep(engine_id="w-7")
    with pytest.raises(errors.UnknownModelError):
        await client.sleep(model="typo")


async def test_wrong_arguments_are_refused_before_sending(
    client: Client, two: tuple[PlayedEngine, PlayedEngine]
) -> None:
    wrong = [
        (lambda: client.sleep(3), "level must be 1 or 2"),
        (lambda: client.sleep(mode="drop"), "mode must be"),
        (lambda: client.wake_up(["cache"]), "tags must be some of"),
        (lambda: client.wake_up("weights"), "tags must be a list"),
        (lambda: client.is_sleeping(timeout_s=0), "timeout_s must be"),
        (lambda: client.is_sleeping(timeout_s=float("inf")), "timeout_s must be"),
        (
            lambda: client.is_sleeping(engine="w-0"),  # type: ignore[call-arg]
            "unknown argument engine of the call is_sleeping; did you mean engine_id",
        ),
        (lambda: client.save_sharded_state("here"), "path must be absolute"),
        (lambda: client.collective_rpc("m", [object()]), r"^args\[0\] must be plain data"),
    ]
    for call, message in wrong:
        with pytest.raises(errors.ValidationError, match=message):
            await call()
    assert two[0].heard == two[1].heard == []


async def test_weights_are_saved_by_one_engine(client: Client, two: tuple[PlayedEngine, PlayedEngine]) -> None:
    with pytest.raises(errors.ValidationError, match="engine_id must be given: the model has w-0, w-1"):
        await client.save_sharded_state("/new")
