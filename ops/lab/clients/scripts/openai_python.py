"""Tries of OpenAI's package; the name of one is the argument. Fails by an exception."""

import json
import os
import sys
from typing import Any

from embedding_check import TEXTS, check_embeddings
from openai import OpenAI
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
ai = OpenAI(base_url=os.environ["BASE_URL"], api_key="any", max_retries=0)
QUESTION = "How much is four plus two?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Current weather", "parameters": PARAMETERS}


class City(BaseModel):
    city: str


def chat() -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    answer: Any = ai.chat.completions.create(model=MODEL, messages=messages)
    assert answer.choices[0].message.content.startswith("Four plus two"), answer


def chat_stream() -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    options: Any = {"include_usage": True}
    chunks: list[Any] = list(
        ai.chat.completions.create(model=MODEL, messages=messages, stream=True, stream_options=options)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.startswith("Four plus two"), text
    assert chunks[-1].usage.completion_tokens > 0


def chat_tools() -> None:
    messages: Any = [{"role": "user", "content": "Weather in Bonn?"}]
    tools: Any = [{"type": "function", "function": FUNCTION}]
    message: Any = ai.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Bonn"}
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}]
    answer: Any = ai.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message
    assert answer.content.startswith("The work is done"), answer


def chat_structured() -> None:
    messages: Any = [{"role": "user", "content": "Which city? Answer as JSON"}]
    answer: Any = ai.chat.completions.parse(model=MODEL, messages=messages, response_format=City)
    assert answer.choices[0].message.parsed == City(city="Bonn"), answer


def responses() -> None:
    first: Any = ai.responses.create(model=MODEL, input=QUESTION)
    assert first.output_text.startswith("Four plus two"), first
    with ai.responses.stream(model=MODEL, input="And now?", previous_response_id=first.id) as stream:
        assert [event.type for event in stream][-1] == "response.completed"


def responses_tools() -> None:
    items: Any = [{"role": "user", "content": "Weather in Bonn?"}]
    tools: Any = [{"type": "function", "strict": False, **FUNCTION}, {"type": "web_search"}]
    first: Any = ai.responses.create(model=MODEL, input=items, tools=tools)
    call = next(item for item in first.output if item.type == "function_call")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second: Any = ai.responses.create(model=MODEL, input=[*items, *first.output, output], tools=tools)
    assert second.output_text.startswith("The work is done"), second


def embeddings() -> None:
    # The package asks for base64 by itself, and decodes it.
    answer = ai.embeddings.create(model=os.environ["EMBEDDER"], input=[TEXTS[0], *TEXTS])
    query, *documents = (item.embedding for item in answer.data)
    check_embeddings(query, documents)


def idempotency() -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    headers = {"Idempotency-Key": os.urandom(8).hex()}
    answers = [ai.chat.completions.create(model=MODEL, messages=messages, extra_headers=headers) for _ in range(2)]
    assert answers[0] == answers[1], answers


globals()[sys.argv[1].replace(" ", "_")]()
