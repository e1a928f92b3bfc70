"""Flask: WSGI, with a thread for each request, which share one ``LLM``.

    pip install flask
    penstock example flask > app.py
    flask --app app run

In production use a server with threads: each stream uses one until it ends.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncGenerator

from flask import Flask, Response, jsonify, request
from flask.typing import ResponseReturnValue

from penstock.producer import LLM, Delta, PenstockError, SamplingParams
from penstock.producer.openai.errors import error_of
from penstock.producer.reconnect import StreamPosition, reconnect
from penstock.producer.sse import EventStream, delta_events

LINGER_S = 10.0
# WSGI reports a disconnect only on a write. So an abandoned answer is cancelled within this time.
KEEP_ALIVE_S = 2.0


def question_of_request() -> tuple[str, SamplingParams]:
    min_tokens = request.args.get("min_tokens", 0, int)
    return request.args.get("question", ""), SamplingParams(temperature=0.0, max_tokens=400, min_tokens=min_tokens)


def create_app() -> Flask:
    """Return the connected app. Workers forked from it (``gunicorn --preload``) connect again."""
    app = Flask(__name__)
    llm = LLM(model=os.environ.get("PENSTOCK_SERVED_MODEL_NAME"))

    def as_events(deltas: AsyncGenerator[Delta], position: StreamPosition, **headers: str) -> Response:
        stream = EventStream(delta_events(deltas, position), headers=headers, keep_alive_s=KEEP_ALIVE_S)
        # Started first, so that a refusal becomes an HTTP status instead of an event.
        return Response(llm.iterate(llm.call(stream.start())), headers=dict(stream.headers))

    @app.errorhandler(PenstockError)
    def refused(error: PenstockError) -> ResponseReturnValue:
        reply = error_of(error)
        return jsonify(error=reply.message), reply.status, reply.headers

    @app.get("/ask")
    def ask() -> ResponseReturnValue:
        question, params = question_of_request()
        request_id = uuid.uuid4().hex
        deltas = llm.client.stream(question, params, request_id=request_id)
        return as_events(deltas, StreamPosition(), **{"x-request-id": request_id})

    @app.get("/answers/<request_id>/stream")
    def stream(request_id: str) -> ResponseReturnValue:
        last_event_id = request.headers.get("Last-Event-ID")
        position = StreamPosition.parse(last_event_id)
        if position.ended:
            return "", 204  # stops an EventSource from reconnecting
        question, params = question_of_request()
        if question and not last_event_id:
            deltas = llm.client.stream(question, params, request_id=request_id, linger_s=LINGER_S)
        else:
            deltas = reconnect(llm.client, request_id, position, linger_s=LINGER_S)
        return as_events(deltas, position)

    @app.post("/answers/<request_id>")
    def submit(request_id: str) -> ResponseReturnValue:
        question, params = question_of_request()
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
