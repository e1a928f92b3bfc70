"""Flask: WSGI, a thread for each request, all of them on one ``LLM``.

    PENSTOCK_REDIS_URL=redis://localhost:6379 flask --app penstock.ops.examples.flask_app:create_app run

In production use a server with threads: each stream holds one for as long as it lasts.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncGenerator

from flask import Flask, Response, jsonify, request
from flask.typing import ResponseReturnValue

from ...producer import LLM, Delta, PenstockError, SamplingParams
from ...producer.openai.errors import error_of
from ...producer.reconnect import StreamPosition, reconnect
from ...producer.sse import EventStream, delta_events

LINGER_S = 10.0
# WSGI tells an app that the reader is gone only when it writes: so this is how late an unread answer is cancelled.
KEEP_ALIVE_S = 2.0


def asked() -> tuple[str, SamplingParams]:
    min_tokens = request.args.get("min_tokens", 0, int)
    return request.args.get("question", ""), SamplingParams(temperature=0.0, max_tokens=400, min_tokens=min_tokens)


def create_app() -> Flask:
    """Return the app, connected; in workers that are forked from it (``gunicorn --preload``) it connects anew."""
    app = Flask(__name__)
    llm = LLM(os.environ["PENSTOCK_REDIS_URL"], model=os.environ.get("PENSTOCK_SERVED_MODEL_NAME"))

    def as_events(deltas: AsyncGenerator[Delta], position: StreamPosition, **headers: str) -> Response:
        stream = EventStream(delta_events(deltas, position), headers=headers, keep_alive_s=KEEP_ALIVE_S)
        # Started first: what is refused becomes a status, and not an event of a reply that has begun.
        return Response(llm.iterate(llm.call(stream.start())), headers=dict(stream.headers))

    @app.errorhandler(PenstockError)
    def refused(error: PenstockError) -> ResponseReturnValue:
        told = error_of(error)
        return jsonify(error=told.message), told.status, told.headers

    @app.get("/ask")
    def ask() -> ResponseReturnValue:
        question, params = asked()
        request_id = uuid.uuid4().hex
        deltas = llm.client.stream(question, params, request_id=request_id)
        return as_events(deltas, StreamPosition(), **{"x-request-id": request_id})

    @app.get("/answers/<request_id>/stream")
    def stream(request_id: str) -> ResponseReturnValue:
        last_event_id = request.headers.get("Last-Event-ID")
        position = StreamPosition.parse(last_event_id)
        if position.ended:
            return "", 204  # which tells an EventSource not to come again
        question, params = asked()
        if question and not last_event_id:
            deltas = llm.client.stream(question, params, request_id=request_id, linger_s=LINGER_S)
        else:
            deltas = reconnect(llm.client, request_id, position, linger_s=LINGER_S)
        return as_events(deltas, position)

    @app.post("/answers/<request_id>")
    def submit(request_id: str) -> ResponseReturnValue:
        question, params = asked()
        handle = llm.call(llm.client.submit(question, params, request_id=request_id))
        return jsonify(id=handle.request_id), 202

    @app.get("/answers/<request_id>")
    def poll(request_id: str) -> ResponseReturnValue:
        status = llm.status(request_id)
        if status.state in ("queued", "claimed"):
            return jsonify(state=status.state, position=status.position), 202
        handle = llm.call(llm.client.handle(request_id))
        output = llm.call(handle.result())
        return jsonify(text=output.text, finish_reason=output.outputs[0].finish_reason)

    @app.delete("/answers/<request_id>")
    def cancel(request_id: str) -> ResponseReturnValue:
        llm.call(llm.client.cancel(request_id))
        return "", 204

    return app
