"""``penstock chat`` in a terminal, with the engine played by the test."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import psutil
import pytest

from penstock.shared.broker import Broker, Claim, FinalRecord, Record
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import ModelCard
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.requests import EngineCoreRequest

from ...processes import DEADLINE_S
from .test_generate import claim_one, put_heartbeat

PENSTOCK = [sys.executable, "-m", "penstock.ops.cli"]


class Terminal:
    """A chat in a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self._fd, child_fd = pty.openpty()
        environment = {**os.environ, "TERM": "dumb"}
        self._process = subprocess.Popen(
            [*PENSTOCK, *arguments], stdin=child_fd, stdout=child_fd, stderr=child_fd, env=environment
        )
        os.close(child_fd)
        self._output = ""

    async def read_until(self, text: str) -> str:
        """Return the output up to and with ``text``, without what an earlier call returned."""
        async with asyncio.timeout(DEADLINE_S):
            while text not in self._output:
                self._output += (await asyncio.to_thread(os.read, self._fd, 4096)).decode()
        before, _, self._output = self._output.partition(text)
        return before + text

    async def ask(self, line: str) -> None:
        """Type a line at the prompt."""
        await self.read_until(">>> ")
        os.write(self._fd, line.encode() + b"\n")
        await self.read_until(line)

    async def await_typing(self) -> None:
        """Return when the chat waits at the prompt, which it has shown before.

        ``input()`` with readline notices a signal only while it waits, or after the next key.
        """
        async with asyncio.timeout(DEADLINE_S):
            while psutil.Process(self._process.pid).status() != psutil.STATUS_SLEEPING:
                await asyncio.sleep(0.01)

    def interrupt(self) -> None:
        """Send what Ctrl-C sends."""
        self._process.send_signal(signal.SIGINT)

    async def end(self) -> int:
        """Type Ctrl-D at the prompt and return the exit status."""
        await self.read_until(">>> ")
        os.write(self._fd, b"\x04")
        return await asyncio.to_thread(self._process.wait, DEADLINE_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)


@pytest.fixture
async def broker(commands: CommandConnection, namespace: str) -> Broker:
    """The engine, played by the test, of a model that can chat."""
    card = ModelCard(model="m", has_chat_template=True, generation_config={"top_p": 0.9})
    await commands.execute("HSET", Keys(namespace).models(), "m", msgspec.json.encode(card))
    await put_heartbeat(commands, namespace)
    return Broker(commands, Keys(namespace).model("m"))


@pytest.fixture
def terminal(redis_url: str, namespace: str, broker: Broker) -> Iterator[Terminal]:
    terminal = Terminal("chat", "--redis-url", redis_url, "--namespace", namespace)
    yield terminal
    terminal.close()


def messages(claim: Claim) -> list[tuple[str, str]]:
    request = msgspec.msgpack.decode(claim.payload, type=EngineCoreRequest)
    assert request.messages is not None
    assert request.sampling_params is not None
    # The recommendation of the card, and the default of chats.
    assert (request.sampling_params.top_p, request.sampling_params.temperature) == (0.9, 0.7)
    return [(message["role"], message["content"]) for message in request.messages]


async def answer(broker: Broker, claim: Claim, text: str, reason: FinishReason = FinishReason.STOP) -> None:
    delta = Delta(index=0, token_ids=[1], text=text, finish_reason=reason)
    assert await broker.finish([FinalRecord(claim.request_id, claim.epoch, delta)]) == []


async def test_a_conversation_keeps_its_turns_until_reset(terminal: Terminal, broker: Broker) -> None:
    await terminal.ask("one")
    claim = await claim_one(broker)
    assert messages(claim) == [("user", "one")]
    await answer(broker, claim, "first answer")
    await terminal.read_until("first answer")
    await terminal.ask("two")
    claim = await claim_one(broker)
    assert messages(claim) == [("user", "one"), ("assistant", "first answer"), ("user", "two")]
    await answer(broker, claim, "second", FinishReason.LENGTH)
    await terminal.read_until("(cut off: ")
    await terminal.ask("/system be brief")
    await terminal.ask("three")
    claim = await claim_one(broker)
    assert messages(claim) == [("system", "be brief"), ("user", "three")]
    await answer(broker, claim, "third")
    await terminal.ask("/reset")
    await terminal.ask("four")
    claim = await claim_one(broker)
    assert messages(claim) == [("system", "be brief"), ("user", "four")]
    await answer(broker, claim, "fourth")
    assert await terminal.end() == 0


async def test_interrupt_stops_the_answer_and_not_the_chat(terminal: Terminal, broker: Broker) -> None:
    await terminal.ask("one")
    claim = await claim_one(broker)
    begun = Record(claim.request_id, claim.epoch, Delta(index=0, token_ids=[1], text="half of it"))
    assert await broker.append([begun]) == []
    await terminal.read_until("half of it")
    terminal.interrupt()
    await terminal.read_until("(stopped)")
    late = Record(claim.request_id, claim.epoch, Delta(index=1, token_ids=[1], text="rest"))
    assert await broker.append([late]) == [claim.request_id]
    await terminal.ask("two")
    claim = await claim_one(broker)
    assert messages(claim) == [("user", "one"), ("assistant", "half of it"), ("user", "two")]
    await answer(broker, claim, "whole")
    await terminal.read_until("whole")
    await terminal.read_until(">>> ")
    await terminal.await_typing()
    terminal.interrupt()
    await terminal.read_until("/quit leaves")
    assert await terminal.end() == 0


async def test_a_failed_request_leaves_the_conversation_unchanged(terminal: Terminal, broker: Broker) -> None:
    await terminal.ask("one")
    await answer(broker, await claim_one(broker), "", FinishReason.ERROR)
    await terminal.ask("/help")
    await terminal.read_until("Ctrl-C stops an answer")
    await terminal.ask("/unknown")
    await terminal.read_until("unknown command /unknown")
    await terminal.ask("two")
    claim = await claim_one(broker)
    assert messages(claim) == [("user", "two")]
    await answer(broker, claim, "well")
    assert await terminal.end() == 0


async def test_a_model_without_a_chat_template_is_refused(
    redis_url: str, namespace: str, commands: CommandConnection
) -> None:
    await commands.execute("HSET", Keys(namespace).models(), "m", msgspec.json.encode(ModelCard(model="m")))
    command = [*PENSTOCK, "chat", "--redis-url", redis_url, "--namespace", namespace]
    result = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode == 1
    assert result.stderr == (
        "error: model 'm' has no chat template, so it cannot chat; `penstock generate` continues text\n"
    )
