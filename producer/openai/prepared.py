"""What a body has become: what to ask of the client, and how to tell the answer."""

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
from ..results.outputs import RequestOutput
from .errors import bad_field

# No body has such a field: over HTTP an adapter is named as a model.
_OF_ALL = {"lora_request": "model"}


class ChunkMaker(Protocol):
    """Turns the deltas of one stream into chunks, at most one each; what it holds back comes with a later delta."""

    def feed(self, delta: Delta, prompt: int = 0) -> msgspec.Struct | None:
        """Return the chunk for a delta of prompt number ``prompt``, or None if it tells nothing yet.

        Raises:
            OpenAIError: the request ended without an answer.
        """
        ...

    def end(self) -> msgspec.Struct | None:
        """Return the chunk with the usage, if the caller asked for it."""
        ...


class PreparedBody(msgspec.Struct, kw_only=True, frozen=True):
    """A checked body: what every endpoint of a model has.

    Args:
        id_prefix: begins the response's id (``common.new_id``).
        prompts: each is a request of its own.
        params, options: of each request; everything but the tenant and the request id.
        fields: the body's names for fields of ``params`` that it does not have itself.
    """

    id_prefix: str
    prompts: Sequence[Prompt]
    params: SamplingParams | PoolingParams
    options: RequestOptions
    fields: Mapping[str, str] = {}

    @property
    def model(self) -> str | None:
        """The model that the body names, or the adapter; answers call it by that name."""
        return self.options.get("model")

    @property
    def num_answers(self) -> int:
        """To each prompt."""
        return 1

    @contextmanager
    def naming_fields(self) -> Generator[None]:
        """What an engine refuses within this block is raised with the body's name for the field.

        Raises:
            ValidationError: as raised within; its message begins with the name.
        """
        try:
            yield
        except ValidationError as error:
            message = str(error)
            for name, field in {**_OF_ALL, **self.fields}.items():
                # Whole words: `prompt_name` is no prompt.
                if re.match(rf"{re.escape(name)}\b", message):
                    raise type(error)(field + message[len(name) :]) from error
            raise

    def answer(self, *outputs: RequestOutput, response_id: str | None = None) -> msgspec.Struct:
        """Return the body of the response, given one output for each prompt; its id is the first output's unless given.

        Raises:
            OpenAIError: a request ended without an answer.
        """
        raise NotImplementedError


class Prepared(PreparedBody, kw_only=True, frozen=True):
    """A checked body of an endpoint that generates. There are several prompts only for a completion with a list."""

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
        """Return what makes the chunks of one stream."""
        raise NotImplementedError
