"""Values of fields that are not supported here, with which a field says the same as without it.

SDKs, proxies and interfaces fill in what the reference calls a default. Such a field asks for nothing, so it is passed
over; with any other value it is refused by name. Null is the default of every field.
Sources: OpenAI's API reference; vLLM's ``ChatCompletionRequest``, ``CompletionRequest`` and ``ResponsesRequest``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Neutral = Mapping[str, tuple[Any, ...]]

_OF_VLLM: Neutral = {
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
OF_CHAT: Neutral = {
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "verbosity": ("medium",),
    "echo": (False,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "documents": ([],),
    **_OF_VLLM,
}
OF_COMPLETIONS: Neutral = {
    "response_format": ({"type": "text"},),
    **_OF_VLLM,
}
OF_RESPONSES: Neutral = {
    "enable_response_messages": (False,),
    **_OF_VLLM,
}


def without_neutral(body: Mapping[str, Any], supported: frozenset[str], neutral: Neutral) -> dict[str, Any]:
    """Return ``body`` without the fields that are not ``supported`` and ask for nothing."""
    return {
        name: value
        for name, value in body.items()
        if name in supported or not (value is None or any(_is_same(value, one) for one in neutral.get(name, ())))
    }


def _is_same(value: Any, neutral: Any) -> bool:
    """Whether they are equal as JSON, where true is no 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
