"""A checked body as requests of the client, and how their outputs become the response."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec

from ...shared.errors import ValidationError
from ...shared.messages.deltas import Delta
from ...shared.params.pooling import PoolingParams
from ...shared.params.sampling import SamplingParams
from ..inputs.options import RequestOptions
from ..inputs.prompt import Prompt
from ..results import RequestOutput
from .errors import bad_field

# Bodies have no such field: over HTTP an adapter is named as a model.
_COMMON_FIELDS = {"lora_request": "model"}


class ChunkMaker(Protocol):
    """Turns the deltas of one stream into chunks, at most one per delta. Text held back is part of a later chunk."""

    def feed(self, delta: Delta, prompt: int = 0) -> msgspec.Struct | None:
        """Return the chunk for a delta of prompt number ``prompt``, or None if it adds nothing yet.

        Raises:
            OpenAIError: the request ended without an answer.
        """
        ...

    def end(self) -> msgspec.Struct | None:
        """Return the chunk with the usage, if the caller requested it."""
        ...


class PreparedBody(msgspec.Struct, kw_only=True, frozen=True):
    """A checked body: the common parts of all endpoints of a model.

    Args:
        id_prefix: prefix of the response id; see ``new_id``.
        prompts: each becomes a separate request.
        params, options: of each request; everything but tenant and request id.
        fields: names in the body of those fields of ``params`` that have another name there.
    """

    id_prefix: str
    prompts: Sequence[Prompt]
    params: SamplingParams | PoolingParams
    options: RequestOptions
    fields: Mapping[str, str] = {}

    @property
    def model(self) -> str | None:
        """The model or adapter that the body names; the response repeats the name."""
        return self.options.get("model")

    @property
    def num_answers(self) -> int:
        """Number of answers per prompt."""
        return 1

    @contextmanager
    def naming_fields(self) -> Generator[None]:
        """Raise an engine's refusal within this block with the body's name for the field.

        Raises:
            ValidationError: as raised within; its message begins with the name.
        """
        try:
            yield
        except ValidationError as error:
            message = str(error)
            for name, field in {**_COMMON_FIELDS, **self.fields}.items():
                # Whole words only: `prompt_name` is not `prompt`.
                if re.match(rf"{re.escape(name)}\b", message):
                    raise type(error)(field + message[len(name) :]) from error
            raise

    def answer(self, *outputs: RequestOutput, response_id: str | None = None) -> msgspec.Struct:
        """Return the response to one output per prompt. Its id is that of the first output unless passed.

        Raises:
            OpenAIError: a request ended without an answer.
        """
        raise NotImplementedError


class Prepared(PreparedBody, kw_only=True, frozen=True):
    """A checked body of an endpoint that generates text. It has several prompts only for a completion with a list."""

    params: SamplingParams
    stream: bool

    @property
    def num_answers(self) -> int:
        return self.params.n

    @property
    def prompt(self) -> Prompt:
        """The only prompt.

        Raises:
            OpenAIError: 400, there are several.
        """
        if len(self.prompts) != 1:
            raise bad_field("prompt", f"prompt must be a single one here, got {len(self.prompts)}")
        return self.prompts[0]

    def events(self, response_id: str, model: str) -> ChunkMaker:
        """Return the chunk maker of one stream."""
        raise NotImplementedError
