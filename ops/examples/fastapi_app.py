"""FastAPI, with a page for browsers.

pip install fastapi uvicorn
penstock example fastapi > app.py
uvicorn app:app
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse

from penstock.producer import Client, Delta, PenstockError, SamplingParams
from penstock.producer.openai.errors import error_of
from penstock.producer.reconnect import StreamPosition, reconnect
from penstock.producer.sse import EventStream, delta_events

LINGER_S = 10.0
# To change it: penstock example page > page.html
PAGE = files("penstock.ops.examples").joinpath("page.html").read_text()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with Client.connect(model=os.environ.get("PENSTOCK_SERVED_MODEL_NAME")) as client:
        app.state.client = client  # one for all requests
        yield


def connected(request: Request) -> Client:
    return request.app.state.client


def sampling_params(min_tokens: int = 0) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=400, min_tokens=min_tokens)


app = FastAPI(lifespan=lifespan)
LLM = Annotated[Client, Depends(connected)]
Params = Annotated[SamplingParams, Depends(sampling_params)]


@app.exception_handler(PenstockError)
async def refused(request: Request, error: PenstockError) -> Response:
    reply = error_of(error)
    return JSONResponse({"error": reply.message}, status_code=reply.status, headers=reply.headers)


async def as_events(deltas: AsyncGenerator[Delta], position: StreamPosition, **headers: str) -> Response:
    # Started first, so that a refusal becomes an HTTP status instead of an event.
    stream = await EventStream(delta_events(deltas, position), headers=headers).start()
    return StreamingResponse(stream, headers=stream.headers)


@app.get("/")
async def page() -> Response:
    return HTMLResponse(PAGE)


@app.get("/ask")
async def ask(client: LLM, params: Params, question: str) -> Response:
    request_id = uuid.uuid4().hex
    deltas = client.stream(question, params, request_id=request_id)
    return await as_events(deltas, StreamPosition(), **{"x-request-id": request_id})


@app.get("/answers/{request_id}/stream")
async def stream(
    client: LLM,
    params: Params,
    request_id: str,
    question: str = "",
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    position = StreamPosition.parse(last_event_id)
    if position.ended:
        return Response(status_code=204)  # stops an EventSource from reconnecting
    if question and not last_event_id:
        deltas = client.stream(question, params, request_id=request_id, linger_s=LINGER_S)
    else:
        deltas = reconnect(client, request_id, position, linger_s=LINGER_S)
    return await as_events(deltas, position)


@app.post("/answers/{request_id}", status_code=202)
async def submit(client: LLM, params: Params, request_id: str, question: str) -> dict[str, str]:
    handle = await client.submit(question, params, request_id=request_id)
    return {"id": handle.request_id}


@app.get("/answers/{request_id}")
async def poll(client: LLM, request_id: str) -> Response:
    status = await client.status(request_id)
    if status.state in ("queued", "claimed"):
        return JSONResponse({"state": status.state, "position": status.position}, status_code=202)
    output = await (await client.handle(request_id)).result()
    return JSONResponse({"text": output.text, "finish_reason": output.outputs[0].finish_reason})


@app.delete("/answers/{request_id}", status_code=204)
async def cancel(client: LLM, request_id: str) -> None:
    await client.cancel(request_id)
