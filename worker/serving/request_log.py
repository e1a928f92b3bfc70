"""One line of the log for each request at its end in this engine, with what it was and how long it took."""

from __future__ import annotations

import structlog

from ...shared.messages import Delta
from .generation import Generation
from .request_observer import RequestObserver

log = structlog.get_logger()


class RequestLog(RequestObserver):
    """``is_on`` False writes nothing. ``model`` is the name that the model is served by."""

    def __init__(self, model: str, *, is_on: bool = True) -> None:
        self._model = model
        self._is_on = is_on

    def note_end(self, generation: Generation, last: Delta) -> None:
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
            finish_reason=reason,
            num_prompt_tokens=last.usage.num_prompt_tokens,
            num_output_tokens=last.usage.num_output_tokens,
            queue_s=round(stats.queue_time_s, 4),
            time_to_first_token_s=round(stats.time_to_first_token_s, 4),
            latency_s=round(stats.latency_s, 4),
            num_deliveries=stats.num_deliveries,
        )
