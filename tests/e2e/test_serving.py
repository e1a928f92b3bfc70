"""Client, Redis, supervisor, worker process and engine core, all real, with the demo model."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from penstock.ops.demo.task import TASKS, held_out_questions
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams
from penstock.shared import errors
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import EngineHeartbeat
from penstock.shared.keys import Keys
from penstock.shared.messages.requests import EngineCoreRequest

from ..processes import DEADLINE_S

pytestmark = pytest.mark.xdist_group("deployment")

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
COUNT = "count from four to nine:"
COUNTED = " four five six seven eight nine."


@pytest.fixture
async def commands(deployment: LocalStack):
    connection = CommandConnection(deployment.url)
    yield connection
    await connection.close()


async def test_answers_are_right_through_the_whole_stack(client: Client) -> None:
    questions = [q for task in TASKS for q in random.Random(1).sample(held_out_questions(task), 150)]
    outputs = await asyncio.gather(*(client.generate(q.prompt, GREEDY) for q in questions))
    right = sum(output.text.strip() == q.answer for output, q in zip(outputs, questions, strict=True))
    assert right >= 0.98 * len(questions)


async def test_text_token_ids_and_messages_ask_the_same(client: Client) -> None:
    as_messages = await client.generate([{"role": "user", "content": COUNT}], GREEDY)
    as_text = await client.generate(COUNT, GREEDY)
    assert as_text.text == as_messages.text == COUNTED
    assert as_text.usage is not None
    assert as_text.usage.num_output_tokens == len(as_text.outputs[0].token_ids)
    assert as_text.outputs[0].finish_reason == "stop"


async def test_of_a_prompt_that_is_cut_the_last_tokens_are_answered(client: Client) -> None:
    """In whatever form it comes, and whoever says so; resumed or repeated, the request is the same."""
    tokenized = await client.tokenize(COUNT)
    noise = [token_id for token_id in tokenized.token_ids for _ in range(60)] * 8
    plain = await client.generate(tokenized.token_ids, GREEDY)
    with pytest.raises(errors.PromptTooLongError, match=r"max_model_len of .demo. is 2048"):
        await client.generate([*noise, *tokenized.token_ids], GREEDY)
    cut = msgspec.structs.replace(GREEDY, truncate_prompt_tokens=len(tokenized.token_ids))
    kwargs = {"truncation": True, "max_length": len(tokenized.token_ids)}
    filled = "spell 12: " * 700 + COUNT
    for prompt, params, options in (
        ([*noise, *tokenized.token_ids], cut, {}),
        ([*noise, *tokenized.token_ids], GREEDY, kwargs),
        (filled, cut, {}),
    ):
        output = await client.generate(prompt, params, tokenization_kwargs=options)
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        assert output.usage is not None
        assert output.usage.num_prompt_tokens == len(tokenized.token_ids)
    fits = msgspec.structs.replace(GREEDY, truncate_prompt_tokens=-1)
    output = await client.generate([*noise, *tokenized.token_ids], fits)
    assert output.usage is not None
    assert output.usage.num_prompt_tokens == 2048 - 64
    with pytest.raises(errors.ValidationError, match=r"truncate_prompt_tokens must be at most max_model_len \(2048\)"):
        await client.generate(COUNT, msgspec.structs.replace(GREEDY, truncate_prompt_tokens=2049))
    with pytest.raises(errors.UnsupportedParameterError, match="truncate_prompt_tokens"):
        client.converse(cut)
    with pytest.raises(errors.UnsupportedParameterError, match="truncate_prompt_tokens"):
        async with client.converse(GREEDY, tokenization_kwargs=kwargs) as conversation:
            await conversation.send(COUNT)


async def test_a_stop_string_cuts_the_text_and_ends_the_request(client: Client) -> None:
    output = await client.generate(COUNT, SamplingParams(temperature=0, max_tokens=64, stop=["seven", "z"]))
    assert (output.text, output.outputs[0].stop_reason) == (" four five six ", "seven")
    included = SamplingParams(temperature=0, max_tokens=64, stop="en e", include_stop_str_in_output=True)
    assert (await client.generate(COUNT, included)).text == " four five six seven e"


async def test_a_stop_token_and_the_limits_end_the_request(client: Client) -> None:
    whole = (await client.generate(COUNT, GREEDY)).outputs[0]
    third = whole.token_ids[2]
    stopped = (await client.generate(COUNT, SamplingParams(temperature=0, stop_token_ids=[third]))).outputs[0]
    assert (stopped.token_ids, stopped.stop_reason, stopped.text) == (whole.token_ids[:3], third, " four five")
    short = (await client.generate(COUNT, SamplingParams(temperature=0, max_tokens=2))).outputs[0]
    assert (short.token_ids, short.finish_reason) == (whole.token_ids[:2], "length")
    on = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    assert len((await client.generate(COUNT, on)).outputs[0].token_ids) == 40
    least = SamplingParams(temperature=0, max_tokens=40, min_tokens=20)
    assert len((await client.generate(COUNT, least)).outputs[0].token_ids) >= 20


async def test_a_seed_gives_the_same_tokens_in_any_batch(client: Client) -> None:
    params = SamplingParams(temperature=1.5, seed=11, max_tokens=30, ignore_eos=True)
    alone = await client.generate("spell 12:", params)
    crowd = [client.generate(COUNT, SamplingParams(temperature=1.5, max_tokens=40, ignore_eos=True)) for _ in range(20)]
    beside, *others = await asyncio.gather(client.generate("spell 12:", params), *crowd)
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids
    assert len({output.text for output in others}) > 1


async def test_a_prompt_that_was_here_before_is_cached_for_its_tenant(client: Client) -> None:
    prompt = [17, 18, 19] * 11  # which begins as no other test's does: they share an engine
    cached = []
    for tenant in ("default", "default", "other"):
        output = await client.generate(prompt, SamplingParams(temperature=0, max_tokens=4), tenant=tenant)
        assert output.usage is not None
        cached.append(output.usage.num_cached_tokens)
    assert cached == [0, 32, 0]


async def test_token_ids_alone_need_no_text(client: Client) -> None:
    output = await client.generate(COUNT, SamplingParams(temperature=0, max_tokens=64, detokenize=False))
    assert output.text == ""
    assert output.outputs[0].token_ids == (await client.generate(COUNT, GREEDY)).outputs[0].token_ids


async def test_errors_found_by_the_worker_are_raised_to_the_caller(client: Client) -> None:
    with pytest.raises(errors.PromptTooLongError, match="max_model_len is 2048"):
        await client.generate("x" * 9000, GREEDY)
    assert (await client.generate(COUNT, GREEDY)).text == COUNTED


async def test_bytes_that_are_no_request_fail_that_one_and_stop_nothing(client: Client, commands) -> None:
    broker = await client._requests.broker("demo").find("garbage")
    for request_id, payload in (("garbage", b"\xc1\xff"), ("wrong-type", msgspec.msgpack.encode(["add", 1, 7]))):
        await broker.enqueue(request_id, payload, result_ttl_ms=60_000)
        with pytest.raises(errors.ValidationError, match="not a request that this worker can decode"):
            await (await client.handle(request_id)).result()
    empty = msgspec.msgpack.encode(EngineCoreRequest(request_id="empty", sampling_params=SamplingParams()))
    await broker.enqueue("empty", empty, result_ttl_ms=60_000)
    with pytest.raises(errors.ValidationError, match="has no prompt"):
        await (await client.handle("empty")).result()
    await commands.execute("XADD", broker.keys.lane("standard", "default"), "*", "what", "is this")
    assert (await client.generate(COUNT, GREEDY)).text == COUNTED


async def test_a_detached_request_outlives_its_client(deployment: LocalStack) -> None:
    async with Client.connect(deployment.url) as first:
        handle = await first.submit(COUNT, GREEDY)
    async with Client.connect(deployment.url) as second:
        assert (await (await second.handle(handle.request_id)).result()).text == COUNTED


async def test_200_streams_with_random_cancellations(deployment: LocalStack, commands: CommandConnection) -> None:
    """Every stream ends as it should, the KV blocks all come back, and nothing stays in Redis for ever."""
    rng = random.Random(5)
    counts = {"whole": 0, "left": 0, "cancelled": 0}

    async def one(client: Client) -> None:
        max_tokens = rng.randint(1, 120)
        params = SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
        fate = rng.choice(["whole", "whole", "left", "cancelled"])
        leave_at = rng.randint(0, max_tokens)
        if fate == "cancelled":
            handle = await client.submit(COUNT, params)
            stream = handle.stream()
        else:
            handle = None
            stream = client.stream(COUNT, params)
        expected_index, ends = 0, []
        async for delta in stream:
            assert delta.index == expected_index
            expected_index = delta.next_index
            if delta.finish_reason is not None:
                ends.append(delta.finish_reason)
            elif expected_index >= leave_at and fate == "left":
                break
            elif expected_index >= leave_at and handle is not None:
                await handle.cancel()
        if fate == "whole":
            assert (ends, expected_index) == (["length"], max_tokens)
        elif fate == "cancelled":
            assert ends in (["cancelled"], ["length"])
        counts[fate] += 1

    async with Client.connect(deployment.url) as client:
        await asyncio.gather(*(one(client) for _ in range(200)))
    assert sum(counts.values()) == 200
    assert min(counts.values()) > 20

    keys = Keys().model("demo")
    async with asyncio.timeout(DEADLINE_S):
        while (await heartbeat(commands)).kv_cache_usage > 0 or (await heartbeat(commands)).num_running_reqs:
            await asyncio.sleep(0.1)
        while await lasting_keys(commands):
            await asyncio.sleep(0.1)
    assert await commands.execute("EXISTS", keys.lane("standard", "default")) == 0
    assert await commands.execute("SCARD", keys.active_tenants) == 0
    assert await commands.execute("LLEN", keys.returned) == 0


async def heartbeat(commands: CommandConnection) -> EngineHeartbeat:
    (engine_id,) = await commands.execute("SMEMBERS", Keys().engines())
    return msgspec.json.decode(await commands.execute("GET", Keys().engine(engine_id.decode())), type=EngineHeartbeat)


async def lasting_keys(commands: CommandConnection) -> list[bytes]:
    """Keys of single requests that Redis would keep for ever."""
    keys = await commands.execute("KEYS", Keys().model("demo").request("*"))
    keys += await commands.execute("KEYS", Keys().model("demo").log("*"))
    return [key for key in keys if await commands.execute("PTTL", key) == -1]
