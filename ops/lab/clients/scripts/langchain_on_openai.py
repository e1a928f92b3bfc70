"""Tries of LangChain's package for OpenAI; the name of one is the argument. Fails by an exception."""
# pyright: reportMissingImports=false
# The package is installed in the environment of its program only.

import os
import sys
from typing import Any

import langchain_common
from embedding_check import TEXTS, check_embeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

OPTIONS: Any = {"base_url": os.environ["BASE_URL"], "api_key": "any", "max_retries": 0}
ai: Any = ChatOpenAI(model=os.environ["MODEL"], stream_usage=True, **OPTIONS)


class City(BaseModel):
    """A city."""

    city: str


def chat() -> None:
    langchain_common.chat(ai)


def stream() -> None:
    assert any(chunk.usage_metadata for chunk in langchain_common.stream(ai))


def tools() -> None:
    langchain_common.tools(ai)


def structured() -> None:
    city = ai.with_structured_output(City).invoke("Which city? Answer as JSON")
    assert city == City(city="Bonn"), city


def structured_by_tool() -> None:
    city = ai.with_structured_output(City, method="function_calling").invoke("Which city?")
    assert city == City(city="Bonn"), city


def responses() -> None:
    global ai
    ai = ChatOpenAI(model=os.environ["MODEL"], use_responses_api=True, **OPTIONS)
    assert ai.invoke(langchain_common.QUESTION).text.startswith("Four plus two")
    tools()


def embeddings() -> None:
    # The default sends tokens of OpenAI's tokenizer.
    ai: Any = OpenAIEmbeddings(model=os.environ["EMBEDDER"], check_embedding_ctx_length=False, **OPTIONS)
    check_embeddings(ai.embed_query(TEXTS[0]), ai.embed_documents(TEXTS))


globals()[sys.argv[1].replace(" ", "_")]()
