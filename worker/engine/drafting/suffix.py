"""Guesses that a request goes on as it has gone on before, or as another one of its tenant and salt has.

After SuffixDecoding (Oliaro et al., arXiv:2411.04975): answers to like requests are alike, those of agents above all.
It has a tree of all suffixes; here the chains of ``SuffixIndex`` do, which are cheap to forget.
"""

from __future__ import annotations

from ...suffix_index import SuffixIndex
from ..scheduling.request import Request
from ..scheduling.scheduler_output import SchedulerOutput
from .drafter import Drafter, make_drafters
from .ngram import continued
from .shared_texts import ENOUGH, SharedTexts

# Of other requests fewer agreeing tokens are chance.
_MIN_SHARED = 3


class SuffixDrafter:
    """The ``drafter.Drafter`` over a request's own tokens and what others of its scope have said."""

    def __init__(self, request: Request, texts: SharedTexts) -> None:
        self._own = SuffixIndex(request.token_ids, ENOUGH)
        self._texts = texts

    def draft(self, request: Request, room: int) -> list[int]:
        token_ids = request.token_ids
        own = self._own.match(token_ids)
        found, length = self._texts.find(request.extra_keys, token_ids[-ENOUGH:], room)
        if length >= _MIN_SHARED and (own is None or length > own[1]):
            return found
        return [] if own is None else continued(token_ids, own[0], room)


class SuffixMemory:
    """See ``speculation.Memory``: what has ended is learnt, with the last tokens of its prompt before it."""

    def __init__(self, texts: SharedTexts | None = None) -> None:
        self.texts = texts or SharedTexts()
        self._running: dict[str, Request] = {}

    def drafters_for(self, request: Request) -> list[Drafter]:
        """As ``drafter.make_drafters``, with what others have said."""
        *surer, _ = make_drafters(request)
        return [*surer, SuffixDrafter(request, self.texts)]

    def observe(self, output: SchedulerOutput) -> None:
        """Learn what requests have said that ended since the last step."""
        for request_id in output.released_ids:
            request = self._running.pop(request_id, None)
            if request is not None and request.is_finished and request.num_output_tokens:
                self.texts.learn(request.extra_keys, request.token_ids[max(0, request.num_prompt_tokens - ENOUGH) :])
        for request in output.requests:
            self._running[request.request_id] = request

    def forget(self) -> None:
        """Forget what was said."""
        self.texts.clear()
