"""I/O processors of an operator's own, which requests choose by name.

A processor is a class that ``penstock gateway --io-processor my_module:Products`` names, or an app by
``Client.connect(url, io_processors=["my_module:Products"])``::

    from penstock.producer.io_processors import IOProcessor

    class Products(IOProcessor):
        name = "products"

        def pre_process(self, prompt, request_id=None):
            return [product["title"] for product in prompt["products"]]

        def post_process(self, model_output, request_id=None):
            return [output.outputs.vector for output in model_output]

Its methods are those of vLLM's ``IOProcessor``. It works on this side of the queue: engines get prompts as of any other
request, so no code and no objects of it travel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from ...shared.params.pooling import PoolingParams
from ..results.pooling import PoolingRequestOutput


class IOProcessor(ABC):
    """Turns a request's data into prompts, and what they are pooled to into its answer.

    It is made once in each process that names it, without arguments, and serves all requests. Each method but
    ``output_to_response`` and ``merge_pooling_params`` may be ``async def``. One that is not runs in a thread beside
    the event loop, possibly in several at a time: what it changes of itself it has to guard.

    Attributes:
        name: by which requests choose it.

    Raises: each method whatever it likes, which ends its request alone. A ``ValueError`` of ``parse_request`` or
    ``pre_process`` says that the data is wrong, which its caller is told in these words. Anything else is a failure of
    the processor.
    """

    name: ClassVar[str]

    def parse_request(self, data: Any) -> Any:
        """Return what ``pre_process`` is given of ``data``: over HTTP plain data, from Python whatever was passed."""
        return data

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams | None:
        """Return the parameters of all prompts, given those of the request."""
        return params

    @abstractmethod
    def pre_process(self, prompt: Any, request_id: str | None = None) -> Any:
        """Return one prompt, or a sequence of them, as ``Client.encode`` takes them.

        A call that is made again with the same ``request_id`` attaches to the requests of the first, by their number.
        So the same data should give the same prompts.
        """

    @abstractmethod
    def post_process(self, model_output: Sequence[PoolingRequestOutput], request_id: str | None = None) -> Any:
        """Return the answer, given the output of each prompt in order."""

    def output_to_response(self, output: Any) -> Any:
        """Return what an answer is over HTTP: plain data, or a struct or dataclass of it."""
        return output
