"""Tries of instructor's modes; the name of one is the argument. Fails by an exception."""
# pyright: reportMissingImports=false
# The package is installed in the environment of its program only.

import os
import sys
from typing import Any

import instructor
from openai import OpenAI
from pydantic import BaseModel

MODES = {
    "tools": instructor.Mode.TOOLS,
    "tools stream": instructor.Mode.TOOLS,
    "json": instructor.Mode.JSON,
    "json schema": instructor.Mode.JSON_SCHEMA,
    "markdown json": instructor.Mode.MD_JSON,
}


class City(BaseModel):
    city: str


def main(name: str) -> None:
    openai = OpenAI(base_url=os.environ["BASE_URL"], api_key="any", max_retries=0)
    ai: Any = instructor.from_openai(openai, mode=MODES[name])
    prompt = "Which city?" if name.startswith("tools") else "Which city? Answer as JSON"
    body: Any = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": prompt}], "max_retries": 1}
    if name.endswith("stream"):
        *_, city = ai.create_partial(response_model=City, **body)
        assert city.city == "Bonn", city
    else:
        city = ai.create(response_model=City, **body)
        # Some modes return an instance of a subclass.
        assert city.model_dump() == {"city": "Bonn"}, city


main(sys.argv[1])
