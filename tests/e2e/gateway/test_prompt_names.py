"""An error names the wrong prompt of several in a completion by its place, on every way that the body comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client

from ...processes import DEADLINE_S
from ..batch_rows import COMPLETIONS, answers_of_batch

pytestmark = pytest.mark.xdist_group("deployment")

LONG = "four " * 3000
WRONG: dict[str, tuple[Any, str]] = {
    "an empty text": (["a", ""], "prompt[1]"),
    "a long text, of which its engine tells": (["a", LONG], "prompt[1]"),
    "the only text of a list": ([LONG], "prompt[0]"),
    "a text": (LONG, "prompt"),
    "a token": ([[5, 6], [5, 99999]], "prompt[1][1]"),
    "a token of the only list": ([[5, 99999]], "prompt[0][1]"),
    "a token of a prompt": ([5, 99999], "prompt[1]"),
}


@pytest.mark.parametrize(("prompt", "param"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("stream", [False, True], ids=["answer", "stream"])
def test_the_wrong_one_is_named(gateway: LocalGateway, prompt: Any, param: str, stream: bool) -> None:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 3, "stream": stream}
    answer = httpx.post(gateway.root_url + COMPLETIONS, json=body, timeout=DEADLINE_S)
    # A stream that the first prompt has begun ends with an engine's error about the second.
    error = answer.text.rpartition("data: {")[2].partition("\n")[0] if answer.is_success else answer.text[1:]
    assert answer.is_success <= stream
    assert json.loads("{" + error)["error"]["param"] == param


async def test_rows_of_batches_accept_the_names_too(client: Client, deployment: LocalStack, tmp_path: Path) -> None:
    bodies = {name: {"model": "demo", "prompt": WRONG[name][0], "max_tokens": 3} for name in list(WRONG)[:2]}
    answers = await answers_of_batch(client, deployment.url, tmp_path, COMPLETIONS, bodies)
    assert {row["body"]["error"]["param"] for row in answers.values()} == {"prompt[1]"}
