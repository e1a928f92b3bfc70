"""Django with async views under ASGI; settings, views and URLs in this one file.

pip install django uvicorn
penstock example django > app.py
uvicorn app:application

Under WSGI each async view runs in its own event loop: use ``LLM`` in plain views there, as in Flask's example.
"""

from __future__ import annotations

import functools
import os
import secrets
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.urls import path
from django.views.decorators.http import require_http_methods

from penstock.producer import Client, Delta, PenstockError, SamplingParams
from penstock.producer.openai.errors import error_of
from penstock.producer.reconnect import StreamPosition, reconnect
from penstock.producer.sse import EventStream, delta_events

LINGER_S = 10.0

View = Callable[..., Awaitable[HttpResponseBase]]


class Connection:
    """The client of this process for all requests, connected while the server runs."""

    client: Client


def question_of(request: HttpRequest) -> tuple[str, SamplingParams]:
    question, min_tokens = str(request.GET.get("question", "")), str(request.GET.get("min_tokens", 0))
    return question, SamplingParams(temperature=0.0, max_tokens=400, min_tokens=int(min_tokens))


def refusing(view: View) -> View:
    """Turn Penstock's errors into replies."""

    @functools.wraps(view)
    async def with_refusals(request: HttpRequest, **options: str) -> HttpResponseBase:
        try:
            return await view(request, **options)
        except PenstockError as error:
            reply = error_of(error)
            return JsonResponse({"error": reply.message}, status=reply.status, headers=reply.headers)

    return with_refusals


async def as_events(deltas: AsyncGenerator[Delta], position: StreamPosition, **headers: str) -> HttpResponseBase:
    # Started first, so that a refusal becomes an HTTP status instead of an event.
    stream = await EventStream(delta_events(deltas, position), headers=headers).start()
    return StreamingHttpResponse(stream, headers=stream.headers)


@refusing
async def ask(request: HttpRequest) -> HttpResponseBase:
    question, params = question_of(request)
    request_id = uuid.uuid4().hex
    deltas = Connection.client.stream(question, params, request_id=request_id)
    return await as_events(deltas, StreamPosition(), **{"x-request-id": request_id})


@refusing
async def stream(request: HttpRequest, request_id: str) -> HttpResponseBase:
    last_event_id = request.META.get("HTTP_LAST_EVENT_ID")
    position = StreamPosition.parse(last_event_id)
    if position.ended:
        return HttpResponse(status=204)  # stops an EventSource from reconnecting
    question, params = question_of(request)
    if question and not last_event_id:
        deltas = Connection.client.stream(question, params, request_id=request_id, linger_s=LINGER_S)
    else:
        deltas = reconnect(Connection.client, request_id, position, linger_s=LINGER_S)
    return await as_events(deltas, position)


@require_http_methods(["GET", "POST", "DELETE"])
@refusing
async def answer(request: HttpRequest, request_id: str) -> HttpResponseBase:
    client = Connection.client
    if request.method == "POST":
        question, params = question_of(request)
        handle = await client.submit(question, params, request_id=request_id)
        return JsonResponse({"id": handle.request_id}, status=202)
    if request.method == "DELETE":
        await client.cancel(request_id)
        return HttpResponse(status=204)
    status = await client.status(request_id)
    if status.state in ("queued", "claimed"):
        return JsonResponse({"state": status.state, "position": status.position}, status=202)
    output = await (await client.handle(request_id)).result()
    return JsonResponse({"text": output.text, "finish_reason": output.outputs[0].finish_reason})


urlpatterns = [
    path("ask", ask),
    path("answers/<str:request_id>/stream", stream),
    path("answers/<str:request_id>", answer),
]
settings.configure(
    SECRET_KEY=os.environ.get("SECRET_KEY") or secrets.token_hex(),
    ROOT_URLCONF=__name__,
    ALLOWED_HOSTS=["localhost", "127.0.0.1"],
)
_django = get_asgi_application()


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Pass requests to Django, and connect the client in the lifespan, which Django does not handle."""
    if scope["type"] != "lifespan":
        await _django(scope, receive, send)
        return
    await receive()
    async with Client.connect(model=os.environ.get("PENSTOCK_SERVED_MODEL_NAME")) as client:
        Connection.client = client
        await send({"type": "lifespan.startup.complete"})
        await receive()
    await send({"type": "lifespan.shutdown.complete"})
