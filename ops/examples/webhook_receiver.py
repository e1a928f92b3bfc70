"""A receiver of webhooks: checks the signature, drops repeats, and fetches the answer afterwards.

pip install starlette uvicorn standardwebhooks
penstock example webhooks > app.py
WEBHOOK_SECRET=whsec_… uvicorn app:app --port 8001

``penstock webhook secret create`` prints the secret. Requests name the receiver:
``client.submit(prompt, webhook_url="https://app.example/hooks")``.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from standardwebhooks import Webhook, WebhookVerificationError
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.producer import Client

webhook = Webhook(os.environ["WEBHOOK_SECRET"])
known_ids: set[str] = set()  # in a real app: a unique column, or a key with a time to live
answers: dict[str, str] = {}


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Client]]:
    async with Client.connect() as client:
        yield {"client": client}  # becomes request.state.client


async def receive_event(request: Request) -> Response:
    try:
        event = webhook.verify(await request.body(), dict(request.headers))
    except WebhookVerificationError:
        return Response(status_code=400)
    event_id = request.headers["webhook-id"]
    if event_id in known_ids or event["type"] != "request.completed":
        return Response(status_code=204)
    known_ids.add(event_id)
    # After the reply, since the sender waits for that.
    return Response(status_code=204, background=BackgroundTask(fetch_answer, request.state.client, event["data"]["id"]))


async def fetch_answer(client: Client, request_id: str) -> None:
    answers[request_id] = (await (await client.handle(request_id)).result()).text


async def list_answers(request: Request) -> Response:
    return JSONResponse(answers)


app = Starlette(
    lifespan=lifespan, routes=[Route("/hooks", receive_event, methods=["POST"]), Route("/answers", list_answers)]
)
