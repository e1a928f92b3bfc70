"""Duration of an engine's step, as a function of its work."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from .shapes import check_at_least


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of a step: decoding requests, the context tokens that they attend to, prompt tokens, and pairs.

    A pair is a prompt token and a token that it attends to.
    """

    num_decoding: int
    num_context_tokens: float
    num_prompt_tokens: int = 0
    num_prompt_pairs: int = 0


class Speed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Duration of a step as a sum of parts, each proportional to a number in ``StepWork``.

    The defaults are those of one thread of a busy Xeon with the demo model; ``penstock sim fit`` fits others.
    """

    fixed_ms: float = 1.15
    ms_per_seq: float = 0.05
    ms_per_prompt_token: float = 0.04
    ms_per_1000_context_tokens: float = 0.37
    ms_per_1000_prompt_pairs: float = 0.06

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_at_least(name, getattr(self, name), 0)
        check_at_least("fixed_ms + ms_per_seq", self.fixed_ms + self.ms_per_seq, 0.001)

    def step_s(self, work: StepWork) -> float:
        """Return the duration of a step in seconds."""
        ms = (
            self.fixed_ms
            + self.ms_per_seq * work.num_decoding
            + self.ms_per_prompt_token * work.num_prompt_tokens
            + self.ms_per_1000_context_tokens * work.num_context_tokens / 1000
            + self.ms_per_1000_prompt_pairs * work.num_prompt_pairs / 1000
        )
        return max(ms, 0.001) / 1000
