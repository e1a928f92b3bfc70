"""Tries of LlamaIndex's packages for servers like OpenAI's; the name of one is the argument. Fails by an exception."""
# pyright: reportMissingImports=false
# The package is installed in the environment of its program only.

import os
import sys
from typing import Any

from embedding_check import TEXTS, check_embeddings
from llama_index.core import PromptTemplate
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

QUESTION = "How much is four plus two?"
OPTIONS: Any = {"api_base": os.environ["BASE_URL"], "api_key": "any", "max_retries": 0}


class City(BaseModel):
    """A city."""

    city: str


def get_weather(city: str) -> str:
    """Current weather."""
    return f"sunny in {city}"


def _llm(**options: Any) -> Any:
    return OpenAILike(model=os.environ["MODEL"], is_chat_model=True, context_window=32_768, **OPTIONS, **options)


def chat() -> None:
    llm = _llm()
    assert llm.complete(QUESTION).text.startswith("Four plus two")
    answer = llm.chat([ChatMessage(role="user", content=QUESTION)])
    assert answer.message.content.startswith("Four plus two"), answer


def stream() -> None:
    deltas = _llm().stream_chat([ChatMessage(role="user", content=QUESTION)])
    text = "".join(part.delta for part in deltas)
    assert text.startswith("Four plus two"), text


def tools() -> None:
    llm = _llm(is_function_calling_model=True)
    offered = [FunctionTool.from_defaults(get_weather)]
    messages = [ChatMessage(role="user", content="Weather in Bonn?")]
    for is_streamed in (False, True):
        if is_streamed:
            *_, answer = llm.stream_chat_with_tools(offered, chat_history=messages)
        else:
            answer = llm.chat_with_tools(offered, chat_history=messages)
        (call,) = llm.get_tool_calls_from_response(answer)
        assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Bonn"})
        result = ChatMessage(
            role="tool", content=get_weather(**call.tool_kwargs), additional_kwargs={"tool_call_id": call.tool_id}
        )
        last = llm.chat_with_tools(offered, chat_history=[*messages, answer.message, result])
        assert last.message.content.startswith("The work is done"), last


def structured() -> None:
    llm = _llm(should_use_structured_outputs=True)
    city = llm.structured_predict(City, PromptTemplate("Which city? Answer as JSON"))
    assert city == City(city="Bonn"), city


def structured_by_tool() -> None:
    llm = _llm(is_function_calling_model=True)
    city = llm.structured_predict(City, PromptTemplate("Which city?"))
    assert city == City(city="Bonn"), city


def embeddings() -> None:
    ai: Any = OpenAILikeEmbedding(model_name=os.environ["EMBEDDER"], **OPTIONS)
    check_embeddings(ai.get_query_embedding(TEXTS[0]), ai.get_text_embedding_batch(TEXTS))


globals()[sys.argv[1].replace(" ", "_")]()
