"""Tries of LiteLLM; the name of one is the argument. Fails by an exception."""
# pyright: reportMissingImports=false
# The package is installed in the environment of its program only.

import json
import os
import sys
from typing import Any

import litellm
from embedding_check import TEXTS, check_embeddings
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
OPTIONS: Any = {"api_base": os.environ["BASE_URL"], "api_key": "any", "num_retries": 0}
QUESTION: Any = [{"role": "user", "content": "How much is four plus two?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Current weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]


class City(BaseModel):
    city: str


def _complete(messages: Any, provider: str = "openai", **options: Any) -> Any:
    return litellm.completion(model=f"{provider}/{MODEL}", messages=messages, **OPTIONS, **options)


def chat() -> None:
    answer = _complete(QUESTION)
    assert answer.choices[0].message.content.startswith("Four plus two"), answer
    assert answer.usage.total_tokens > 0


def stream() -> None:
    chunks = list(_complete(QUESTION, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.startswith("Four plus two"), text
    assert chunks[-1].usage.completion_tokens > 0


def tools() -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather in Bonn?"}]
    for is_streamed in (False, True):
        answer = _complete(messages, tools=TOOLS, stream=is_streamed)
        if is_streamed:
            answer = litellm.stream_chunk_builder(list(answer))
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Bonn"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        last = _complete([*messages, message, result], tools=TOOLS)
        assert last.choices[0].message.content.startswith("The work is done"), last


def structured() -> None:
    answer = _complete([{"role": "user", "content": "Which city? Answer as JSON"}], response_format=City)
    assert City.model_validate_json(answer.choices[0].message.content) == City(city="Bonn"), answer


def hosted_vllm() -> None:
    answer = _complete(QUESTION, "hosted_vllm", reasoning_effort="low")
    assert answer.choices[0].message.content.startswith("Four plus two"), answer


def responses() -> None:
    answer: Any = litellm.responses(model=f"openai/{MODEL}", input=QUESTION[0]["content"], **OPTIONS)
    assert answer.output[-1].content[0].text.startswith("Four plus two"), answer


def messages() -> None:
    options = OPTIONS | {"api_base": os.environ["ROOT_URL"]}
    answer: Any = litellm.completion(model=f"anthropic/{MODEL}", messages=QUESTION, **options)
    assert answer.choices[0].message.content.startswith("Four plus two"), answer


def embeddings() -> None:
    texts = [TEXTS[0], *TEXTS]
    answer: Any = litellm.embedding(model=f"openai/{os.environ['EMBEDDER']}", input=texts, **OPTIONS)
    query, *documents = (item["embedding"] for item in answer.data)
    check_embeddings(query, documents)


globals()[sys.argv[1]]()
