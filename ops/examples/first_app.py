"""A web app that streams answers: `penstock example first > app.py`, then `uvicorn app:app`."""

from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from penstock.producer import Client, PenstockError, SamplingParams
from penstock.producer.openai.errors import error_of
from penstock.producer.sse import EventStream, delta_events


@asynccontextmanager
async def lifespan(app: FastAPI):
    async with Client.connect() as client:  # at PENSTOCK_REDIS_URL, or the Redis that the worker has started
        app.state.llm = client  # one client serves any number of requests
        yield


app = FastAPI(lifespan=lifespan)


@app.exception_handler(PenstockError)
async def refuse(request: Request, error: PenstockError) -> JSONResponse:
    reply = error_of(error)  # 404 for an unknown model, 429 for a full queue or an exceeded quota, …
    return JSONResponse({"error": reply.message}, reply.status, reply.headers)


@app.get("/ask")
async def ask(question: str) -> StreamingResponse:
    params = SamplingParams(temperature=0.7, max_tokens=300)
    deltas = app.state.llm.stream([{"role": "user", "content": question}], params)
    events = await EventStream(delta_events(deltas)).start()  # a refusal raises here, while a status can be sent
    return StreamingResponse(events, headers=events.headers)  # if the reader leaves, the request is cancelled
