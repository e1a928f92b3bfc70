"""Convert requests to vLLM's arguments, and vLLM's outputs to ours. vLLM is not imported.

Tokens that a former engine has delivered are appended to the prompt, because vLLM's model runner reads no output of a
new request. So limits on output tokens are reduced by their number, and parameters that depend on the delivered text
are handled here. Arrays of outputs are numpy's or torch's, so only their common methods are used.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ....shared.errors import UnsupportedParameterError
from ....shared.messages.core import EngineCoreEvent, EngineCoreEventType
from ....shared.messages.outcome import FinishReason, TokenLogprobs
from ....shared.messages.requests import GREEDY, EngineCoreRequest
from ....shared.params.pooling import Pooled, PoolingParams
from ....shared.params.sampling import SamplingParams, derived_seed
from ....shared.params.structured import StructuredOutputsParams
from ....shared.stats import StepStats
from ...core.resuming import check_resume
from ..checked_request import refuse_unserved

# Which requests continue with the same tokens after a resume, reported in `Ready`: only greedy ones. Presence and
# frequency penalties and bad words consider only the output, and the state of a random generator is not stored.
RESUME = GREEDY

# Fields that have the same names and meanings in vLLM.
SAMPLING_FIELDS_AS_THEY_ARE = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "logit_bias",
    "allowed_token_ids",
)
SAMPLING_FIELDS_CHANGED = (
    "seed",
    "max_tokens",
    "min_tokens",
    "prompt_logprobs",
    "structured_outputs",
    "bad_words",
)
POOLING_FIELDS_AS_THEY_ARE = ("dimensions", "use_activation", "skip_reading_prefix_cache")
SERVED_FIELDS = frozenset({*SAMPLING_FIELDS_AS_THEY_ARE, *SAMPLING_FIELDS_CHANGED})
GRAMMAR_FIELDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# vLLM sets them for all requests of an engine; with their neutral values.
GRAMMAR_FIELDS_REFUSED = {
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
    "enable_in_reasoning": None,
}


def check_request(message: EngineCoreRequest, params: SamplingParams, *, has_adapters: bool = False) -> None:
    """Refuse a request that vLLM or this package cannot serve.

    Args:
        has_adapters: whether the engine serves adapters.

    Raises:
        UnsupportedParameterError: names the field and the remedy.
    """
    if message.prompt_embeds is not None:
        raise UnsupportedParameterError("prompt_embeds: engine 'vllm' supports only prompts of text and tokens")
    refuse_unserved("engine 'vllm'", params, SERVED_FIELDS)
    if has_adapters and params.prompt_logprobs is not None:
        # The adapters of its output layer, which it always computes, take one row of each request.
        raise UnsupportedParameterError(
            "prompt_logprobs: vLLM does not compute them in an engine with --enable-lora; leave them out, or use a "
            "model that is served without adapters"
        )
    grammar = params.structured_outputs
    for name, default in GRAMMAR_FIELDS_REFUSED.items() if grammar is not None else ():
        if getattr(grammar, name) != default:
            raise UnsupportedParameterError(
                f"structured_outputs.{name}: vLLM sets it for all requests of an engine, not for one; leave it out, or "
                "start the engine with --structured-outputs-config in --engine-options"
            )
    check_resume("vllm", message, params)


def vllm_params(params: SamplingParams, num_delivered: int) -> dict[str, Any]:
    """Return arguments of vLLM's ``SamplingParams``, except ``structured_outputs``, which ``grammar_of`` returns.

    Args:
        num_delivered: number of output tokens at the end of the prompt.
    """
    arguments = {name: getattr(params, name) for name in SAMPLING_FIELDS_AS_THEY_ARE}
    # In ours, -1 means "all" too.
    arguments["top_k"] = max(0, params.top_k)
    # With the same seed, the remaining tokens would be drawn with the random numbers of the first ones.
    arguments["seed"] = None if params.seed is None else derived_seed(params.seed, num_delivered)
    arguments["max_tokens"] = None if params.max_tokens is None else params.max_tokens - num_delivered
    arguments["min_tokens"] = max(0, params.min_tokens - num_delivered)
    # Sent with the first token, which is already delivered.
    arguments["prompt_logprobs"] = None if num_delivered else params.prompt_logprobs
    arguments["detokenize"] = False
    return arguments


def vllm_pooling_params(params: PoolingParams, own_task: str, token_types: Any) -> dict[str, Any]:
    """Return arguments of vLLM's ``PoolingParams``.

    Args:
        own_task: task of a request that names none.
        token_types: which tokens are those of the second text of a pair, in the form of vLLM's
            ``compress_token_type_ids``; None if the prompt is no pair, or the model does not distinguish the texts.
    """
    arguments = {name: getattr(params, name) for name in POOLING_FIELDS_AS_THEY_ARE}
    arguments["task"] = params.task or own_task
    if token_types is not None:
        arguments["extra_kwargs"] = {"compressed_token_type_ids": token_types}
    return arguments


def grammar_of(structured_outputs: StructuredOutputsParams) -> dict[str, Any]:
    """Return arguments of vLLM's ``StructuredOutputsParams``."""
    return {
        name: getattr(structured_outputs, name)
        for name in GRAMMAR_FIELDS
        if getattr(structured_outputs, name) not in (None, False)
    }


def cache_salt_of(message: EngineCoreRequest) -> str:
    """Return the salt that two requests must have in common, besides their tokens, to share blocks of the KV cache."""
    return msgspec.json.encode([message.tenant, message.cache_salt]).decode()


def finish_reason_of(reason: Any) -> FinishReason | None:
    """Convert a finish reason. vLLM's five reasons have the same names as ours."""
    return None if reason is None else FinishReason(str(reason))


def logprobs_of(lists: Any, num_top: int) -> list[TokenLogprobs]:
    """Return for each position the log probabilities of its token and of the most probable ones.

    Args:
        lists: ``LogprobsLists`` or ``LogprobsTensors``: ids and log probabilities ``[N, 1 + K]``, the token in column
            0; ranks ``[N]``. ``K`` is the largest number that any request of the batch has requested.
        num_top: number that this request has requested.
    """
    if lists is None:
        return []
    ids, logprobs, ranks = (array.tolist() for array in lists[:3])
    return [
        TokenLogprobs(row[0], values[0], rank, list(zip(row[1 : 1 + num_top], values[1 : 1 + num_top], strict=True)))
        for row, values, rank in zip(ids, logprobs, ranks, strict=True)
    ]


def pooled_of(tensor: Any) -> Pooled:
    """Return the result of a pooled prompt, a ``torch.Tensor`` of shape ``[D]`` or ``[T, D]``."""
    array = tensor.float().cpu().numpy().astype("<f4", copy=False)
    return Pooled(data=array.tobytes(), shape=array.shape)


def events_of(events: Any) -> list[EngineCoreEvent]:
    """Convert events. Both use the monotonic clock of the host."""
    return [EngineCoreEvent(EngineCoreEventType(int(event.type)), event.timestamp) for event in events or ()]


def step_stats_of(details: Any, step_time_s: float) -> StepStats | None:
    """Return the statistics of a step; None without ``details``. vLLM times the step as a whole.

    Args:
        details: ``SchedulerIterationDetails``.
        step_time_s: duration of the step, measured around the call.
    """
    if details is None:
        return None
    execute_time_s = min(details.elapsed_ms / 1000, step_time_s)
    return StepStats(
        num_reqs=details.num_ctx_requests + details.num_generation_requests,
        num_prefill_reqs=details.num_ctx_requests,
        num_prefill_tokens=details.num_ctx_tokens,
        num_decode_tokens=details.num_generation_tokens,
        execute_time_s=execute_time_s,
        update_time_s=step_time_s - execute_time_s,
    )
