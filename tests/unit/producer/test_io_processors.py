"""I/O processors: found by name, called in order, and to blame for their own errors, in one request."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from penstock.producer import Client, DataPrompt, IOProcessor, PoolingParams
from penstock.producer.gateway.app import build_app
from penstock.producer.gateway.settings import GatewaySettings
from penstock.producer.io_processors import IOProcessors
from penstock.producer.openai.errors import OpenAIError, error_of
from penstock.producer.openai.pooling import PoolBody
from penstock.shared import errors

from ... import io_processors
from ...io_processors import Broken, Nearest
from ...processes import DEADLINE_S

HERE = io_processors.__name__


def test_processors_are_named_or_passed_and_looked_up_by_name() -> None:
    processors = IOProcessors([f"{HERE}:Nearest", Broken()])
    assert (processors.find("nearest").name, processors.find("broken").name) == ("nearest", "broken")
    assert IOProcessors([Broken()]).find(None).name == "broken"
    with pytest.raises(
        errors.UnsupportedParameterError, match=r"io_processor 'other' is unknown; available: nearest, broken"
    ):
        processors.find("other")
    with pytest.raises(errors.ValidationError, match="io_processor must name one of nearest, broken"):
        processors.find(None)
    with pytest.raises(errors.UnsupportedParameterError, match=r"data needs an I/O processor.*--io-processor NAME"):
        IOProcessors().find(None)


class Nameless(Nearest):
    name = ""


class Unmade(Nearest):
    def __init__(self) -> None:
        raise OSError("no table here")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (["nowhere"], "--io-processor 'nowhere' is no entry point of the group penstock.io_processors"),
        ([f"{HERE}:Gone"], "cannot be imported: AttributeError"),
        (["math:pi"], "--io-processor math:pi is 3.14.*; name a class"),
        (["collections:Counter"], "is not an IOProcessor of penstock.producer.io_processors"),
        ([f"{__name__}:Unmade"], "cannot be created: OSError: no table here"),
        ([Nameless()], "has no name; give its class"),
        ([Nearest(), f"{HERE}:Nearest"], "two I/O processors are called 'nearest'"),
        ("nearest", r"io_processors must be a list of names, got 'nearest'; pass \['nearest'\]"),
    ],
)
def test_one_that_cannot_be_had_is_an_error_of_the_start(processor: Any, message: str) -> None:
    for start in (IOProcessors, lambda named: Client.connect("redis://localhost", io_processors=named)):
        with pytest.raises(errors.ConfigurationError, match=message):
            start(processor)


def test_a_gateway_reports_wrong_processors_before_it_serves() -> None:
    with pytest.raises(errors.ConfigurationError, match="--io-processor 'nowhere' is no entry point"):
        build_app(GatewaySettings(redis_url="redis://localhost", io_processors=("nowhere",)))


async def test_a_waiting_processor_does_not_block_others() -> None:
    inside, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    class Slow(Nearest):
        def parse_request(self, data: Any) -> tuple[str, list[str]]:
            loop.call_soon_threadsafe(inside.set)
            assert go.wait(DEADLINE_S)
            return super().parse_request(data)

    making = asyncio.ensure_future(IOProcessors([Slow()]).find(None).prompts({"thing": "4", "names": ["a"]}, "id"))
    await inside.wait()
    go.set()
    assert await making == ["4", "a"]


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ({"how": "parse:value"}, errors.ValidationError, "data was refused by I/O processor 'broken': as it was told"),
        ({"how": "pre:value"}, errors.ValidationError, "data was refused by I/O processor 'broken': as it was told"),
        ({"how": "parse:key"}, errors.RequestFailedError, "raised KeyError in parse_request: 'as it was told'"),
        ({"how": "parse:stop"}, errors.RequestFailedError, "raised StopIteration in parse_request"),
        ({"how": "pre:key"}, errors.RequestFailedError, "raised KeyError in pre_process"),
        ({"how": "pre:returns", "what": []}, errors.RequestFailedError, "returned no prompt from pre_process"),
        ({"how": "pre:returns", "what": None}, errors.RequestFailedError, "returned None from pre_process"),
        ({"how": "pre:returns", "what": 5}, errors.RequestFailedError, "returned 5 from pre_process"),
    ],
)
async def test_an_error_with_data_is_the_requests_error(how: Any, kind: Any, message: str) -> None:
    broken = IOProcessors([Broken()]).find(None)
    with pytest.raises(kind, match=message) as caught:
        await broken.prompts(how, "id")
    status, code = (400, None) if kind is errors.ValidationError else (500, "request_failed")
    detail = error_of(caught.value)
    assert (detail.status, detail.error_code) == (status, code)
    assert detail.param == ("data" if status == 400 else None)
    assert await broken.prompts({"how": ""}, "id") == ["four"]


async def test_an_error_with_results_is_the_processors_failure() -> None:
    broken = IOProcessors([Broken()]).find(None)
    for how in ("value", "key"):
        await broken.prompts({"how": f"post:{how}"}, "id")
        with pytest.raises(errors.RequestFailedError, match=r"raised .*Error in post_process") as caught:
            await broken.answer([], "id")
        assert caught.value.code == "io_processor_failed"
        with pytest.raises(errors.RequestFailedError, match=r"raised .*Error in output_to_response"):
            broken.response({"how": f"response:{how}"})
    for what in (object(), {"a": "\ud800"}):
        with pytest.raises(errors.RequestFailedError, match="returned an answer that cannot be encoded as JSON"):
            broken.response({"how": "response:returns", "what": what})


def test_parameters_are_its_to_choose() -> None:
    nearest = IOProcessors([Nearest()]).find(None)
    assert nearest.params(PoolingParams(dimensions=8)) == PoolingParams(task="embed", dimensions=8)

    class Wrong(Nearest):
        def merge_pooling_params(self, params: PoolingParams | None = None) -> Any:
            return {"task": "embed"}

    with pytest.raises(errors.RequestFailedError, match="from merge_pooling_params, which is not a PoolingParams"):
        IOProcessors([Wrong()]).find(None).params(None)


def test_a_body_has_input_or_data() -> None:
    assert PoolBody(input="a").data_prompt() is None
    assert PoolBody(data=None).data_prompt() == DataPrompt(None)
    assert PoolBody(data=[1], io_processor="x", task="plugin").data_prompt() == DataPrompt([1], "x")
    assert (PoolBody(data=1, task="plugin").model_task, PoolBody(data=1, task="embed").model_task) == (None, "embed")
    for body, param in (
        (PoolBody(), "input"),
        (PoolBody(input="a", data=1), "input"),
        (PoolBody(input="a", io_processor="x"), "io_processor"),
        (PoolBody(data=1, encoding_format="base64"), "encoding_format"),
    ):
        with pytest.raises(OpenAIError) as caught:
            body.data_prompt()
        assert caught.value.param == param


def test_the_interface_asks_for_two_methods() -> None:
    class Half(IOProcessor):
        name = "half"

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]
