"""SGLang's own endpoint: ``POST /generate`` with ``input_ids``.

Each event of a stream has all tokens so far, or with ``--incremental-streaming-output`` those since the last event.
``completion_tokens`` has their total number, so in both cases the new tokens are the last ones.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ....shared.messages.outcome import FinishReason, TokenLogprobs
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.sampling import SamplingParams, derived_seed
from ....shared.params.structured import StructuredOutputsParams
from .dialect import Chunk, ServerCall, ServerFacts, check_request, refuse_grammar_fields

NAME = "SGLang"
FIELDS_AS_THEY_ARE = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "min_p",
    "ignore_eos",
    "stop_token_ids",
)
FIELDS_CHANGED = ("top_k", "seed", "max_tokens", "min_tokens", "logprobs", "structured_outputs", "logit_bias")
SERVED_FIELDS = frozenset({*FIELDS_AS_THEY_ARE, *FIELDS_CHANGED})
# Not "disable_any_whitespace" and "disable_additional_properties", which the gateway sets for every JSON answer.
GRAMMAR_FIELDS_REFUSED = ("whitespace_pattern",)
_CALLERS_MISTAKES = (400, 413, 422)


class SglangDialect:
    """Dialect of SGLang."""

    name = NAME
    generate_path = "/generate"
    health_path = "/health"

    def check(self, message: EngineCoreRequest, params: SamplingParams) -> None:
        """Implement ``Dialect``."""
        check_request(NAME, message, params, SERVED_FIELDS)
        refuse_grammar_fields(NAME, params, GRAMMAR_FIELDS_REFUSED)

    def body(self, call: ServerCall) -> dict[str, Any]:
        """Implement ``Dialect``."""
        params = call.params
        sampling: dict[str, Any] = {name: getattr(params, name) for name in FIELDS_AS_THEY_ARE}
        sampling |= {
            "top_k": params.top_k if params.top_k > 0 else -1,
            "max_new_tokens": call.max_new_tokens,
            "min_new_tokens": max(0, params.min_tokens - call.num_output_tokens),
            # Used only with --enable-deterministic-inference.
            "sampling_seed": derived_seed(call.seed, call.num_output_tokens),
        }
        if params.logit_bias:
            sampling["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
        if params.structured_outputs is not None:
            sampling |= _grammar(params.structured_outputs)
        body: dict[str, Any] = {
            "input_ids": call.prompt_token_ids,
            "sampling_params": sampling,
            "stream": call.is_streamed,
        }
        if params.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": params.logprobs}
        return body

    def decode(self, answer: dict[str, Any], call: ServerCall, num_received: int) -> Chunk:
        """Implement ``Dialect``."""
        if "error" in answer:
            return _error(answer["error"])
        info = answer["meta_info"]
        finish = info.get("finish_reason")
        if finish is not None and finish["type"] == "abort":
            return _abort(finish)
        chunk = Chunk(num_generated=int(info["completion_tokens"]))
        num_new = chunk.num_generated - num_received
        chunk.token_ids = _last(answer["output_ids"], num_new)
        chunk.num_cached_tokens = int(info.get("cached_tokens", 0))
        if call.params.logprobs is not None:
            chunk.logprobs = _logprobs(info, len(chunk.token_ids), call.params.logprobs)
        if finish is not None:
            chunk.ending = FinishReason.STOP if finish["type"] == "stop" else FinishReason.LENGTH
            matched = finish.get("matched")
            chunk.stop_reason = matched if isinstance(matched, int) else None
        return chunk


def facts_of(model: dict[str, Any], server: dict[str, Any]) -> ServerFacts:
    """Return the facts in the responses of ``GET /get_model_info`` and ``GET /get_server_info``.

    Raises:
        KeyError, TypeError, ValueError, IndexError: the responses are not SGLang's.
    """
    states = server.get("internal_states") or [{}]
    num_slots = server.get("max_running_requests") or states[0].get("effective_max_running_requests_per_dp")
    num_tokens = int(server.get("max_total_num_tokens") or 0)
    # SGLang reserves some tokens, so max_req_input_len is less than the context length.
    max_model_len = server.get("context_length") or server.get("max_req_input_len") or num_tokens
    if not num_tokens or not num_slots:
        raise ValueError("max_total_num_tokens or max_running_requests is missing")
    architectures = model.get("architectures") or [""]
    return ServerFacts(
        version=str(server.get("version", "")),
        num_slots=int(num_slots),
        max_model_len=min(int(max_model_len), num_tokens),
        kv_cache_size_tokens=num_tokens,
        block_size=int(server.get("page_size") or 1),
        vocab_size=None,
        model=str(model["model_path"]),
        architecture=str(architectures[0]),
    )


def _grammar(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.json is not None:
        return {"json_schema": params.json if isinstance(params.json, str) else json.dumps(params.json)}
    if params.regex is not None:
        return {"regex": params.regex}
    if params.choice is not None:
        return {"regex": "(" + "|".join(re.escape(choice) for choice in params.choice) + ")"}
    if params.grammar is not None:
        return {"ebnf": params.grammar}
    if params.structural_tag is not None:
        return {"structural_tag": params.structural_tag}
    return {"json_schema": '{"type": "object"}'}


def _last(items: list[Any], number: int) -> list[Any]:
    if number > len(items):
        raise ValueError(f"{number} new tokens are reported, but {len(items)} were received")
    return list(items[len(items) - number :]) if number > 0 else []


def _logprobs(info: dict[str, Any], num_new: int, num_top: int) -> list[TokenLogprobs]:
    tops = _last(info["output_top_logprobs"], num_new) if num_top else [[]] * num_new
    logprobs: list[TokenLogprobs] = []
    for (logprob, token_id, _), pairs in zip(_last(info["output_token_logprobs"], num_new), tops, strict=True):
        top = [(int(other), float(value)) for value, other, _ in pairs or ()]
        ranks = [rank for rank, (other, _) in enumerate(top, start=1) if other == token_id]
        logprobs.append(TokenLogprobs(int(token_id), float(logprob), ranks[0] if ranks else len(top) + 1, top))
    return logprobs


def _error(error: Any) -> Chunk:
    words = str(error.get("message", "") if isinstance(error, dict) else error) or "it gave no reason"
    is_mistake = isinstance(error, dict) and error.get("code", 400) in _CALLERS_MISTAKES
    return Chunk(refusal=words) if is_mistake else Chunk(failure=words)


def _abort(finish: dict[str, Any]) -> Chunk:
    words = str(finish.get("message") or "it aborted the request")
    return Chunk(refusal=words) if finish.get("status_code") in _CALLERS_MISTAKES else Chunk(failure=words)
