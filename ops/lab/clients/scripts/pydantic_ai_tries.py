"""Tries of Pydantic AI; the name of one is the argument. Fails by an exception."""
# pyright: reportMissingImports=false
# The package is installed in the environment of its program only.

import asyncio
import os
import sys
from typing import Any

from embedding_check import TEXTS, check_embeddings
from pydantic import BaseModel
from pydantic_ai import Agent, Embedder, NativeOutput
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

MODEL = os.environ["MODEL"]
QUESTION = "How much is four plus two?"
openai: Any = OpenAIProvider(base_url=os.environ["BASE_URL"], api_key="any")
anthropic: Any = AnthropicProvider(base_url=os.environ["ROOT_URL"], api_key="any")
chat_model = OpenAIChatModel(MODEL, provider=openai)


class City(BaseModel):
    city: str


def get_weather(city: str) -> str:
    """Current weather."""
    return f"sunny in {city}"


def _use_tools(model: Any) -> None:
    answer = Agent(model, tools=[get_weather]).run_sync("Weather in Bonn?")
    assert answer.output.startswith("The work is done"), answer
    assert "sunny in Bonn" in str(answer.all_messages())


def chat() -> None:
    answer = Agent(chat_model).run_sync(QUESTION)
    assert answer.output.startswith("Four plus two"), answer


async def _stream() -> str:
    async with Agent(chat_model).run_stream(QUESTION) as answer:
        return "".join([delta async for delta in answer.stream_text(delta=True)])


def stream() -> None:
    text = asyncio.run(_stream())
    assert text.startswith("Four plus two"), text


def tools() -> None:
    _use_tools(chat_model)


def structured() -> None:
    answer = Agent(chat_model, output_type=NativeOutput(City)).run_sync("Which city? Answer as JSON")
    assert answer.output == City(city="Bonn"), answer


def structured_by_tool() -> None:
    answer = Agent(chat_model, output_type=City).run_sync("Which city?")
    assert answer.output == City(city="Bonn"), answer


def responses() -> None:
    _use_tools(OpenAIResponsesModel(MODEL, provider=openai))


def messages() -> None:
    _use_tools(AnthropicModel(MODEL, provider=anthropic))


def embeddings() -> None:
    ai = Embedder(OpenAIEmbeddingModel(os.environ["EMBEDDER"], provider=openai))
    (query,) = ai.embed_query_sync(TEXTS[0]).embeddings
    check_embeddings(query, ai.embed_documents_sync(TEXTS).embeddings)


globals()[sys.argv[1].replace(" ", "_")]()
