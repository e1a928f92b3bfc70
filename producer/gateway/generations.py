"""A prepared body as requests of the client: one for each prompt, run together, with one answer or one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from .. import Client, Delta
from ..inputs.options import READ_TTL_S, RequestOptions
from ..inputs.prompt import Prompt
from ..inputs.prompt_names import naming, numbered
from ..openai.prepared import Prepared, PreparedBody
from ..requests.merging import merged
from ..results.outputs import RequestOutput
from .access.auth import Identity
from .settings import GatewaySettings

PromptDelta = tuple[int, Delta]


def request_id_of(response_id: str, prompt: int) -> str:
    """Return the id under which the client knows the request for one prompt of a response."""
    return response_id if prompt == 0 else f"{response_id}-{prompt}"


def options_of(prepared: PreparedBody, identity: Identity, settings: GatewaySettings) -> RequestOptions:
    """Return what the requests say beside prompt and sampling: what the body says, on the account of who asks."""
    options: RequestOptions = {**prepared.options, "tenant": identity.tenant, "fail_fast": settings.fail_fast}
    # The id is the gateway's own: it is for whoever lost the connection.
    options.setdefault("read_ttl_s", READ_TTL_S)
    if identity.band is not None and "band" not in options:
        options["band"] = identity.band
    return options


async def answer(client: Client, prepared: Prepared, options: RequestOptions, response_id: str) -> msgspec.Struct:
    """Run all prompts and return the body of the response. Cancelling it, or the failure of one, cancels the others."""

    async def one(name: str, position: int, prompt: Prompt) -> RequestOutput:
        own: RequestOptions = {**options, "request_id": request_id_of(response_id, position)}
        with naming(name):
            return await client.generate(prompt, prepared.params, **own)

    names = numbered("prompt", prepared.prompts)
    works = [
        asyncio.ensure_future(one(name, position, prompt))
        for position, (name, prompt) in enumerate(zip(names, prepared.prompts, strict=True))
    ]
    try:
        with prepared.naming_fields():
            outputs = await asyncio.gather(*works)
    finally:
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
    return prepared.answer(*outputs, response_id=response_id)


def stream(
    client: Client, prepared: Prepared, options: RequestOptions, response_id: str, *, linger_s: float
) -> AsyncGenerator[PromptDelta]:
    """Run all prompts and iterate over their deltas; what is left early lingers for ``linger_s``."""

    async def one(name: str, position: int, prompt: Prompt) -> AsyncGenerator[Delta]:
        own: RequestOptions = {**options, "linger_s": linger_s, "request_id": request_id_of(response_id, position)}
        with naming(name):
            async with aclosing(client.stream(prompt, prepared.params, **own)) as deltas:
                async for delta in deltas:
                    yield delta

    names = numbered("prompt", prepared.prompts)
    return merged(
        [
            one(name, position, prompt)
            for position, (name, prompt) in enumerate(zip(names, prepared.prompts, strict=True))
        ]
    )


async def replay(
    client: Client, prepared: Prepared, model: str, response_id: str, borders: Sequence[int], *, linger_s: float
) -> AsyncGenerator[PromptDelta]:
    """Iterate over the deltas of a stream that was begun before, from its first, with a border where it was cut."""
    n = prepared.params.n
    handles = [
        await client.handle(request_id_of(response_id, position), model=model, n=n)
        for position in range(len(prepared.prompts))
    ]
    streams = [handle.replay(borders[i * n : (i + 1) * n], linger_s=linger_s) for i, handle in enumerate(handles)]
    async with aclosing(merged(streams)) as deltas:
        async for delta in deltas:
            yield delta
