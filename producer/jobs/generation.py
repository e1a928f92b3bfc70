"""The job ``generate``: one generation, with plain data as arguments and result."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Mapping
from typing import Any

import msgspec
from arq.worker import Retry

from ...shared.errors import ValidationError
from ...shared.params.sampling import RepetitionDetectionParams, SamplingParams
from ...shared.params.structured import StructuredOutputsParams
from ...shared.values.shown import shown
from ..inputs.options import RequestOptions
from ..inputs.prompt import Prompt
from .context import CutOffError, JobContext, run_held

# Items of this kind are arq jobs enqueued by apps: after a crash, the sweep makes arq start them again.
ARQ_JOB = "arq"
_NESTED: dict[str, type] = {
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": RepetitionDetectionParams,
}


async def generate(
    ctx: dict[str, Any], prompt: Prompt, params: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Generate from ``prompt`` and return the whole ``RequestOutput`` as plain data.

    The request is detached, and its id is that of the arq job unless ``options`` has one. So a job that is run again
    after its process died attaches to the running request. Aborting the job does not cancel the request;
    ``Client.cancel(job_id)`` does.

    Args:
        prompt: text, token ids or messages.
        params: fields of ``SamplingParams`` by name; ``structured_outputs`` and ``repetition_detection`` as dicts.
        options: those of ``Client.submit``.

    Raises: as ``Client.submit`` and ``RequestHandle.result``; arq stores the error as the job's result.
    """
    context, job_id = JobContext.from_ctx(ctx), ctx["job_id"]
    await context.agenda.add(ARQ_JOB, job_id)
    hold = await context.agenda.hold(ARQ_JOB, job_id)
    if hold is None:
        raise Retry(defer=context.settings.lease_ttl_s)
    try:
        output = await run_held(hold, _generate(context, prompt, params, {"request_id": job_id, **options}))
    except CutOffError as error:
        raise Retry from error
    finally:
        await asyncio.shield(hold.let_go(None))
    return output


async def _generate(
    context: JobContext, prompt: Prompt, params: Mapping[str, Any] | None, options: dict[str, Any]
) -> dict[str, Any]:
    handle = await context.client.submit(prompt, params_from(params), **RequestOptions(**options))
    return _plain(await handle.result())


def _plain(value: Any) -> Any:
    """Return structs as dicts, including those encoded as arrays on the wire, because apps read the result."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, enum.Enum) else value


def params_from(plain: Mapping[str, Any] | None) -> SamplingParams | None:
    """Return the sampling parameters for fields by name.

    Raises:
        ValidationError: a name is not a sampling parameter, or its value is invalid.
    """
    return None if plain is None else _struct_from("params", SamplingParams, plain)


def _struct_from(field: str, struct: type, plain: object) -> Any:
    if not isinstance(plain, Mapping):
        raise ValidationError(f"{field} must be a dict of fields of {struct.__name__}, got {shown(plain)}")
    if unknown := plain.keys() - set(struct.__struct_fields__):
        raise ValidationError(f"{field} has no {', '.join(sorted(map(str, unknown)))}")
    return struct(
        **{
            name: _struct_from(f"{field}.{name}", _NESTED[name], value)
            if name in _NESTED and value is not None
            else value
            for name, value in plain.items()
        }
    )
