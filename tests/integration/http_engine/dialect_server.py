"""A program that speaks as llama-server or SGLang does over a function of the tokens: real HTTP, no model.

As in a greedy model, the next token depends on all tokens before it, so whoever gives back what was delivered gets the
rest. A grammar begins with a call, as it does there: its tokens depend on the prompt and on how many there are.

``/test/hold`` lets no call have more tokens than it says, ``/test/calls`` tells what was asked and how it ended,
``/test/ended`` the same once all has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

NUM_SLOTS, SLOT_TOKENS, VOCAB_SIZE, EOS = 4, 512, 382, 2
LETTERS, DIGITS = range(67, 93), range(18, 28)
# The two bytes of "é" as the demo's tokenizer has them; behind LEAD a text is no text.
LEAD, TAIL = 130, 105
# Biases that do no good.
CRASH, MISTAKE, FAILURE = 0.125, 0.25, 0.5
# Text in every answer. The servers do not escape these characters, at which Python splits lines.
TEXT = "\x85\u2028\u2029"
# A prompt that begins with it has "é" in its answers.
ACCENTS = 87


def next_token(token_ids: list[int], num_prompt: int, grammar: str, *, ignore_eos: bool) -> int:
    """Return what a model would choose; ``num_prompt`` are the call's own."""
    if grammar:
        seed = zlib.crc32(repr((token_ids[:num_prompt], len(token_ids), grammar)).encode())
        return DIGITS[seed % len(DIGITS)]
    if token_ids[-1] == LEAD:
        return TAIL
    seed = zlib.crc32(repr(token_ids).encode())
    if token_ids[0] == ACCENTS and seed % 3 == 0:
        return LEAD
    if not ignore_eos and seed % 23 == 0:
        return EOS
    return LETTERS[seed % len(LETTERS)]


@dataclass
class State:
    """The state of the server that tests set and read."""

    hold_at: float = math.inf
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Call:
    """A completion in a form that neither server has."""

    prompt: list[int]
    max_tokens: int
    grammar: str
    ignore_eos: bool
    record: dict[str, Any]
    token_ids: list[int] = field(default_factory=list)

    @property
    def is_ended_by_eos(self) -> bool:
        return self.token_ids[-1:] == [EOS] and not self.ignore_eos

    async def run(self, state: State) -> AsyncIterator[int]:
        """Its tokens; cut if nobody reads them any more."""
        self.record["end"], end = "open", "cut"
        try:
            while len(self.token_ids) < self.max_tokens and not self.is_ended_by_eos:
                async with state.moved:
                    await state.moved.wait_for(lambda: len(self.token_ids) < state.hold_at)
                known = self.prompt + self.token_ids
                self.token_ids.append(next_token(known, len(self.prompt), self.grammar, ignore_eos=self.ignore_eos))
                yield self.token_ids[-1]
                await asyncio.sleep(0)
            end = "whole"
        finally:
            self.record["end"] = end
            state.ended.set()


def _grammar(value: Any) -> str:
    """Return a grammar or schema as text, without the key that a server without LLGuidance ignores."""
    if isinstance(value, dict):
        value = {name: part for name, part in value.items() if name != "x-guidance"}
    return json.dumps(value) if value else ""


def _logprobs(token_id: int, number: int) -> list[tuple[int, float]]:
    """Return as many log probabilities: another token's, and then that of the chosen one."""
    return [(token_id + 1, -0.5), (token_id, -1.5)][:number]


class LlamaServer:
    """Answers of ``POST /completion`` and its kin."""

    def __init__(self, state: State) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        return [
            Route("/props", self._props),
            Route("/v1/models", self._models),
            Route("/completion", self._complete, methods=["POST"]),
        ]

    async def _props(self, _: Request) -> Response:
        settings = {"n_ctx": SLOT_TOKENS, "params": {}}
        props = {"default_generation_settings": settings, "total_slots": NUM_SLOTS, "model_path": "demo.gguf"}
        return JSONResponse({**props, "build_info": "b1-test"})

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "demo", "meta": {"n_vocab": VOCAB_SIZE}}]})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        biases = {bias for _, bias in body.get("logit_bias", [])}
        if CRASH in biases:
            os._exit(3)
        if MISTAKE in biases:
            error = {"code": 400, "message": "that is no bias", "type": "invalid_request_error"}
            return JSONResponse({"error": error}, status_code=400)
        record: dict[str, Any] = {"body": body, "end": "refused"}
        self._state.calls.append(record)
        grammar = _grammar(body.get("json_schema") or body.get("grammar") or "")
        call = Call(body["prompt"], body["n_predict"], grammar, body["ignore_eos"], record)
        if body["stream"]:
            stream = self._stream(call, body, fails=FAILURE in biases)
            return StreamingResponse(stream, media_type="text/event-stream")
        async for _ in call.run(self._state):
            pass
        told = [self._told(token_id, body) for token_id in call.token_ids] if "n_probs" in body else []
        return JSONResponse({**self._final(call), "tokens": call.token_ids, "completion_probabilities": told})

    async def _stream(self, call: Call, body: dict[str, Any], *, fails: bool) -> AsyncIterator[str]:
        progress = {"total": len(call.prompt), "cache": 1, "processed": len(call.prompt), "time_ms": 1}
        yield _event({"tokens": [-1], "stop": False, "tokens_predicted": 0, "prompt_progress": progress})
        async for token_id in call.run(self._state):
            if fails and len(call.token_ids) == 3:
                yield _event({"error": {"code": 500, "message": "the batch failed", "type": "server_error"}})
                return
            if token_id == LEAD:
                continue
            answer: dict[str, Any] = {
                "content": TEXT,
                "tokens": [token_id],
                "stop": False,
                "tokens_predicted": len(call.token_ids),
            }
            if "n_probs" in body:
                answer["completion_probabilities"] = [self._told(token_id, body)]
            yield _event(answer)
        yield _event({**self._final(call), "tokens": []})

    def _told(self, token_id: int, body: dict[str, Any]) -> dict[str, Any]:
        top = [{"id": other, "logprob": value} for other, value in _logprobs(token_id, body["n_probs"])]
        return {"id": token_id, "logprob": -1.5, "top_logprobs": top}

    def _final(self, call: Call) -> dict[str, Any]:
        ending = "eos" if call.is_ended_by_eos else "limit"
        return {"stop": True, "stop_type": ending, "tokens_predicted": len(call.token_ids)}


class SglangServer:
    """Answers of ``POST /generate`` and its kin."""

    def __init__(self, state: State, *, is_incremental: bool) -> None:
        self._state = state
        self._is_incremental = is_incremental

    def routes(self) -> list[Route]:
        return [
            Route("/get_model_info", self._model_info),
            Route("/get_server_info", self._server_info),
            Route("/generate", self._generate, methods=["POST"]),
        ]

    async def _model_info(self, _: Request) -> Response:
        return JSONResponse({"model_path": "demo", "architectures": ["LlamaForCausalLM"], "is_generation": True})

    async def _server_info(self, _: Request) -> Response:
        states = [{"effective_max_running_requests_per_dp": NUM_SLOTS}]
        facts = {"max_running_requests": None, "internal_states": states, "version": "0.5.23", "page_size": 1}
        total = NUM_SLOTS * SLOT_TOKENS
        return JSONResponse({**facts, "context_length": SLOT_TOKENS, "max_total_num_tokens": total})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        record: dict[str, Any] = {"body": body, "end": "refused"}
        self._state.calls.append(record)
        sampling = body["sampling_params"]
        grammar = next((sampling[name] for name in ("json_schema", "regex", "ebnf") if name in sampling), "")
        call = Call(body["input_ids"], sampling["max_new_tokens"], grammar, sampling["ignore_eos"], record)
        biases = (sampling.get("logit_bias") or {}).values()
        if CRASH in biases:
            os._exit(3)
        return StreamingResponse(self._stream(call, body, mistake=MISTAKE in biases), media_type="text/event-stream")

    async def _stream(self, call: Call, body: dict[str, Any], *, mistake: bool) -> AsyncIterator[str]:
        if mistake:
            error = {"message": "that is no bias", "type": "invalid_request_error", "code": 400, "retryable": False}
            yield _event({"error": error}) + "data: [DONE]\n\n"
            return
        async for _ in call.run(self._state):
            yield _event(self._told(call, body))
        yield "data: [DONE]\n\n"

    def _told(self, call: Call, body: dict[str, Any]) -> dict[str, Any]:
        finish: dict[str, Any] | None = None
        if call.is_ended_by_eos:
            finish = {"type": "stop", "matched": EOS}
        elif len(call.token_ids) == call.max_tokens:
            finish = {"type": "length", "length": call.max_tokens}
        first = len(call.token_ids) - 1 if self._is_incremental else 0
        told = call.token_ids[first:]
        meta: dict[str, Any] = {"finish_reason": finish, "completion_tokens": len(call.token_ids), "cached_tokens": 1}
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [(-1.5, token_id, None) for token_id in told]
            tops = [_logprobs(token_id, body["top_logprobs_num"]) for token_id in told]
            meta["output_top_logprobs"] = [[(value, other, None) for other, value in top] for top in tops]
        return {"text": TEXT, "output_ids": told, "meta_info": meta}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def make_app(dialect: str) -> Starlette:
    """``dialect``: "llama", "sglang", "sglang-incremental", or "other", which is none that is known."""
    state = State()

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def hold(request: Request) -> Response:
        at = (await request.json())["at"]
        async with state.moved:
            state.hold_at = math.inf if at is None else at
            state.moved.notify_all()
        return JSONResponse({})

    async def calls(_: Request) -> Response:
        return JSONResponse(state.calls)

    async def ended(_: Request) -> Response:
        while any(call["end"] == "open" for call in state.calls):
            state.ended.clear()
            await state.ended.wait()
        return JSONResponse(state.calls)

    routes = [Route("/health", health), Route("/test/hold", hold, methods=["POST"]), Route("/test/calls", calls)]
    routes += [Route("/test/ended", ended)]
    if dialect == "llama":
        routes += LlamaServer(state).routes()
    elif dialect.startswith("sglang"):
        routes += SglangServer(state, is_incremental=dialect.endswith("incremental")).routes()
    return Starlette(routes=routes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dialect", default="llama")
    arguments = parser.parse_args()
    uvicorn.run(make_app(arguments.dialect), host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
