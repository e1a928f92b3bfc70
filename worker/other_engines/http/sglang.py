"""SGLang's own endpoint: ``POST /generate`` with ``input_ids``.

While it streams, each answer has all tokens so far, or with ``--incremental-streaming-output`` those since the last:
``completion_tokens`` says how many there are in all, so the last ones of either are what is new.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ....shared.messages.outcome import FinishReason, TokenLogprobs
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.sampling import SamplingParams
from ....shared.params.seeds import derived_seed
from ....shared.params.structured import StructuredOutputsParams
from .dialect import Asked, Chunk, ServerFacts, check_request, refuse_grammar_fields

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
GRAMMAR_FIELDS_REFUSED = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_CALLERS_MISTAKES = (400, 413, 422)


class SglangDialect:
    """As ``Dialect``."""

    name = NAME
    generate_path = "/generate"
    health_path = "/health"

    def check(self, message: EngineCoreRequest, params: SamplingParams) -> None:
        """As ``Dialect``."""
        check_request(NAME, message, params, SERVED_FIELDS)
        refuse_grammar_fields(NAME, params, GRAMMAR_FIELDS_REFUSED)

    def body(self, asked: Asked) -> dict[str, Any]:
        """As ``Dialect``."""
        params = asked.params
        sampling: dict[str, Any] = {name: getattr(params, name) for name in FIELDS_AS_THEY_ARE}
        sampling |= {
            "top_k": params.top_k if params.top_k > 0 else -1,
            "max_new_tokens": asked.max_new_tokens,
            "min_new_tokens": max(0, params.min_tokens - asked.num_output_tokens),
            # It heeds it with --enable-deterministic-inference.
            "sampling_seed": derived_seed(asked.seed, asked.num_output_tokens),
        }
        if params.logit_bias:
            sampling["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
        if params.structured_outputs is not None:
            sampling |= _grammar(params.structured_outputs)
        body: dict[str, Any] = {
            "input_ids": asked.prompt_token_ids,
            "sampling_params": sampling,
            "stream": asked.is_streamed,
        }
        if params.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": params.logprobs}
        return body

    def read(self, answer: dict[str, Any], asked: Asked, num_seen: int) -> Chunk:
        """As ``Dialect``."""
        if "error" in answer:
            return _error(answer["error"])
        told = answer["meta_info"]
        finish = told.get("finish_reason")
        if finish is not None and finish["type"] == "abort":
            return _abort(finish)
        chunk = Chunk(num_generated=int(told["completion_tokens"]))
        num_new = chunk.num_generated - num_seen
        chunk.token_ids = _last(answer["output_ids"], num_new)
        chunk.num_cached_tokens = int(told.get("cached_tokens", 0))
        if asked.params.logprobs is not None:
            chunk.logprobs = _logprobs(told, len(chunk.token_ids), asked.params.logprobs)
        if finish is not None:
            chunk.ending = FinishReason.STOP if finish["type"] == "stop" else FinishReason.LENGTH
            matched = finish.get("matched")
            chunk.stop_reason = matched if isinstance(matched, int) else None
        return chunk


def facts_of(model: dict[str, Any], server: dict[str, Any]) -> ServerFacts:
    """What ``GET /get_model_info`` and ``GET /get_server_info`` say.

    Raises:
        KeyError, TypeError, ValueError, IndexError: they are not SGLang's.
    """
    states = server.get("internal_states") or [{}]
    num_slots = server.get("max_running_requests") or states[0].get("effective_max_running_requests_per_dp")
    num_tokens = int(server.get("max_total_num_tokens") or 0)
    # It keeps some tokens back from the longest prompt that it takes.
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


def _grammar(wanted: StructuredOutputsParams) -> dict[str, Any]:
    if wanted.json is not None:
        return {"json_schema": wanted.json if isinstance(wanted.json, str) else json.dumps(wanted.json)}
    if wanted.regex is not None:
        return {"regex": wanted.regex}
    if wanted.choice is not None:
        return {"regex": "(" + "|".join(re.escape(choice) for choice in wanted.choice) + ")"}
    if wanted.grammar is not None:
        return {"ebnf": wanted.grammar}
    if wanted.structural_tag is not None:
        return {"structural_tag": wanted.structural_tag}
    return {"json_schema": '{"type": "object"}'}


def _last(items: list[Any], number: int) -> list[Any]:
    if number > len(items):
        raise ValueError(f"{number} tokens are new, and {len(items)} came")
    return list(items[len(items) - number :]) if number > 0 else []


def _logprobs(told: dict[str, Any], num_new: int, num_top: int) -> list[TokenLogprobs]:
    tops = _last(told["output_top_logprobs"], num_new) if num_top else [[]] * num_new
    made: list[TokenLogprobs] = []
    for (logprob, token_id, _), pairs in zip(_last(told["output_token_logprobs"], num_new), tops, strict=True):
        top = [(int(other), float(value)) for value, other, _ in pairs or ()]
        places = [place for place, (other, _) in enumerate(top, start=1) if other == token_id]
        made.append(TokenLogprobs(int(token_id), float(logprob), places[0] if places else len(top) + 1, top))
    return made


def _error(error: Any) -> Chunk:
    words = str(error.get("message", "") if isinstance(error, dict) else error) or "it gave no reason"
    is_mistake = isinstance(error, dict) and error.get("code", 400) in _CALLERS_MISTAKES
    return Chunk(refusal=words) if is_mistake else Chunk(failure=words)


def _abort(finish: dict[str, Any]) -> Chunk:
    words = str(finish.get("message") or "it aborted the request")
    return Chunk(refusal=words) if finish.get("status_code") in _CALLERS_MISTAKES else Chunk(failure=words)
