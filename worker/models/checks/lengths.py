"""A check of how a model treats long sequences, at the cost of short ones: its length limits are lowered temporarily.

Many models compute differently beyond some length: a window hides old tokens, Llama 4 scales queries from position
``floor_scale`` on. A prompt of 8,192 tokens would take minutes of a processor at each load. But each such length is one
number on the loaded model, which is read at every forward. So it is lowered below the length of the conformance check's
sequences, and restored afterwards. The results of the model then must equal those of our forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
from torch import nn

from ..forward import Forward, ForwardSettings
from ..lean.native import NativeForward
from ..lean.staged import computing_layers
from ..modes.packed import PackedForward
from .conformance import ReferenceRun, check_conformance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Fields of configurations and attributes of modules that hold a length in tokens. A sequence is affected if it has more
# tokens than this length minus the number given here.
_LENGTHS = {
    "sliding_window": 0,
    "sliding_window_size": 0,
    "attention_chunk_size": 0,
    "attention_window_size": 0,
    "log_scaling_n_floor": 0,
    "original_max_position_embeddings": 0,
    "floor_scale": 1,
}
# More than half of the sequences' 6 and 7 tokens are beyond it.
_LOWERED = 3
# Strengths of the effects beyond those lengths. Llama 4 has 0.1, which rounding in 16 bits hides. With -100, attention
# selects entirely different keys: in bfloat16 a wrong position then differs by 0.19 to 0.25, a right one by 0.02.
_STRENGTHS = frozenset(("attn_scale", "llama_4_scaling_beta", "log_scaling_alpha"))
_STRONG = -100.0
# Tokens of a forward that reads the attention of a model's code again: as few as possible.
_PROBE_TOKENS = 2

log = structlog.get_logger(__name__)


@dataclass
class LoweredReference:
    """Results of the model itself with lowered lengths.

    Args:
        module: the model; None if only its results are known.
        settings: lengths that reach ``settings.max_model_len`` are not lowered, since no request is affected by them.
        windows: of each attention with lowered lengths; None attends to all before. None instead of the list for a
            model whose windows cannot be set on a forward with its own layers.
        longest: tokens of the longest request that no lowered length affects.
    """

    reference: ReferenceRun
    module: PreTrainedModel | None
    settings: ForwardSettings
    windows: list[int | None] | None
    longest: int

    @classmethod
    def of(cls, module: PreTrainedModel, vocab_size: int, settings: ForwardSettings) -> LoweredReference | None:
        """Compute the results by ``module``, whose attention must be eager, and must be set again afterwards.

        None if no length of the model is below ``settings.max_model_len``, or if it fails with lowered lengths.
        """
        unaffected = [length for length, _ in _lengths_of(module, settings.max_model_len)]
        if not unaffected:
            return None
        with lowered(module, settings.max_model_len):
            try:
                reference = ReferenceRun.of(module, vocab_size)
                if settings.groups is not None:
                    reference = reference.to(module.device, settings.groups.of_rank_zero)
            except Exception as error:  # any exception of the architecture's own code
                log.debug("lengths_not_checked", reason=f"{type(error).__name__}: {error}")
                return None
            windows = _windows_of(module, settings)
        return cls(reference, module, settings, windows, min(unaffected))

    def check(self, forward: Forward, tolerance: float | None = None) -> float:
        """Compare them with the results of ``forward`` with equally lowered lengths; see ``check_conformance``.

        Return 0 if they cannot be compared.

        Raises:
            ModelLoadError: they differ by more than rounding.
        """
        with ExitStack() as stack:
            if self.module is not None and forward.network is self.module:
                stack.enter_context(self._reread_lengths(forward, self.module))
            elif self.windows is None or len(forward.attention_calls) != len(self.windows):
                return 0.0
            else:
                stack.enter_context(_with_windows(forward, self.windows))
            return check_conformance(
                forward,
                self.reference,
                tolerance,
                f"beyond {self.longest} tokens (it may be served with max_model_len {self.longest} or less)",
            )

    @contextmanager
    def _reread_lengths(self, forward: Forward, module: PreTrainedModel) -> Iterator[None]:
        """Lower the lengths of ``module``, which ``forward`` runs, within the context, and read its attention rules
        again.
        """
        try:
            with lowered(module, self.settings.max_model_len):
                forward.profile(_PROBE_TOKENS, num_logit_rows=1)
                yield
        finally:
            forward.profile(_PROBE_TOKENS, num_logit_rows=1)


@contextmanager
def lowered(module: PreTrainedModel, max_model_len: int | None = None) -> Iterator[None]:
    """Lower all lengths of ``module`` below ``max_model_len`` within the context.

    Args:
        max_model_len: of the longest request; None to lower all.
    """
    with ExitStack() as stack:
        for _, (holder, name) in _lengths_of(module, max_model_len):
            stack.enter_context(_replaced(holder, name, _LOWERED))
        for holder, name in _numbers_of(module, _STRENGTHS):
            stack.enter_context(_replaced(holder, name, _STRONG))
        yield


def _lengths_of(module: PreTrainedModel, max_model_len: int | None) -> Iterator[tuple[int, tuple[Any, str]]]:
    """Yield each length that some request exceeds: the longest sequence that it does not affect, and where it is
    stored.
    """
    for holder, name in _numbers_of(module, frozenset(_LENGTHS)):
        unaffected = int(_read_attribute(holder, name)) - _LENGTHS[name]
        if unaffected > 0 and (max_model_len is None or unaffected < max_model_len):
            yield unaffected, (holder, name)


def _numbers_of(module: PreTrainedModel, names: frozenset[str]) -> list[tuple[Any, str]]:
    """Return the positive numbers with one of ``names``: of modules, their configurations, and RoPE parameters."""
    configs = [module.config.get_text_config(), *(getattr(part, "config", None) for part in module.modules())]
    holders = {id(holder): holder for holder in (*module.modules(), *configs) if holder is not None}
    for config in configs:
        rope = getattr(config, "rope_parameters", None)
        if isinstance(rope, dict):
            dictionaries = (rope, *(settings for settings in rope.values() if isinstance(settings, dict)))
            holders |= {id(settings): settings for settings in dictionaries}
    return [
        (holder, name)
        for holder in holders.values()
        for name in sorted(names)
        if type(value := _read_attribute(holder, name)) in (int, float) and value > 0
    ]


def _read_attribute(holder: Any, name: str) -> Any:
    if isinstance(holder, dict):
        return holder.get(name)
    return vars(holder).get(name) if isinstance(holder, nn.Module) else getattr(holder, name, None)


@contextmanager
def _replaced(holder: Any, name: str, value: float) -> Iterator[None]:
    before = _read_attribute(holder, name)
    write = holder.__setitem__ if isinstance(holder, dict) else holder.__setattr__
    write(name, value)
    try:
        yield
    finally:
        write(name, before)


def _windows_of(module: PreTrainedModel, settings: ForwardSettings) -> list[int | None] | None:
    """Return the windows of the attention calls of ``module``; None if it has none, or rules that are no windows."""
    try:
        packed = PackedForward(module, settings)
    except Exception:  # it attends by its own code, and does so in any mode
        return None
    calls = packed.attention_calls
    packed.forget_attentions()
    windows = [call.window for call in calls]
    is_windowed = any(window is not None for window in windows) and not any(call.has_own_rule for call in calls)
    return windows if is_windowed else None


@contextmanager
def _with_windows(forward: Forward, windows: list[int | None]) -> Iterator[None]:
    before = [call.window for call in forward.attention_calls]
    try:
        _set_windows(forward, windows)
        yield
    finally:
        _set_windows(forward, before)


def _set_windows(forward: Forward, windows: list[int | None]) -> None:
    for call, window in zip(forward.attention_calls, windows, strict=True):
        call.window = window
    layers = computing_layers(forward)
    if isinstance(layers, NativeForward):
        layers.renew()
