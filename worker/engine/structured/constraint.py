"""Applies the grammar of one request."""

from __future__ import annotations

import time

import numpy as np
import structlog

from ....shared.errors import ValidationError
from ....shared.messages.outcome import RequestError
from ....shared.process.boundary import describe
from .grammar import Bitmask, Grammar, num_words

FAILED = "structured_output_failed"
# A limit of time in the step loop, because all requests wait for a mask. A mask takes 0.02 to 0.5 ms, but the time of a
# very ambiguous grammar grows with every token without a limit.
MAX_MASK_S = 1.0

log = structlog.get_logger(__name__)


class GrammarConstraint:
    """The ``scheduling.Constraint`` of a grammar.

    An error of the grammar is stored in ``failure`` and ends this request with its next token. Other requests are not
    affected.

    Args:
        grammar: has already accepted the tokens of the output.
        ending_token_ids: tokens that end the output where the grammar may end.
    """

    def __init__(self, request_id: str, grammar: Grammar, vocab_size: int, ending_token_ids: frozenset[int]) -> None:
        self._request_id = request_id
        self._grammar = grammar
        self.vocab_size = vocab_size
        self.ending_token_ids = sorted(ending_token_ids)
        self.failure: RequestError | None = None

    @property
    def is_terminated(self) -> bool:
        """Whether the last token has ended the output."""
        return self._grammar.is_terminated()

    def fill(self, bitmask: Bitmask, row: int) -> bool:
        """Write the allowed next tokens into ``row``; return False and write nothing if the grammar has failed."""
        if self.failure is not None:
            return False
        started_s = time.thread_time()
        try:
            self._grammar.fill_bitmask(bitmask, row)
        except BaseException as error:  # a panic in a Rust library is not an Exception
            self._fail_in_library(error)
            return False
        if time.thread_time() - started_s > MAX_MASK_S:
            self._fail("structured_outputs: the grammar is too ambiguous, a token of it takes more than a second")
        elif not _is_any_allowed(bitmask[row], self.vocab_size):
            self._fail("structured_outputs: the grammar allows neither a further token nor the end")
        return self.failure is None

    def forced_tokens(self, room: int) -> list[int]:
        """See ``scheduling.request.Constraint``. Returns none if the library fails; the next mask reports it."""
        if self.failure is not None or self.is_terminated:
            return []
        try:
            return self._grammar.forced_tokens(room)
        except BaseException:  # as above
            return []

    def fail_no_allowed_tokens(self) -> None:
        """Fail because other parameters forbid all tokens that the grammar allows."""
        self._fail(
            "structured_outputs: allowed_token_ids and bad_words leave none of the tokens that the grammar allows here"
        )

    def accept(self, token_id: int) -> RequestError | None:
        """Advance by a sampled token and return ``failure``."""
        if self.failure is None:
            try:
                if not self._grammar.accept_tokens([token_id]):
                    self._fail_internally(f"token {token_id} does not follow the grammar")
            except BaseException as error:  # as above
                self._fail_in_library(error)
        return self.failure

    def _fail(self, message: str) -> None:
        self.failure = RequestError(ValidationError.code, message)

    def _fail_internally(self, reason: str) -> None:
        self.failure = RequestError(FAILED, f"structured_outputs: {reason}")
        log.error("structured_output_failed", request_id=self._request_id, reason=reason)

    def _fail_in_library(self, error: BaseException) -> None:
        log.exception("structured_output_failed", request_id=self._request_id)
        self.failure = RequestError(FAILED, f"structured_outputs: the library failed: {describe(error)}")


def _is_any_allowed(row: Bitmask, vocab_size: int) -> bool:
    """Return whether the bit of any token is set. Bits after the last token are ignored."""
    whole = vocab_size // 32
    if row[:whole].any():
        return True
    return num_words(vocab_size) > whole and bool(int(row[whole]) & ((1 << vocab_size % 32) - 1))


def new_bitmask(num_rows: int, vocab_size: int) -> Bitmask:
    """Return a bitmask that allows all tokens."""
    return np.full((num_rows, num_words(vocab_size)), -1, np.int32)
