"""Clients in processes and event loops that did not open them: they say so, or connect anew; the parent's goes on."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from textwrap import dedent

import pytest

from penstock.producer import LLM, Client, PenstockError
from penstock.shared.broker import Broker
from penstock.shared.errors import ClientClosedError
from penstock.shared.messages.outcome import FinishReason

from ....processes import DEADLINE_S
from ..harness import claim_one, write

# What happens in the child comes out of a pipe; a child that hangs is ended with its process group.
FRAME = """
import asyncio, json, os, sys
from penstock.producer import LLM, Client, PenstockError

url, namespace = sys.argv[1:]

def in_child(work):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = work()
        except PenstockError as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps(told).encode())
        os._exit(0)
    os.close(writing)
    told = open(reading).read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(told)
"""


def run_script(script: str, redis_url: str, namespace: str) -> object:
    """Run a script in a process of its own, and return what it prints last."""
    # From Python 3.12 on a fork beside threads warns; servers do it all the same.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FRAME + dedent(script), redis_url, namespace]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        # The child has the pipes as well.
        subprocess.run(["kill", "-9", "--", f"-{process.pid}"], check=True)
        raise
    assert process.returncode == 0, err.decode()
    return json.loads(out.decode().splitlines()[-1])


@pytest.mark.usefixtures("broker")
async def test_an_llm_connects_anew_in_a_child_and_leaves_its_parents_alone(redis_url: str, namespace: str) -> None:
    script = """
        llm = LLM(url, namespace=namespace)

        def submit_and_look(name):
            llm.call(llm.client.submit("hi", request_id=name))
            return llm.status(name).state

        def twice_forked():
            return [submit_and_look("child"), in_child(lambda: submit_and_look("grandchild"))]

        def leave():
            submit_and_look("other")
            llm.close()
            llm.close()
            return "closed"

        told = [submit_and_look("before"), *in_child(twice_forked), in_child(leave), submit_and_look("after")]
        llm.close()
        print(json.dumps(told))
    """
    told = await asyncio.to_thread(run_script, script, redis_url, namespace)
    assert told == ["queued", "queued", "queued", "closed", "queued"]


async def test_streams_of_the_parent_cannot_be_used_in_a_child(redis_url: str, namespace: str, broker: Broker) -> None:
    script = """
        llm = LLM(url, namespace=namespace)
        deltas = llm.stream("hi", request_id="shared")
        first = next(deltas).text

        def go_on():
            try:
                return next(deltas).text
            finally:
                deltas.close()

        in_the_child = in_child(go_on)
        in_child(lambda: llm.call(llm.client.submit("go on", request_id="released")).request_id)
        print(json.dumps([first, in_the_child, "".join(delta.text for delta in deltas)]))
        llm.close()
    """
    running = asyncio.create_task(asyncio.to_thread(run_script, script, redis_url, namespace))
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65)
    # The child is through with what it may not do once it has enqueued a request of its own.
    assert (await claim_one(broker)).request_id == "released"
    await write(broker, claim, 1, 66, end=FinishReason.STOP)
    first, in_the_child, rest = await running  # type: ignore[misc]  # a list of three
    assert (first, rest) == ("A", "B")
    assert "ClientClosedError: this was started by process" in in_the_child


@pytest.mark.usefixtures("broker")
async def test_an_asynchronous_client_names_its_process_when_used_in_a_child(redis_url: str, namespace: str) -> None:
    script = """
        async def parent():
            client = await Client.connect(url, namespace=namespace)
            handle = await client.submit("hi")

            def use(work):
                async def run():
                    return str(await work())
                # The child has a running loop that is its parent's, as it seems.
                asyncio._set_running_loop(None)
                return asyncio.run(run())

            async def first(deltas):
                return await anext(deltas)

            works = [client.models, client.open, client.close, lambda: client.generate("hi"),
                     lambda: first(handle.stream())]
            told = [await asyncio.to_thread(in_child, lambda: use(work)) for work in works]
            told.append(list(await client.models()))
            await client.close()
            return told

        print(json.dumps(asyncio.run(parent())))
    """
    models, opened, closed, generated, streamed, of_parent = await asyncio.to_thread(  # type: ignore[misc]  # a list
        run_script, script, redis_url, namespace
    )
    for told in (models, opened, generated, streamed):
        assert told.startswith("ClientClosedError: the client was connected by process")
        assert "connect after the fork" in told
    assert closed == "None"
    assert of_parent == ["m"]


@pytest.mark.usefixtures("broker")
def test_a_client_names_its_event_loop_when_used_in_another(redis_url: str, namespace: str) -> None:
    """WSGI runs each asynchronous view in a separate loop."""
    client = Client.connect(redis_url, namespace=namespace)
    with asyncio.Runner() as first:
        first.run(client.open())
        with asyncio.Runner() as other:
            # It would be both in the same thread.
            asyncio.set_event_loop(None)
            for work in (client.models(), client.generate("hi"), client.open()):
                with pytest.raises(ClientClosedError, match="connected in another event loop"):
                    other.run(work)
        assert list(first.run(client.models())) == ["m"]
        first.run(client.close())


@pytest.mark.usefixtures("broker")
def test_a_closed_llm_raises_a_clear_error(redis_url: str, namespace: str) -> None:
    llm = LLM(redis_url, namespace=namespace)
    llm.close()
    with pytest.raises(ClientClosedError, match="the LLM was closed"):
        llm.models()
    with pytest.raises(PenstockError, match="the LLM was closed"):
        llm.generate("hi")
