"""Starlette: an ``EventStream`` is the response itself.

pip install starlette uvicorn
penstock example starlette > app.py
uvicorn app:app
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.producer import Client, PenstockError, SamplingParams
from penstock.producer.openai.errors import error_of
from penstock.producer.reconnect import StreamPosition, reconnect
from penstock.producer.sse import EventStream, delta_events

LINGER_S = 10.0


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Client]]:
    async with Client.connect(model=os.environ.get("PENSTOCK_SERVED_MODEL_NAME")) as client:
        yield {"client": client}  # becomes request.state.client; one for all requests


def question_of(request: Request) -> tuple[str, SamplingParams]:
    min_tokens = int(request.query_params.get("min_tokens", 0))
    return request.query_params.get("question", ""), SamplingParams(
        temperature=0.0, max_tokens=400, min_tokens=min_tokens
    )


async def ask(request: Request) -> ASGIApp:
    question, params = question_of(request)
    request_id = uuid.uuid4().hex
    deltas = request.state.client.stream(question, params, request_id=request_id)
    return EventStream(delta_events(deltas), headers={"x-request-id": request_id})


async def stream(request: Request) -> ASGIApp:
    last_event_id = request.headers.get("last-event-id")
    position = StreamPosition.parse(last_event_id)
    if position.ended:
        return Response(status_code=204)  # stops an EventSource from reconnecting
    client, request_id = request.state.client, request.path_params["request_id"]
    question, params = question_of(request)
    if question and not last_event_id:
        deltas = client.stream(question, params, request_id=request_id, linger_s=LINGER_S)
    else:
        deltas = reconnect(client, request_id, position, linger_s=LINGER_S)
    return EventStream(delta_events(deltas, position))


async def submit(request: Request) -> Response:
    question, params = question_of(request)
    handle = await request.state.client.submit(question, params, request_id=request.path_params["request_id"])
    return JSONResponse({"id": handle.request_id}, status_code=202)


async def poll(request: Request) -> Response:
    client, request_id = request.state.client, request.path_params["request_id"]
    status = await client.status(request_id)
    if status.state in ("queued", "claimed"):
        return JSONResponse({"state": status.state, "position": status.position}, status_code=202)
    output = await (await client.handle(request_id)).result()
    return JSONResponse({"text": output.text, "finish_reason": output.outputs[0].finish_reason})


async def cancel(request: Request) -> Response:
    await request.state.client.cancel(request.path_params["request_id"])
    return Response(status_code=204)


async def refused(request: Request, error: Exception) -> Response:
    reply = error_of(error)
    return JSONResponse({"error": reply.message}, status_code=reply.status, headers=reply.headers)


app = Starlette(
    lifespan=lifespan,
    exception_handlers={PenstockError: refused},
    routes=[
        Route("/ask", ask),
        Route("/answers/{request_id}/stream", stream),
        Route("/answers/{request_id}", submit, methods=["POST"]),
        Route("/answers/{request_id}", poll),
        Route("/answers/{request_id}", cancel, methods=["DELETE"]),
    ],
)
