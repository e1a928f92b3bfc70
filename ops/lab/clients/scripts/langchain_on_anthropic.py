"""Tries of LangChain's package for Anthropic; the name of one is the argument. Fails by an exception."""
# pyright: reportMissingImports=false
# The package is installed in the environment of its program only.

import os
import sys
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_common import chat, stream, tools

ai: Any = ChatAnthropic(
    model=os.environ["MODEL"], base_url=os.environ["ROOT_URL"], api_key="any", max_tokens=200, max_retries=0
)
{"message": chat, "stream": stream, "tools": tools}[sys.argv[1]](ai)
