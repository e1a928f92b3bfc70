"""Tries of Anthropic's package; the name of one is the argument. Fails by an exception."""

import os
import sys
from typing import Any

from anthropic import Anthropic

MODEL = os.environ["MODEL"]
ai: Any = Anthropic(base_url=os.environ["ROOT_URL"], api_key="any", max_retries=0)
BODY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "How much is four plus two?"}],
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"name": "get_weather", "description": "Current weather", "input_schema": SCHEMA}]


def whole_message() -> None:
    answer = ai.messages.create(**BODY)
    assert answer.content[0].text.startswith("Four plus two"), answer
    assert answer.stop_reason == "end_turn"


def stream_message() -> None:
    with ai.messages.stream(**BODY) as events:
        text = "".join(events.text_stream)
        whole = events.get_final_message()
    assert text == whole.content[0].text
    assert text.startswith("Four plus two"), text
    assert whole.usage.input_tokens > 0
    assert whole.usage.output_tokens > 0


def use_tools() -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather in Bonn?"}]
    for is_streamed in (False, True):
        body = BODY | {"messages": messages, "tools": TOOLS}
        if is_streamed:
            with ai.messages.stream(**body) as events:
                answer = events.get_final_message()
        else:
            answer = ai.messages.create(**body)
        _, call = answer.content
        assert (call.name, call.input, answer.stop_reason) == ("get_weather", {"city": "Bonn"}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        turns = [*messages, answer.to_param(), {"role": "user", "content": [result]}]
        last = ai.messages.create(**body | {"messages": turns})
        assert last.content[0].text.startswith("The work is done"), last


def send_thinking() -> None:
    thought = {"type": "thinking", "thinking": "Six.", "signature": ""}
    turn = {"role": "assistant", "content": [thought, {"type": "text", "text": "Six."}]}
    messages = [*BODY["messages"], turn, {"role": "user", "content": "Sure?"}]
    answer = ai.messages.create(**BODY | {"messages": messages, "thinking": {"type": "adaptive"}})
    assert answer.content[0].text.startswith("Four plus two"), answer


def fill_schema() -> None:
    messages = [{"role": "user", "content": "Which city? Answer as JSON"}]
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = ai.messages.create(**BODY | {"messages": messages, "output_config": output})
    assert answer.content[0].text == '{"city": "Bonn"}', answer


def count_prompt() -> None:
    counted = ai.messages.count_tokens(model=MODEL, messages=BODY["messages"])
    usage = ai.messages.create(**BODY).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert MODEL in [model.id for model in ai.models.list()]


globals()[sys.argv[1]]()
