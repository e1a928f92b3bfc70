"""Observers of requests that arrive at an engine and leave it, and the log of requests.

The log has a line for each request at its end in this engine, with ids, parameters and numbers. It has no prompts
unless they are enabled, and never any output.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec
import structlog

from ....shared.messages.deltas import Delta
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.sampling import SamplingParams
from ..requests.generation import Generation


class Departure(enum.StrEnum):
    """Reason why a request leaves an engine before its end; another engine resumes it."""

    HANDED_BACK = "handed_back"
    ENGINE_DIED = "engine_died"
    CLAIM_STALE = "claim_stale"


class RequestObserver:
    """Receives the arrival and departure of each valid request that an engine claims, once. This base does nothing."""

    async def open(self) -> None:
        """Start, before the first claim."""

    def record_begin(self, generation: Generation, request: EngineCoreRequest) -> None:
        """Record an admitted request; ``request`` is passed to the core, with the prompt as token ids."""

    def record_end(self, generation: Generation, last: Delta) -> None:
        """Record the end of a request, or of a resumable request's segment; ``last`` is its last delta."""

    def record_departure(self, generation: Generation, departure: Departure, cause: str = "") -> None:
        """Record that a request leaves before its end. ``cause`` is a sentence for people."""

    async def close(self) -> None:
        """Finish pending work within a short time."""


class RequestObservers(RequestObserver):
    """Observer that forwards everything to several observers."""

    def __init__(self, observers: Sequence[RequestObserver]) -> None:
        self._observers = observers

    async def open(self) -> None:
        for observer in self._observers:
            await observer.open()

    def record_begin(self, generation: Generation, request: EngineCoreRequest) -> None:
        for observer in self._observers:
            observer.record_begin(generation, request)

    def record_end(self, generation: Generation, last: Delta) -> None:
        for observer in self._observers:
            observer.record_end(generation, last)

    def record_departure(self, generation: Generation, departure: Departure, cause: str = "") -> None:
        for observer in self._observers:
            observer.record_departure(generation, departure, cause)

    async def close(self) -> None:
        for observer in self._observers:
            await observer.close()


_DEFAULTS = {
    field.name: field.default
    for field in msgspec.structs.fields(SamplingParams)
    if isinstance(field.default, bool | int | float) or field.name in ("seed", "logprobs", "prompt_logprobs")
}

log = structlog.get_logger()


class RequestLog(RequestObserver):
    """Observer that logs requests.

    Args:
        model: name under which the model is served.
        is_on: whether ends of requests are logged.
        logs_prompts: whether prompts are logged.
    """

    def __init__(self, model: str, *, is_on: bool = True, logs_prompts: bool = False) -> None:
        self._model = model
        self._is_on = is_on
        self._tells_prompts = logs_prompts

    def record_begin(self, generation: Generation, request: EngineCoreRequest) -> None:
        if self._tells_prompts:
            log.info("request_prompt", **generation.ids, model=self._model, prompt_token_ids=request.prompt_token_ids)

    def record_end(self, generation: Generation, last: Delta) -> None:
        if not self._is_on or last.usage is None or last.stats is None:
            return
        stats, reason = last.stats, last.finish_reason
        if reason is None and last.segment_ends:
            reason = last.segment_ends[-1].finish_reason
        log.info(
            "request_finished",
            **generation.ids,
            model=self._model,
            tenant=generation.tenant,
            params=_changed_params(generation.params),
            finish_reason=reason,
            num_prompt_tokens=last.usage.num_prompt_tokens,
            num_output_tokens=last.usage.num_output_tokens,
            queue_s=round(stats.queue_time_s, 4),
            time_to_first_token_s=round(stats.time_to_first_token_s, 4),
            latency_s=round(stats.latency_s, 4),
            num_deliveries=stats.num_deliveries,
        )


def _changed_params(params: SamplingParams) -> dict[str, bool | int | float]:
    """Return numeric and boolean parameters that differ from their defaults.

    Strings and lists are omitted, because they are content of the caller.
    """
    values = {name: getattr(params, name) for name in _DEFAULTS}
    return {name: value for name, value in values.items() if value is not None and value != _DEFAULTS[name]}
