"""Tries of LangChain's package for OpenAI; the name of one is the argument. Fails by an exception."""
# pyright: reportMissingImports=false
# The package is installed in the environment of its program only.

import os
import sys
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

OPTIONS: Any = {"base_url": os.environ["BASE_URL"], "api_key": "any", "max_retries": 0}
ai: Any = ChatOpenAI(model=os.environ["MODEL"], stream_usage=True, **OPTIONS)
QUESTION = "How much is four plus two?"


class City(BaseModel):
    """A city."""

    city: str


def get_weather(city: str) -> str:
    """Current weather."""
    return f"sunny in {city}"


def chat() -> None:
    answer = ai.invoke(QUESTION)
    assert answer.text.startswith("Four plus two"), answer
    assert answer.usage_metadata["total_tokens"] > 0


def stream() -> None:
    chunks = list(ai.stream(QUESTION))
    text = "".join(chunk.text for chunk in chunks)
    assert text.startswith("Four plus two"), text
    assert any(chunk.usage_metadata for chunk in chunks)


def tools() -> None:
    with_tools = ai.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage("Weather in Bonn?")]
    answer = with_tools.invoke(messages)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Bonn"})
    messages += [answer, ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])]
    last = with_tools.invoke(messages)
    assert last.text.startswith("The work is done"), last


def structured() -> None:
    city = ai.with_structured_output(City).invoke("Which city? Answer as JSON")
    assert city == City(city="Bonn"), city


def structured_by_tool() -> None:
    city = ai.with_structured_output(City, method="function_calling").invoke("Which city?")
    assert city == City(city="Bonn"), city


def responses() -> None:
    global ai
    ai = ChatOpenAI(model=os.environ["MODEL"], use_responses_api=True, **OPTIONS)
    assert ai.invoke(QUESTION).text.startswith("Four plus two")
    tools()


def embeddings() -> None:
    # The default sends tokens of OpenAI's tokenizer.
    ai: Any = OpenAIEmbeddings(model=os.environ["EMBEDDER"], check_embedding_ctx_length=False, **OPTIONS)
    first, second = ai.embed_documents(["A cat sits on the mat.", "Shares fell by two percent."])
    query = ai.embed_query("A cat sits on the mat.")
    same, other = (sum(a * b for a, b in zip(query, vector, strict=True)) for vector in (first, second))
    assert other < 0.99 < same < 1.01, (same, other)


globals()[sys.argv[1].replace(" ", "_")]()
