"""Attributes of a request's spans: OpenTelemetry's names for generative AI, vLLM's names, and ours for the rest.

Nothing of prompt or answer is among them: stop strings, which a caller writes, are not either.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..messages.outcome import Usage
from ..messages.requests import EngineCoreRequest
from ..params.sampling import SamplingParams
from ..stats import RequestStats

Attribute = str | int | float | bool | list[str]

PROVIDER = "penstock"
CHAT, TEXT_COMPLETION, EMBEDDINGS = "chat", "text_completion", "embeddings"

MODEL = "gen_ai.request.model"
REQUEST_ID = "gen_ai.request.id"
ERROR = "error.type"
TENANT = "penstock.tenant"
BAND = "penstock.band"
NUM_REQUESTS = "penstock.enqueue.num_requests"
ATTEMPT = "penstock.attempt"
EPOCH = "penstock.epoch"
ENGINE_ID = "penstock.engine.id"
OUTCOME = "penstock.attempt.outcome"
CAUSE = "penstock.attempt.cause"
# Output tokens that were there when the attempt began, and at its end.
FIRST_TOKEN_INDEX = "penstock.attempt.first_token_index"
NEXT_TOKEN_INDEX = "penstock.attempt.next_token_index"
NUM_PREEMPTIONS = "penstock.num_preemptions"


def operation_of(request: EngineCoreRequest) -> str:
    """Return OpenTelemetry's name of the operation."""
    if request.pooling_params is not None:
        return EMBEDDINGS
    return TEXT_COMPLETION if request.messages is None else CHAT


def of_request(model: str, request_id: str, tenant: str) -> dict[str, Attribute]:
    """Return the attributes that each span of a request has."""
    return {"gen_ai.provider.name": PROVIDER, MODEL: model, REQUEST_ID: request_id, TENANT: tenant}


def of_params(params: SamplingParams) -> dict[str, Attribute]:
    """Return the parameters without the prompt; unset ones are left out."""
    values: Mapping[str, Attribute | None] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else None,
        "seed": params.seed,
        "presence_penalty": params.presence_penalty or None,
        "frequency_penalty": params.frequency_penalty or None,
    }
    return {f"gen_ai.request.{name}": value for name, value in values.items() if value is not None}


def of_usage(usage: Usage) -> dict[str, Attribute]:
    """Return the tokens of a request that has ended. ``prompt_tokens`` and ``completion_tokens`` are vLLM's names."""
    return {
        "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
        "gen_ai.usage.output_tokens": usage.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
        "gen_ai.usage.prompt_tokens": usage.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": usage.num_output_tokens,
    }


def of_stats(stats: RequestStats) -> dict[str, Attribute]:
    """Return the times of a request that has ended, in seconds, under vLLM's names; all its attempts are in them."""
    return {
        "gen_ai.latency.time_in_queue": stats.queue_time_s,
        "gen_ai.latency.time_to_first_token": stats.time_to_first_token_s,
        "gen_ai.latency.e2e": stats.latency_s,
        "gen_ai.latency.time_in_model_prefill": stats.prefill_time_s,
        "gen_ai.latency.time_in_model_decode": stats.decode_time_s,
        "gen_ai.latency.time_in_model_inference": stats.prefill_time_s + stats.decode_time_s,
        NUM_PREEMPTIONS: stats.num_preemptions,
    }
