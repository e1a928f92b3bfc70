"""I/O processors as an operator may write them, for the tests; some of them are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import Any

from penstock.producer import IOProcessor, PoolingParams, PoolingRequestOutput


class Nearest(IOProcessor):
    """I/O processor that returns the name nearest to a thing: ``{"thing": ..., "names": [...]}``."""

    name = "nearest"

    def parse_request(self, data: Any) -> tuple[str, list[str]]:
        if not isinstance(data, dict) or not data.get("names"):
            raise ValueError("it must be an object with thing and names")
        return data["thing"], data["names"]

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams | None:
        return PoolingParams(task="embed", dimensions=None if params is None else params.dimensions)

    def pre_process(self, prompt: tuple[str, list[str]], request_id: str | None = None) -> list[str]:
        thing, names = prompt
        return [thing, *names]

    async def post_process(
        self, model_output: Sequence[PoolingRequestOutput], request_id: str | None = None
    ) -> dict[str, Any]:
        first, *others = model_output
        near = [sum(map(mul, first.outputs.vector, other.outputs.vector)) for other in others]
        best = max(range(len(near)), key=near.__getitem__)
        return {"name": others[best].prompt, "near": near, "of": request_id}

    def output_to_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return {"name": output["name"]}


class Broken(IOProcessor):
    """I/O processor that fails as its data says, at any method: ``{"how": "method:fault"}``."""

    name = "broken"

    def _do(self, method: str, data: Any) -> Any:
        where, _, how = data["how"].partition(":")
        if where != method:
            return data
        if how == "returns":
            return data["what"]
        raise {"key": KeyError, "stop": StopIteration, "value": ValueError}[how]("as it was told")

    def parse_request(self, data: Any) -> Any:
        return self._do("parse", data)

    async def pre_process(self, prompt: Any, request_id: str | None = None) -> Any:
        self._told = prompt
        return "four" if (prompts := self._do("pre", prompt)) is prompt else prompts

    def post_process(self, model_output: Sequence[PoolingRequestOutput], request_id: str | None = None) -> Any:
        return self._do("post", self._told)

    def output_to_response(self, output: Any) -> Any:
        return self._do("response", output)
