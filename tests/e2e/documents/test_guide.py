"""The Python examples of the guide run as they stand, with the demo model; ``# => value`` behind a line is checked."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import openai
import pytest

import penstock.ops.dashboard
import penstock.producer.batches  # noqa: F401  # as the one above it reads files, which a page must not do in its loop
from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams

from .test_readme import BY_BLOCK

pytestmark = pytest.mark.xdist_group("deployment")

GUIDE = Path(__file__).parents[3] / "ops" / "guide"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
CLAIM = re.compile(r"^(?P<indent> *)(?P<expression>.*\S) +# => (?P<value>.*)$")


def checked(line: str) -> str:
    """Return the line, or an assertion if it states the value of its expression."""
    claim = CLAIM.match(line)
    if claim is None:
        return line
    ast.parse(claim["expression"], mode="eval")
    return f"{claim['indent']}assert ({claim['expression']}) == ({claim['value']}), {line.strip()!r}"


def source_of(page: Path) -> str:
    """All blocks of a page as the body of one coroutine."""
    lines = [checked(line) for block in BLOCK.findall(page.read_text()) for line in block.splitlines()]
    return "async def page(client):\n" + "\n".join(f"    {line}" for line in lines)


# Pages on other packages, which test_frameworks.py runs as scripts.
PACKAGES = {"langchain": "langchain_openai", "llamaindex": "llama_index"}
OTHERS = {*BY_BLOCK, *(GUIDE / "howto" / f"{page}.md" for page in PACKAGES)}
PAGES = sorted({page for page in GUIDE.rglob("*.md") if BLOCK.search(page.read_text())} - OTHERS)


@pytest.fixture(scope="module")
def gateway_url(gateway: LocalGateway) -> str:
    """URL of the shared gateway; the `openai` package has done a call, since it reads files at its first."""
    with openai.OpenAI(base_url=gateway.base_url, api_key="any") as sdk:
        sdk.models.list()
    return gateway.base_url


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
async def test_the_examples_of_a_page_give_the_stated_results(
    page: Path, deployment: LocalStack, gateway_url: str, tmp_path: Path, demo_model: Path
) -> None:
    source = source_of(page)
    names: dict[str, Any] = {"SamplingParams": SamplingParams, "folder": tmp_path}
    names |= {"url": deployment.url, "gateway_url": gateway_url}
    exec(compile(source, str(page), "exec"), names)
    async with Client.connect(deployment.url, model="demo") as client:
        try:
            await names["page"](client)
        finally:
            # The deployment is other tests' as well.
            if "reload_weights" in source:
                await client.reload_weights(str(demo_model))


def test_a_false_claim_of_a_page_is_detected() -> None:
    assert checked("x = 1  # a word") == "x = 1  # a word"
    with pytest.raises(AssertionError):
        exec(checked("1 + 1  # => 3"))
