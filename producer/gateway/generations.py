"""Run a prepared body as requests of the client: one per prompt, run together, with one answer or one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from .. import Client, Delta
from ..inputs.options import READ_TTL_S, RequestOptions
from ..inputs.prompt import Prompt
from ..inputs.prompt_lists import naming, numbered
from ..openai.prepared import Prepared, PreparedBody
from ..requests.fan_out import merged
from ..results import RequestOutput
from .auth import Identity
from .settings import GatewaySettings

PromptDelta = tuple[int, Delta]


def request_id_of(response_id: str, prompt: int) -> str:
    """Return the client's id of the request for one prompt of a response."""
    return response_id if prompt == 0 else f"{response_id}-{prompt}"


def options_of(prepared: PreparedBody, identity: Identity, settings: GatewaySettings) -> RequestOptions:
    """Return the options of the requests other than prompt and sampling: those of the body, charged to the caller's
    tenant."""
    options: RequestOptions = {**prepared.options, "tenant": identity.tenant, "fail_fast": settings.fail_fast}
    # Readers may resume, because the gateway chose the id and a client may lose its connection.
    options.setdefault("read_ttl_s", READ_TTL_S)
    if identity.band is not None and "band" not in options:
        options["band"] = identity.band
    if identity.key_name:
        options["key_name"] = identity.key_name
    return options


async def answer(client: Client, prepared: Prepared, options: RequestOptions, response_id: str) -> msgspec.Struct:
    """Run all prompts and return the body of the response. Cancels the rest when one fails or the call is cancelled."""

    async def generate(name: str, position: int, prompt: Prompt) -> RequestOutput:
        request_options: RequestOptions = {**options, "request_id": request_id_of(response_id, position)}
        with naming(name):
            return await client.generate(prompt, prepared.params, **request_options)

    names = numbered("prompt", prepared.prompts)
    tasks = [
        asyncio.ensure_future(generate(name, position, prompt))
        for position, (name, prompt) in enumerate(zip(names, prepared.prompts, strict=True))
    ]
    try:
        with prepared.naming_fields():
            outputs = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return prepared.answer(*outputs, response_id=response_id)


def stream(
    client: Client, prepared: Prepared, options: RequestOptions, response_id: str, *, linger_s: float
) -> AsyncGenerator[PromptDelta]:
    """Run all prompts and iterate over their deltas. A request whose reader leaves early runs on for ``linger_s``."""

    async def read_deltas(name: str, position: int, prompt: Prompt) -> AsyncGenerator[Delta]:
        request_id = request_id_of(response_id, position)
        request_options: RequestOptions = {**options, "linger_s": linger_s, "request_id": request_id}
        with naming(name):
            async with aclosing(client.stream(prompt, prepared.params, **request_options)) as deltas:
                async for delta in deltas:
                    yield delta

    names = numbered("prompt", prepared.prompts)
    return merged(
        [
            read_deltas(name, position, prompt)
            for position, (name, prompt) in enumerate(zip(names, prepared.prompts, strict=True))
        ]
    )


async def replay(
    client: Client, prepared: Prepared, model: str, response_id: str, borders: Sequence[int], *, linger_s: float
) -> AsyncGenerator[PromptDelta]:
    """Iterate over the deltas of an existing stream from its first one, split at ``borders``."""
    n = prepared.params.n
    handles = [
        await client.handle(request_id_of(response_id, position), model=model, n=n)
        for position in range(len(prepared.prompts))
    ]
    streams = [handle.replay(borders[i * n : (i + 1) * n], linger_s=linger_s) for i, handle in enumerate(handles)]
    async with aclosing(merged(streams)) as deltas:
        async for delta in deltas:
            yield delta
