"""Examples that are no part of one page's story run as they stand, against the demo model under the names they use."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams
from penstock.worker.engine.rpc import RpcEngine, RpcMethods

from ..conftest import Embeddings

pytestmark = pytest.mark.xdist_group("deployment")

ROOT = Path(__file__).parents[3]
# The other pages of the guide are run as a whole.
BY_BLOCK = (ROOT / "ops/guide/howto/requests.md",)
PAGES = (*BY_BLOCK, ROOT / "ops/guide/serving/controlling.md")
BLOCKS = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


def block(marker: str, url: str) -> str:
    """The one block that holds ``marker``, with this deployment's address and model in place of the example's."""
    (source_block,) = [source for source in BLOCKS if marker in source]
    return source_block.replace("redis://localhost:6379", url).replace("my-model", "demo")


async def run_with_client(source: str, url: str, returns: str = "None") -> Any:
    """Run an example whose client is called ``client``; returns the value of one of its names."""
    lines = "\n".join(f"    {line}" for line in source.splitlines())
    names: dict[str, Any] = {"SamplingParams": SamplingParams}
    exec(f"async def example(client):\n{lines}\n    return {returns}", names)
    async with Client.connect(url, model="demo") as client:
        return await names["example"](client)


async def test_the_client_examples(deployment: LocalStack) -> None:
    source = block("handle = await client.submit", deployment.url)
    output = await run_with_client(source, deployment.url, "output")
    assert output.text == " six."


async def test_the_structured_example(deployment: LocalStack) -> None:
    source = block("StructuredOutputsParams(json", deployment.url)
    answer = await run_with_client(source, deployment.url, "answer")
    assert sorted(answer) == ["city", "hot"]


async def test_the_control_examples(deployment: LocalStack) -> None:
    async with Client.connect(deployment.url, model="demo") as client:
        (engine_id,) = await client.is_sleeping()
        source = block("await client.sleep(level=2)", deployment.url)
        lines = "\n".join(f"    {line}" for line in source.splitlines())
        names: dict[str, Any] = {"SamplingParams": SamplingParams}
        exec(f"async def example(client):\n{lines}\n    return traces, memory", names)
        traces, memory = await names["example"](client)
        assert await client.is_sleeping() == {engine_id: False}
    assert Path(traces[engine_id]).stat().st_size > 0
    assert memory[engine_id]["kv_cache_bytes"] > 0


def test_the_rpc_method() -> None:
    names: dict[str, Any] = {"__name__": "my_methods"}
    exec(block("@rpc_method", ""), names)
    module = ModuleType("my_methods")
    vars(module).update(names)
    linear = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    engine = SimpleNamespace(model=SimpleNamespace(network=linear))
    assert RpcMethods([module]).run(cast(RpcEngine, engine), "count_layers", ["Linear"], {}) == 2


async def test_the_conversation(deployment: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
    source = block("client.converse(", deployment.url)
    await run_with_client(source, deployment.url)
    assert capsys.readouterr().out == " four. four hundred seven."


async def test_the_embeddings_example(
    deployment: LocalStack, embeddings: Embeddings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "prompt.npy", embeddings("four plus two is"))
    monkeypatch.chdir(tmp_path)
    source = block("np.load(", deployment.url)
    output = await run_with_client(source, deployment.url, "output")
    assert output.text == " six."


def test_the_script(
    deployment: LocalStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", deployment.url)
    exec(block("llm.generate([", deployment.url), {})
    assert capsys.readouterr().out == " six.\n four hundred seven.\n"
