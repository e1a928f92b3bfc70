"""Drafts that repeat an earlier continuation of the request, or of another request of the same tenant and salt.

After SuffixDecoding (Oliaro et al., arXiv:2411.04975): similar requests have similar answers, especially those of
agents. SuffixDecoding uses a tree of all suffixes; the chains of ``SuffixIndex`` suffice here, and are cheap to forget.
"""

from __future__ import annotations

from ...suffix_index import SuffixIndex
from ..scheduling.request import Request
from ..scheduling.scheduler_output import SchedulerOutput
from .drafter import Drafter, make_drafters
from .ngram import continued
from .shared_texts import ENOUGH, SharedTexts

# A shorter match with another request's output is likely a coincidence.
_MIN_SHARED = 3


class SuffixDrafter:
    """The ``drafter.Drafter`` that matches a request's own tokens and the output of former requests of its scope."""

    def __init__(self, request: Request, texts: SharedTexts) -> None:
        self._own = SuffixIndex(request.token_ids, ENOUGH)
        self._texts = texts

    def draft(self, request: Request, room: int) -> list[int]:
        token_ids = request.token_ids
        own = self._own.match(token_ids)
        shared, length = self._texts.find(request.extra_keys, token_ids[-ENOUGH:], room)
        if length >= _MIN_SHARED and (own is None or length > own[1]):
            return shared
        return [] if own is None else continued(token_ids, own[0], room)


class SuffixMemory:
    """Implements ``speculation.Memory``: learns the output of finished requests after the last tokens of the prompt."""

    def __init__(self, texts: SharedTexts | None = None) -> None:
        self.texts = texts or SharedTexts()
        self._running: dict[str, Request] = {}

    def drafters_for(self, request: Request) -> list[Drafter]:
        """Return the drafters of ``drafter.make_drafters``, with the last one replaced by a ``SuffixDrafter``."""
        *surer, _ = make_drafters(request)
        return [*surer, SuffixDrafter(request, self.texts)]

    def observe(self, output: SchedulerOutput) -> None:
        """Learn the output of requests that ended since the last step."""
        for request_id in output.released_ids:
            request = self._running.pop(request_id, None)
            if request is not None and request.is_finished and request.num_output_tokens:
                self.texts.learn(request.extra_keys, request.token_ids[max(0, request.num_prompt_tokens - ENOUGH) :])
        for request in output.requests:
            self._running[request.request_id] = request

    def forget_texts(self) -> None:
        """Forget all texts."""
        self.texts.clear()
