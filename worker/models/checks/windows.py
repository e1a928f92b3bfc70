"""A check of sliding windows that costs a few tokens: the model's windows are made narrow, and it is asked again.

A prompt as long as a window of 4,096 tokens would take minutes of a processor at each load. But windows come from one
number of the configuration, which transformers' masks read at every forward, so for a moment it is made smaller than
the sequences of the conformance check. What the model computes then, our way has to compute with its windows as narrow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..forward import Forward, ForwardSettings
from ..lean.native import NativeForward
from ..ways.packed import PackedForward
from .conformance import Truth, check_conformance

_FIELD = "sliding_window"
# The sequences have 6 and 7 tokens.
_NARROW = 3


@dataclass
class NarrowTruth:
    """What the model computes with narrow windows.

    Args:
        windows: of each attention then; None sees all before it.
    """

    truth: Truth
    windows: list[int | None]

    @classmethod
    def of(cls, module: PreTrainedModel, vocab_size: int, settings: ForwardSettings) -> NarrowTruth | None:
        """Ask ``module``, whose attention is its own, and then has to be set anew.

        None if it has no such windows, or rules that are no windows.
        """
        config = module.config.get_text_config()
        if not isinstance(getattr(config, _FIELD, None), int):
            return None
        with narrowed(config):
            truth = Truth.of(module, vocab_size)
            try:
                packed = PackedForward(module, settings)
            except Exception:  # it attends in a way of its own, and so it does however it is computed
                return None
            calls = packed.attention_calls
            packed.forget_attentions()
        windows = [call.window for call in calls]
        is_known = any(window is not None for window in windows) and not any(call.has_own_rule for call in calls)
        return cls(truth, windows) if is_known else None

    def check(self, forward: Forward, tolerance: float | None = None) -> None:
        """Compare with what ``forward`` computes, its windows as narrow; see ``check_conformance``.

        Raises:
            ModelLoadError: they differ by more than rounding.
        """
        if len(forward.attention_calls) != len(self.windows):  # the model's own code attends in some layers
            return
        with self._in(forward):
            check_conformance(forward, self.truth, tolerance, "with windows shorter than a prompt")

    @contextmanager
    def _in(self, forward: Forward) -> Iterator[None]:
        wide = [call.window for call in forward.attention_calls]
        try:
            _set_windows(forward, self.windows)
            yield
        finally:
            _set_windows(forward, wide)


def _set_windows(forward: Forward, windows: list[int | None]) -> None:
    for call, window in zip(forward.attention_calls, windows, strict=True):
        call.window = window
    if isinstance(forward, NativeForward):
        forward.renew()


@contextmanager
def narrowed(config: Any) -> Iterator[None]:
    """Let the windows of a model of ``config`` be narrow meanwhile, if it has any."""
    wide = getattr(config, _FIELD, None)
    if not isinstance(wide, int):
        yield
        return
    try:
        setattr(config, _FIELD, _NARROW)
        yield
    finally:
        setattr(config, _FIELD, wide)
