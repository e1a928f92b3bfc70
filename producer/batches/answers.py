"""Run one row, and return the line of its answer."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from ...shared.errors import (
    BrokerError,
    ClientClosedError,
    PenstockError,
    RedisUnavailableError,
    RefusedForNowError,
    RequestConflictError,
    RequestNotFoundError,
)
from ...shared.messages.outcome import FinishReason
from ...shared.process.log import get_logger
from ..anthropic.errors import error_body
from ..client import Client
from ..inputs.prompt import Prompt
from ..inputs.prompt_lists import naming, numbered
from ..openai.answers.common import new_id
from ..openai.endpoints import prepare
from ..openai.errors import OpenAIError, error_of
from ..openai.parsers import Parsers
from ..openai.prepared import PreparedBody
from ..results import RequestOutput
from .batch_records import BatchSpec
from .input_rows import InputRow
from .journal import JournalRow

# The queue may have capacity sooner than estimated, if other callers give up.
MAX_REFUSED_PAUSE_S = 30.0
# A result expires before it is read only if this process was stopped for that long.
MAX_ATTEMPTS = 5
# Errors that are not the row's: the run ends and is resumed later.
_RUN_ERRORS = (RedisUnavailableError, ClientClosedError, BrokerError)

log = get_logger(__name__)

UNFINISHED = {
    "batch_expired": "the row had not ended when the completion window of the batch closed",
    "batch_cancelled": "the row had not ended when the batch was cancelled",
}
_encoder = msgspec.json.Encoder()
T = TypeVar("T")


class RowResponse(msgspec.Struct, kw_only=True):
    """The endpoint's response, as over HTTP."""

    status_code: int
    request_id: str
    body: object


class RowError(msgspec.Struct, kw_only=True):
    """Why the endpoint was not called, or its answer not awaited."""

    code: str
    message: str


class RowAnswer(msgspec.Struct, kw_only=True):
    """A line of the output or error file."""

    id: str
    custom_id: str
    response: RowResponse | None
    error: RowError | None


class Rows:
    """Runs rows of one batch. Each row's request has a fixed id, so submitting it again attaches to it.

    Args:
        band: the queue's band for the rows.
        parsers: parsers of tool calls and reasoning in the model's answers.
    """

    def __init__(self, client: Client, spec: BatchSpec, band: str, parsers: Parsers) -> None:
        self._client = client
        self._spec = spec
        self._band = band
        self._parsers = parsers
        self._id = spec.id.removeprefix("batch_")

    async def answer(self, number: int, row: InputRow) -> JournalRow | None:
        """Submit a row and wait for its end; None if it expired with the batch. An error of the row is an answer.

        Raises:
            RedisUnavailableError, ClientClosedError, BrokerError: the state of the row is unknown.
        """
        try:
            prepared = prepare(self._spec.endpoint, bytes(row.body), self._parsers)
            outputs = await self._outputs(number, prepared)
            if "timeout_s" not in prepared.options and any(map(_expired, outputs)):
                return None
            body = prepared.answer(*outputs, response_id=new_id(prepared.id_prefix))
        except _RUN_ERRORS:
            raise
        except PenstockError as error:
            return self._failed(number, row, error_of(error))
        except Exception as error:
            log.exception("batch_row_failed", batch=self._spec.id, row=number)
            return self._failed(number, row, error_of(error))
        usages = [output.usage for output in outputs if output.usage is not None]
        return JournalRow(
            row=number,
            failed=False,
            line=self._line(number, row, RowResponse(status_code=200, request_id=self._request_id(number), body=body)),
            num_prompt_tokens=sum(usage.num_prompt_tokens for usage in usages),
            num_cached_tokens=sum(usage.num_cached_tokens for usage in usages),
            num_output_tokens=sum(usage.num_output_tokens for usage in usages),
        )

    def unfinished(self, number: int, row: InputRow, code: str) -> JournalRow:
        """Return the line of a row that was not finished."""
        line = self._line(number, row, None, RowError(code=code, message=UNFINISHED[code]))
        return JournalRow(row=number, failed=True, line=line)

    async def cancel(self, number: int, row: InputRow) -> None:
        """Cancel the requests of a row, if it has any."""
        try:
            prepared = prepare(self._spec.endpoint, bytes(row.body), self._parsers)
        except PenstockError:
            return  # it was never submitted
        ids = self._request_ids(number, len(prepared.prompts))
        cancels = [self._client.cancel(request_id, model=prepared.model, n=prepared.num_answers) for request_id in ids]
        for result in await asyncio.gather(*cancels, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, RequestNotFoundError):
                raise result

    async def _outputs(self, number: int, prepared: PreparedBody) -> list[RequestOutput]:
        """Return the output of each prompt of a row."""
        ids = self._request_ids(number, len(prepared.prompts))
        names = numbered("prompt", prepared.prompts)
        return await all_or_none(
            [
                self._output(name, request_id, prompt, prepared)
                for name, request_id, prompt in zip(names, ids, prepared.prompts, strict=True)
            ]
        )

    async def _output(self, name: str, request_id: str, prompt: Prompt, prepared: PreparedBody) -> RequestOutput:
        """Return the output of one prompt; errors refer to it as ``name``."""
        options = prepared.options | {
            "request_id": request_id,
            "tenant": self._spec.tenant,
            "band": self._band,
            "deadline": float(self._spec.expires_at),
            "trace_headers": self._spec.trace_headers,
            "key_name": self._spec.key_name,
        }
        attempt = 0
        while True:
            try:
                with naming(name):
                    handle = await self._client.submit(prompt, prepared.params, **options)
                    return await handle.result()
            except RequestConflictError as error:
                if error.field == "tenant":
                    raise
                # An earlier version submitted the same row with other parameters.
                handle = await self._client.handle(request_id, model=prepared.model, n=prepared.num_answers)
                return await handle.result()
            except RefusedForNowError as error:
                await asyncio.sleep(min(error.retry_after_s, MAX_REFUSED_PAUSE_S))
            except RequestNotFoundError:
                attempt += 1
                if attempt == MAX_ATTEMPTS:
                    raise

    def _failed(self, number: int, row: InputRow, error: OpenAIError) -> JournalRow:
        request_id = self._request_id(number)
        body = error_body(self._spec.endpoint, error, request_id)
        response = RowResponse(status_code=error.status, request_id=request_id, body=body)
        return JournalRow(row=number, failed=True, line=self._line(number, row, response))

    def _line(
        self, number: int, row: InputRow, response: RowResponse | None, error: RowError | None = None
    ) -> msgspec.Raw:
        digest = hashlib.sha256(f"{self._id} {number}".encode()).hexdigest()[:32]
        answer = RowAnswer(id=f"batch_req_{digest}", custom_id=row.custom_id, response=response, error=error)
        return msgspec.Raw(_encoder.encode(answer))

    def _request_id(self, number: int) -> str:
        return f"batch-{self._id}-{number}"

    def _request_ids(self, number: int, num_prompts: int) -> Sequence[str]:
        plain = self._request_id(number)
        return [plain] if num_prompts == 1 else [f"{plain}-{i}" for i in range(num_prompts)]


def _expired(output: RequestOutput) -> bool:
    return any(answer.finish_reason is FinishReason.EXPIRED for answer in output.outputs)


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order. The first error cancels the others, and is raised unchanged."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
