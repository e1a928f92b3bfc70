"""llama-server's own endpoint: ``POST /completion`` with token ids.

A stream omits tokens that end within a character, but counts them: ``tokens_predicted`` grows by more than the number
of tokens sent. A response without streaming has all tokens.
"""

from __future__ import annotations

import json
from typing import Any

from ....shared.messages.outcome import FinishReason, TokenLogprobs
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.sampling import SamplingParams, derived_seed
from ....shared.params.structured import StructuredOutputsParams
from .dialect import Chunk, ServerCall, ServerFacts, check_request, refuse_grammar_fields

NAME = "llama-server"
# Fields that have the same names in llama-server's requests.
FIELDS_AS_THEY_ARE = ("presence_penalty", "frequency_penalty", "temperature", "top_p", "min_p", "ignore_eos")
FIELDS_CHANGED = (
    "repetition_penalty",
    "top_k",
    "seed",
    "max_tokens",
    "logprobs",
    "structured_outputs",
    "logit_bias",
    "stop_token_ids",  # the core ends the request
)
SERVED_FIELDS = frozenset({*FIELDS_AS_THEY_ARE, *FIELDS_CHANGED})
# Not "disable_any_whitespace" and "disable_additional_properties", which the gateway sets for every JSON answer:
# whitespace is limited for all requests, and the server allows only the listed properties unless the schema says
# otherwise.
GRAMMAR_FIELDS_REFUSED = ("regex", "structural_tag", "whitespace_pattern")
# A server that was built with LLGuidance allows whitespace without end, and generates without any grammar if a schema
# has a keyword that it does not enforce, unless the schema says this. Other servers ignore it.
_FOR_LLGUIDANCE = {"x-guidance": {"whitespace_flexible": False, "lenient": True}}
# A seed has 32 bits, and all ones mean "at random".
_SEED_MASK = 0x7FFFFFFF
# Error codes that mean an invalid request, in streams and responses.
_CALLERS_MISTAKES = (400, 413, 422)
_ENDINGS = {"eos": FinishReason.STOP, "word": FinishReason.STOP, "limit": FinishReason.LENGTH}


class LlamaDialect:
    """Dialect of llama-server.

    Args:
        max_model_len: number of tokens of a slot; penalties consider this many tokens.
    """

    name = NAME
    generate_path = "/completion"
    health_path = "/health"

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len

    def check(self, message: EngineCoreRequest, params: SamplingParams) -> None:
        """Implement ``Dialect``."""
        check_request(NAME, message, params, SERVED_FIELDS)
        refuse_grammar_fields(NAME, params, GRAMMAR_FIELDS_REFUSED)

    def body(self, call: ServerCall) -> dict[str, Any]:
        """Implement ``Dialect``. Sets every field that the server's command line may have set for all requests."""
        params = call.params
        body: dict[str, Any] = {name: getattr(params, name) for name in FIELDS_AS_THEY_ARE}
        body |= {
            "prompt": call.prompt_token_ids,
            "n_predict": call.max_new_tokens,
            "stream": call.is_streamed,
            "return_tokens": True,
            "return_progress": call.is_streamed,
            "cache_prompt": True,
            "top_k": max(0, params.top_k),
            "typical_p": 1.0,
            "repeat_penalty": params.repetition_penalty,
            "repeat_last_n": self._max_model_len,
            "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
            "seed": derived_seed(call.seed, call.num_output_tokens) & _SEED_MASK,
        }
        if params.logprobs is not None:
            body["n_probs"] = max(1, params.logprobs)
        if params.logit_bias:
            body["logit_bias"] = [[token_id, bias] for token_id, bias in params.logit_bias.items()]
        if params.structured_outputs is not None:
            body |= _grammar(params.structured_outputs)
        return body

    def decode(self, answer: dict[str, Any], call: ServerCall, num_received: int) -> Chunk:
        """Implement ``Dialect``."""
        if "error" in answer:
            return _error(answer["error"])
        if "prompt_progress" in answer:
            return Chunk(num_generated=num_received, num_cached_tokens=int(answer["prompt_progress"]["cache"]))
        chunk = Chunk(token_ids=list(answer["tokens"]), num_generated=int(answer["tokens_predicted"]))
        if call.params.logprobs is not None:
            positions = answer.get("completion_probabilities", [])
            chunk.logprobs = [_logprobs(item, call.params.logprobs) for item in positions[: len(chunk.token_ids)]]
        if answer["stop"]:
            chunk.ending = _ENDINGS.get(answer.get("stop_type", ""), FinishReason.LENGTH)
        return chunk


def facts_of(props: dict[str, Any], models: dict[str, Any]) -> ServerFacts:
    """Return the facts in the responses of ``GET /props`` and ``GET /v1/models``.

    Raises:
        KeyError, TypeError, ValueError, IndexError: the responses are not llama-server's.
    """
    num_slots, num_tokens = int(props["total_slots"]), int(props["default_generation_settings"]["n_ctx"])
    vocab_size = ((models.get("data") or [{}])[0].get("meta") or {}).get("n_vocab")
    return ServerFacts(
        version=str(props.get("build_info", "")),
        num_slots=num_slots,
        max_model_len=num_tokens,
        kv_cache_size_tokens=num_slots * num_tokens,
        block_size=1,
        vocab_size=None if vocab_size is None else int(vocab_size),
        model=str(props.get("model_path", "")),
    )


def _grammar(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.grammar is not None:
        return {"grammar": params.grammar}
    if params.choice is not None:
        return {"grammar": "root ::= " + " | ".join(_literal(choice) for choice in params.choice)}
    if params.json is not None:
        schema = json.loads(params.json) if isinstance(params.json, str) else params.json
        # An empty schema stays: with an unknown key alone, the server would refuse it.
        return {"json_schema": {**_FOR_LLGUIDANCE, **schema} if schema else schema}
    return {"json_schema": {"type": "object", **_FOR_LLGUIDANCE}}


def _literal(text: str) -> str:
    """Return ``text`` as a string literal of its grammars, which use C's escapes."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(character, character) for character in text) + '"'


def _error(error: Any) -> Chunk:
    words = error.get("message", "") if isinstance(error, dict) else error
    words = str(words) or "it gave no reason"
    if isinstance(error, dict) and error.get("code") in _CALLERS_MISTAKES:
        return Chunk(refusal=words)
    return Chunk(failure=words)


def _logprobs(position: dict[str, Any], num_top: int) -> TokenLogprobs:
    """Return the log probabilities of a position. A token that is not among the top ones gets the next rank."""
    token_id = int(position["id"])
    top = [(int(item["id"]), float(item["logprob"])) for item in position["top_logprobs"]]
    ranks = [rank for rank, (other, _) in enumerate(top, start=1) if other == token_id]
    return TokenLogprobs(token_id, float(position["logprob"]), ranks[0] if ranks else len(top) + 1, top[:num_top])
