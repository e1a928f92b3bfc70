"""Tries of LangChain's package for Anthropic; the name of one is the argument. Fails by an exception."""
# pyright: reportMissingImports=false
# The package is installed in the environment of its program only.

import os
import sys
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage

ai: Any = ChatAnthropic(
    model=os.environ["MODEL"], base_url=os.environ["ROOT_URL"], api_key="any", max_tokens=200, max_retries=0
)
QUESTION = "How much is four plus two?"


def get_weather(city: str) -> str:
    """Current weather."""
    return f"sunny in {city}"


def whole_message() -> None:
    answer = ai.invoke(QUESTION)
    assert answer.text.startswith("Four plus two"), answer
    assert answer.usage_metadata["total_tokens"] > 0


def stream_message() -> None:
    text = "".join(chunk.text for chunk in ai.stream(QUESTION))
    assert text.startswith("Four plus two"), text


def use_tools() -> None:
    with_tools = ai.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage("Weather in Bonn?")]
    answer = with_tools.invoke(messages)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Bonn"})
    messages += [answer, ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])]
    last = with_tools.invoke(messages)
    assert last.text.startswith("The work is done"), last


globals()[sys.argv[1]]()
