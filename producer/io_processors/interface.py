"""Interface of an operator's I/O processors, which requests select by name.

A processor is a class, passed as ``penstock gateway --io-processor my_module:Products`` or by an app as
``Client.connect(url, io_processors=["my_module:Products"])``::

    from penstock.producer.io_processors import IOProcessor

    class Products(IOProcessor):
        name = "products"

        def pre_process(self, prompt, request_id=None):
            return [product["title"] for product in prompt["products"]]

        def post_process(self, model_output, request_id=None):
            return [output.outputs.vector for output in model_output]

The methods are those of vLLM's ``IOProcessor``. It runs on the client's side of the queue: engines get ordinary
prompts, and neither its code nor its objects are sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from ...shared.params.pooling import PoolingParams
from ..results.pooling import PoolingRequestOutput


class IOProcessor(ABC):
    """Converts a request's data to prompts, and their pooled outputs to the answer.

    Each process that names it creates one instance, without arguments, for all requests. Every method but
    ``output_to_response`` and ``merge_pooling_params`` may be ``async def``. Other methods run in threads, possibly
    concurrently, so they must guard state that they change.

    Attributes:
        name: the name by which requests select it.

    Raises: any exception, which ends only its request. A ``ValueError`` of ``parse_request`` or ``pre_process`` means
    invalid data, and its message is returned to the caller. Any other exception is a failure of the processor.
    """

    name: ClassVar[str]

    def parse_request(self, data: Any) -> Any:
        """Return the argument of ``pre_process`` for ``data``: plain data over HTTP, any object from Python."""
        return data

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams | None:
        """Return the parameters of all prompts, given those of the request."""
        return params

    @abstractmethod
    def pre_process(self, prompt: Any, request_id: str | None = None) -> Any:
        """Return one prompt, or a sequence of prompts, as ``Client.encode`` accepts them.

        A repeated call with the same ``request_id`` attaches to the requests of the first call by number, so the same
        data should give the same prompts.
        """

    @abstractmethod
    def post_process(self, model_output: Sequence[PoolingRequestOutput], request_id: str | None = None) -> Any:
        """Return the answer, given the output of each prompt in order."""

    def output_to_response(self, output: Any) -> Any:
        """Return an answer in its form for HTTP: plain data, or a struct or dataclass of it."""
        return output
