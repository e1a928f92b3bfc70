"""Interface of a grammar that a request's output must match; implemented by ``structured/constraint.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ....shared.messages.outcome import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Constraint(Protocol):
    """The set of tokens that a request's grammar allows next."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def ending_token_ids(self) -> list[int]:
        """Tokens that end the output where the grammar may end."""
        ...

    @property
    def is_terminated(self) -> bool:
        """Whether the last token ended the output."""
        ...

    @property
    def failure(self) -> RequestError | None:
        """Reason why the request must end without its last token; None if it need not."""
        ...

    def fill(self, bitmask: NDArray[np.int32], row: int) -> bool:
        """Write the allowed tokens into ``row`` of ``bitmask``, ``[rows, words of 32 tokens]``; False if it failed."""
        ...

    def accept(self, token_id: int) -> RequestError | None:
        """Advance by a token as soon as it is sampled; return ``failure``."""
        ...

    def forced_tokens(self, room: int) -> list[int]:
        """Return at most ``room`` tokens that likely spell the text that must follow; none if there is a choice."""
        ...

    def fail_no_allowed_tokens(self) -> None:
        """Set ``failure``: other parameters forbid all tokens that the grammar allows."""
        ...
