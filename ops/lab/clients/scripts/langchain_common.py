"""Tries that are the same with each of LangChain's packages; the argument is the model."""
# pyright: reportMissingImports=false
# The package is installed in the environments of the programs only.

from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage

QUESTION = "How much is four plus two?"


def get_weather(city: str) -> str:
    """Current weather."""
    return f"sunny in {city}"


def chat(ai: Any) -> None:
    answer = ai.invoke(QUESTION)
    assert answer.text.startswith("Four plus two"), answer
    assert answer.usage_metadata["total_tokens"] > 0


def stream(ai: Any) -> list[Any]:
    """Return the chunks."""
    chunks = list(ai.stream(QUESTION))
    text = "".join(chunk.text for chunk in chunks)
    assert text.startswith("Four plus two"), text
    return chunks


def tools(ai: Any) -> None:
    with_tools = ai.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage("Weather in Bonn?")]
    answer = with_tools.invoke(messages)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Bonn"})
    messages += [answer, ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])]
    last = with_tools.invoke(messages)
    assert last.text.startswith("The work is done"), last
