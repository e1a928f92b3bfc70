"""A distribution with plug-ins, installed in a folder of its own, through the whole stack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams
from penstock.producer.openai.endpoints import RESPONSES, decode
from penstock.producer.openai.errors import OpenAIError
from penstock.producer.openai.parsers import ModelParsers, ParserChoice
from penstock.producer.openai.responses.objects import Response
from penstock.producer.openai.responses.service import Responses
from penstock.shared import errors
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys

from .. import orders, processors

POINTS = """\
[penstock.logits_processors]
banning = my_processors:Ban

[penstock.executors]
numbered = my_executor:NumberedRank

[penstock.ordering_policies]
shortest = my_orders:ShortestFirst
"""
EXECUTOR = """\
from penstock.worker.engine.ranks.one import OneRank


class NumberedRank(OneRank):
    def run_method(self, call, run, changes_model):
        return [0, run()]
"""
COUNT = "count from four to nine:"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    site = tmp_path_factory.mktemp("site")
    (site / "my_processors.py").write_text(Path(processors.__file__).read_text())
    (site / "my_orders.py").write_text(Path(orders.__file__).read_text())
    (site / "my_executor.py").write_text(EXECUTOR)
    installed = site / "my_processors-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-processors\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(POINTS)
    options = ["--device", "cpu", "--served-model-name", "demo", "--threads", "1"]
    options += ["--scheduling-policy", "shortest", "--executor", "numbered"]
    options += ["--logits-processors", "banning", "--logits-processors", "my_processors:Broken"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        with LocalStack(MODEL, options) as stack:
            yield stack


async def test_requests_choose_processors_by_name(stack: LocalStack) -> None:
    async with Client.connect(stack.url) as client:
        assert (await client.get_model_config()).logits_processors == ("ban", "broken")
        assert [engine.setup.scheduling_policy for engine in await client.engines() if engine.setup] == ["shortest"]
        plain = await client.generate(COUNT, SamplingParams(temperature=0, max_tokens=16))
        banned = plain.outputs[0].token_ids[:3]
        choice = processors.wanting(ban={"token_ids": banned})
        output = await client.generate(COUNT, SamplingParams(temperature=0, max_tokens=16, extra_args=choice))
        assert not set(output.outputs[0].token_ids) & set(banned)
        with pytest.raises(errors.UnsupportedParameterError, match="those there are: ban, broken"):
            await client.submit(COUNT, SamplingParams(extra_args=processors.wanting(other={})))
        with pytest.raises(errors.ValidationError, match="ValueError: token_ids must be a list"):
            await client.generate(COUNT, SamplingParams(extra_args=processors.wanting(ban={})))
        broken = SamplingParams(extra_args=processors.wanting(broken={"how": "raises"}))
        with pytest.raises(errors.RequestFailedError, match="logits processor 'broken' raised KeyError"):
            await client.generate(COUNT, broken)
        again = await client.generate(COUNT, SamplingParams(temperature=0, max_tokens=16))
        assert again.outputs[0].token_ids == plain.outputs[0].token_ids


async def test_the_model_is_computed_by_an_executor_of_its_name(stack: LocalStack) -> None:
    async with Client.connect(stack.url) as client:
        (answer,) = (await client.collective_rpc("device_info")).values()
        assert (answer[0], answer[1]["device"]) == (0, "cpu")


async def test_a_response_chooses_them_by_the_field_of_vllm(stack: LocalStack) -> None:
    async with Client.connect(stack.url) as client:
        commands = CommandConnection(stack.url)
        responses = Responses(client, commands, Keys(), ModelParsers(client, ParserChoice()), result_ttl_s=60)

        async def answered(**fields: Any) -> str:
            body = {"model": "demo", "input": COUNT, "temperature": 0, "max_output_tokens": 8, **fields}
            return text_of(await responses.answer(await responses.prepare("default", decode(RESPONSES, body).body)))

        plain = await answered()
        banned = (await client.tokenize(plain)).token_ids
        choice = processors.wanting(ban={"token_ids": banned})
        assert plain != await answered(vllm_xargs=choice)
        assert plain == await answered()
        with pytest.raises(OpenAIError, match="no processor 'other'; those there are: ban, broken") as caught:
            await answered(vllm_xargs=processors.wanting(other={}))
        assert (caught.value.status, caught.value.param) == (400, "vllm_xargs.logits_processors")
        await commands.close()


def text_of(response: Response) -> str:
    return "".join(part["text"] for item in msgspec.to_builtins(response.output) for part in item["content"])
