"""llama-server's own endpoint: ``POST /completion`` with token ids.

While it streams it leaves out tokens that end within a character, and counts them: ``tokens_predicted`` rises by more
than the tokens that come. What is not streamed has all of them.
"""

from __future__ import annotations

import json
from typing import Any

from ....shared.messages.outcome import FinishReason, TokenLogprobs
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.sampling import SamplingParams
from ....shared.params.seeds import derived_seed
from ....shared.params.structured import StructuredOutputsParams
from .dialect import Asked, Chunk, ServerFacts, check_request, refuse_grammar_fields

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
GRAMMAR_FIELDS_REFUSED = (
    "regex",
    "structural_tag",
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
)
# It has 32 bits, of which all ones mean "at random".
_SEED_MASK = 0x7FFFFFFF
# Of errors in a stream and of whole answers: what is wrong is the request.
_CALLERS_MISTAKES = (400, 413, 422)
_ENDINGS = {"eos": FinishReason.STOP, "word": FinishReason.STOP, "limit": FinishReason.LENGTH}


class LlamaDialect:
    """As ``Dialect``.

    Args:
        max_model_len: of a slot; penalties look back so far.
    """

    name = NAME
    generate_path = "/completion"
    health_path = "/health"

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len

    def check(self, message: EngineCoreRequest, params: SamplingParams) -> None:
        """As ``Dialect``."""
        check_request(NAME, message, params, SERVED_FIELDS)
        refuse_grammar_fields(NAME, params, GRAMMAR_FIELDS_REFUSED)

    def body(self, asked: Asked) -> dict[str, Any]:
        """As ``Dialect``. Whatever its command line has set for all requests, this one says."""
        params = asked.params
        body: dict[str, Any] = {name: getattr(params, name) for name in FIELDS_AS_THEY_ARE}
        body |= {
            "prompt": asked.prompt_token_ids,
            "n_predict": asked.max_new_tokens,
            "stream": asked.is_streamed,
            "return_tokens": True,
            "return_progress": asked.is_streamed,
            "cache_prompt": True,
            "top_k": max(0, params.top_k),
            "typical_p": 1.0,
            "repeat_penalty": params.repetition_penalty,
            "repeat_last_n": self._max_model_len,
            "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
            "seed": derived_seed(asked.seed, asked.num_output_tokens) & _SEED_MASK,
        }
        if params.logprobs is not None:
            body["n_probs"] = max(1, params.logprobs)
        if params.logit_bias:
            body["logit_bias"] = [[token_id, bias] for token_id, bias in params.logit_bias.items()]
        if params.structured_outputs is not None:
            body |= _grammar(params.structured_outputs)
        return body

    def read(self, answer: dict[str, Any], asked: Asked, num_seen: int) -> Chunk:
        """As ``Dialect``."""
        if "error" in answer:
            return _error(answer["error"])
        if "prompt_progress" in answer:
            return Chunk(num_generated=num_seen, num_cached_tokens=int(answer["prompt_progress"]["cache"]))
        chunk = Chunk(token_ids=list(answer["tokens"]), num_generated=int(answer["tokens_predicted"]))
        if asked.params.logprobs is not None:
            told = answer.get("completion_probabilities", [])
            chunk.logprobs = [_logprobs(one, asked.params.logprobs) for one in told[: len(chunk.token_ids)]]
        if answer["stop"]:
            chunk.ending = _ENDINGS.get(answer.get("stop_type", ""), FinishReason.LENGTH)
        return chunk


def facts_of(props: dict[str, Any], models: dict[str, Any]) -> ServerFacts:
    """What ``GET /props`` and ``GET /v1/models`` say.

    Raises:
        KeyError, TypeError, ValueError, IndexError: they are not llama-server's.
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


def _grammar(wanted: StructuredOutputsParams) -> dict[str, Any]:
    if wanted.grammar is not None:
        return {"grammar": wanted.grammar}
    if wanted.choice is not None:
        return {"grammar": "root ::= " + " | ".join(_literal(choice) for choice in wanted.choice)}
    if wanted.json is not None:
        return {"json_schema": json.loads(wanted.json) if isinstance(wanted.json, str) else wanted.json}
    return {"json_schema": {"type": "object"}}


def _literal(text: str) -> str:
    """A string of its grammars, which have C's escapes."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(character, character) for character in text) + '"'


def _error(error: Any) -> Chunk:
    words = error.get("message", "") if isinstance(error, dict) else error
    words = str(words) or "it gave no reason"
    if isinstance(error, dict) and error.get("code") in _CALLERS_MISTAKES:
        return Chunk(refusal=words)
    return Chunk(failure=words)


def _logprobs(told: dict[str, Any], num_top: int) -> TokenLogprobs:
    """Its rank is known if it is among those that are told; else it is the first that is not."""
    token_id, top = int(told["id"]), [(int(one["id"]), float(one["logprob"])) for one in told["top_logprobs"]]
    places = [place for place, (other, _) in enumerate(top, start=1) if other == token_id]
    return TokenLogprobs(token_id, float(told["logprob"]), places[0] if places else len(top) + 1, top[:num_top])
