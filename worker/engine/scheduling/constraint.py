"""What the engine asks of a grammar that a request's output has to follow; ``structured/constraint.py`` has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ....shared.messages.outcome import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Constraint(Protocol):
    """What a request's next token may be."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def ending_token_ids(self) -> list[int]:
        """Those that end the output where the grammar may end."""
        ...

    @property
    def is_terminated(self) -> bool:
        """Whether its last token ended the output."""
        ...

    @property
    def failure(self) -> RequestError | None:
        """Why the request has to end instead of taking its last token."""
        ...

    def fill(self, bitmask: NDArray[np.int32], row: int) -> bool:
        """Write into ``row`` of ``bitmask``, ``[rows, words of 32 tokens]``, what may come next; False if it failed."""
        ...

    def accept(self, token_id: int) -> RequestError | None:
        """Advance by a token as soon as it is sampled; returns ``failure``."""
        ...

    def forced_tokens(self, room: int) -> list[int]:
        """At most ``room`` tokens of the text that has to come next, as they are likely to be; none if any may come."""
        ...

    def fail_for_want_of_tokens(self) -> None:
        """Note that other parameters forbid all that the grammar allows."""
        ...
