"""Values of unsupported fields that are equivalent to omitting the field.

SDKs, proxies and user interfaces send the defaults of the reference. Such a field is ignored; with any other value it
is refused by name. Null is the default of every field.
Sources: OpenAI's API reference; vLLM's ``ChatCompletionRequest``, ``CompletionRequest`` and ``ResponsesRequest``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Neutral = Mapping[str, tuple[Any, ...]]

_NEUTRAL_IN_VLLM: Neutral = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "detokenize": (True,),
    "logits_processors": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": ({},),
    "mm_processor_kwargs": ({},),
    "vllm_xargs": ({},),
}
NEUTRAL_IN_CHAT: Neutral = {
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "verbosity": ("medium",),
    "echo": (False,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "documents": ([],),
    **_NEUTRAL_IN_VLLM,
}
NEUTRAL_IN_COMPLETIONS: Neutral = {
    "response_format": ({"type": "text"},),
    **_NEUTRAL_IN_VLLM,
}
NEUTRAL_IN_RESPONSES: Neutral = {
    "enable_response_messages": (False,),
    **_NEUTRAL_IN_VLLM,
}


def without_neutral(body: Mapping[str, Any], supported: frozenset[str], neutral: Neutral) -> dict[str, Any]:
    """Return ``body`` without the fields that are not ``supported`` and have a neutral value."""
    return {
        name: value
        for name, value in body.items()
        if name in supported
        or not (value is None or any(_is_same(value, default) for default in neutral.get(name, ())))
    }


def _is_same(value: Any, neutral: Any) -> bool:
    """Return whether two JSON values are equal; true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
