"""POST /pooling: the body, and its two responses: for pooled prompts, and for data that an I/O processor reads."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..results.pooling import DataPrompt
from .errors import bad_field
from .pooling import Input, Listed, PoolingBody, PoolingUsage


class PoolBody(PoolingBody, kw_only=True, forbid_unknown_fields=True):
    """The request of /pooling: any task; the model's default task if omitted.

    With ``data`` instead of ``input``, an I/O processor creates the prompts and the response. ``task`` may then be
    "plugin", as in vLLM, which is the same as omitting it.
    """

    input: Input | None = None
    task: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    data: Any = msgspec.UNSET
    io_processor: str | None = None

    def data_prompt(self) -> DataPrompt | None:
        """Return the data; None for a body with ``input``.

        Raises:
            OpenAIError: 400, it has neither or both, or a field that belongs to the other one.
        """
        has_data = self.data is not msgspec.UNSET
        if has_data == (self.input is not None):
            raise bad_field("input", "exactly one of input and data must be given")
        if not has_data and self.io_processor is not None:
            raise bad_field("io_processor", "io_processor needs data; pass what it reads as data, not as input")
        if has_data and self.encoding_format is not None:
            raise bad_field("encoding_format", "encoding_format must be left out with data: the I/O processor answers")
        return DataPrompt(self.data, self.io_processor) if has_data else None

    @property
    def model_task(self) -> str | None:
        """The task requested from the model."""
        return None if self.task == "plugin" and self.input is None else self.task


class PoolingData(msgspec.Struct):
    """A result: a vector, one vector per token, or the bytes of either in base64."""

    index: int
    data: list[float | list[float]] | str
    object: str = "pooling"


class PoolingResponse(Listed[PoolingData], kw_only=True):
    """The response of /pooling."""


class ProcessedResponse(msgspec.Struct, kw_only=True):
    """The response of /pooling to ``data``, as in vLLM; ``data`` is the I/O processor's answer."""

    request_id: str
    created_at: int
    data: Any
    model: str
    usage: PoolingUsage
