"""Misspelt names of arguments, and `LLM` where a `Client` belongs: what the caller reads."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.producer import (
    LLM,
    BeamSearchParams,
    Client,
    LoRARequest,
    PoolingParams,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from penstock.producer.client import ClientOptions
from penstock.shared.errors import PenstockError, UnknownArgumentError
from penstock.shared.queue.policy import TenantPolicy

from .harness import DEADLINE_S


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (
            SamplingParams,
            {"temprature": 0.3},
            "unknown argument temprature of SamplingParams; did you mean temperature?",
        ),
        (SamplingParams, {"best": 1}, "unknown argument best of SamplingParams; it has allowed_token_ids, bad_words, "),
        (RepetitionDetectionParams, {"min_cuont": 3}, "did you mean min_count?"),
        (StructuredOutputsParams, {"jsn": {}}, "did you mean json?"),
        (PoolingParams, {"dimension": 3}, "did you mean dimensions?"),
        (BeamSearchParams, {"beam_widht": 3}, "did you mean beam_width?"),
        (LoRARequest, {"lora_pth": "b"}, "did you mean lora_path?"),
        (TenantPolicy, {"wieght": 3}, "did you mean weight?"),
        (Client.connect, {"ur": "redis://localhost"}, "unknown argument ur of Client.connect; did you mean url?"),
        (Client.connect, {"url": "redis://localhost", "modle": "m"}, "did you mean model?"),
        (LLM, {"url": "redis://localhost", "namespase": "n"}, "unknown argument namespase of LLM; did you mean name"),
    ],
)
def test_a_misspelt_argument_is_named_with_the_nearest_one(
    function: Callable[..., object], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(TypeError) as caught:
        function(**arguments)
    assert isinstance(caught.value, UnknownArgumentError)
    assert isinstance(caught.value, PenstockError)
    assert message in str(caught.value)


@pytest.mark.parametrize("call", ["generate", "submit"])
async def test_a_misspelt_option_of_a_request_is_named(client: Client, call: str) -> None:
    with pytest.raises(UnknownArgumentError, match=r"unknown argument tenat of a request; did you mean tenant\?"):
        await getattr(client, call)("hi", tenat="acme")
    with pytest.raises(UnknownArgumentError, match=r"did you mean timeout_s\?"):
        await anext(client.stream("hi", timeout=3.0))  # type: ignore[arg-type]


def test_a_wrong_number_of_arguments_stays_pythons_error() -> None:
    with pytest.raises(TypeError, match="positional") as caught:
        SamplingParams(1)  # type: ignore[call-arg]
    assert not isinstance(caught.value, PenstockError)


def test_editors_see_the_options_of_connect() -> None:
    """``ClientOptions`` has the keyword arguments of ``Client``, with their types."""
    options = {name: hint.__forward_arg__ for name, hint in ClientOptions.__annotations__.items()}
    hints = Client.__init__.__annotations__.items()
    assert options == {name: hint for name, hint in hints if name not in ("url", "return")}


SCRIPT = """
import asyncio, sys
from penstock.producer import LLM

async def main():
    llm = LLM(sys.argv[1])
    llm.models()
    await asyncio.to_thread(llm.models)
    await asyncio.to_thread(llm.close)

asyncio.run(main())
LLM(sys.argv[1]).models()
"""


def test_a_blocking_call_in_an_event_loop_says_what_to_use(redis_url: str, tmp_path: Path) -> None:
    """With the line of the caller, and only there: not in another thread, nor without a loop."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), redis_url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    warned = re.findall(r"script\.py:(\d+): RuntimeWarning: LLM blocks the event loop", result.stderr)
    assert warned == ["6", "7"]
    assert "use `async with Client.connect(url) as client` in coroutines" in result.stderr
