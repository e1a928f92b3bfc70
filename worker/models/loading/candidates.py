"""The ways of computing a model, in the order in which they are tried: the first that conforms serves.

Whether a way suits a model is written down nowhere in transformers, and there are hundreds of architectures. So each
way is tried out on the loaded model and compared with the model on its own (``conformance.py``). To add one, add a line
to ``CANDIDATES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import structlog
import torch
from transformers import PreTrainedModel

from ....shared.errors import ModelLoadError
from ..checkpoint.load import spoilt_tensors
from ..checks.conformance import SURE, ReferenceRun, check_conformance
from ..checks.lengths import LoweredReference
from ..forward import Forward, ForwardSettings
from ..lean.reading.decoder import has_layers
from ..lean.staged import lean_forward
from ..modes.gather import gather_forward
from ..modes.packed import PackedForward, PackedWithPast
from ..modes.partition import CutRule
from ..modes.split import split_forward

# What "gather" collects of a layer at a time: 512 MiB with 4,096 dimensions of keys in bfloat16 and as many of values.
_MAX_GATHERED_TOKENS = 1 << 15
# A careful way is preferred where the other's error is more than so many times its own. Jamba, whose later chunks
# ignore the state they follow, has 0.089 in bfloat16, and 0.020 token by token.
_MUCH_CLOSER = 3
_SPLIT = CutRule()
_SPLIT_TOKEN_BY_TOKEN = CutRule(continues_chunks=False)
_GATHER = CutRule(max_padded_tokens=_MAX_GATHERED_TOKENS)
_GATHER_TOKEN_BY_TOKEN = replace(_GATHER, continues_chunks=False)
_GATHER_ALONE = replace(_GATHER, batches_decodes=False)
_GATHER_ALONE_TOKEN_BY_TOKEN = replace(_GATHER_ALONE, continues_chunks=False)

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A way of computing a model.

    Args:
        name: the mode, and after a comma what is particular. Those of a mode follow each other, the careful ones last.
        build: makes the ``Forward`` or raises, with the reason why the model cannot be computed so.
        suits: whether it is meant for the model at all.
    """

    name: str
    build: Callable[[PreTrainedModel, ForwardSettings], Forward]
    suits: Callable[[PreTrainedModel], bool] = lambda module: True

    @property
    def mode(self) -> str:
        return self.name.split(",")[0]


CANDIDATES: tuple[Candidate, ...] = (
    Candidate("lean", lean_forward, suits=has_layers),
    Candidate("packed", PackedForward),
    Candidate("packed, with the length before each token", PackedWithPast),
    Candidate("split", partial(split_forward, rule=_SPLIT)),
    Candidate("split, later chunks token by token", partial(split_forward, rule=_SPLIT_TOKEN_BY_TOKEN)),
    Candidate("gather", partial(gather_forward, rule=_GATHER)),
    Candidate("gather, later chunks token by token", partial(gather_forward, rule=_GATHER_TOKEN_BY_TOKEN)),
    Candidate("gather, request by request", partial(gather_forward, rule=_GATHER_ALONE)),
    Candidate(
        "gather, request by request and token by token", partial(gather_forward, rule=_GATHER_ALONE_TOKEN_BY_TOKEN)
    ),
)


MODES = tuple(dict.fromkeys(candidate.mode for candidate in CANDIDATES))


@dataclass
class _Trial:
    """What became of a candidate: a ``Forward`` with its error, or the reason why there is none."""

    candidate: Candidate
    forward: Forward | None = None
    error: float = math.inf
    reason: str = ""


@torch.inference_mode()
def choose_forward(
    module: PreTrainedModel,
    architecture: str,
    vocab_size: int,
    settings: ForwardSettings,
    prepare: Callable[[Forward], Forward] = lambda forward: forward,
    prepared_tolerance: float | None = None,
    prepared_with: str = "packed layers",
    *,
    truth: ReferenceRun | None = None,
    modes: Collection[str] = MODES,
    is_whole: bool = True,
) -> Forward:
    """Return the first of ``CANDIDATES`` that computes what ``module``, with eager attention, does on its own.

    In 16 bits rounding may hide what is wrong with it. Then the more careful ones of its mode are tried too, and one
    that comes much closer is preferred.

    Args:
        prepare: makes of the chosen way one that is faster. The choice is made before: with the arithmetic of the
            model's own layers rounding hides less of what is wrong. What comes of it has to conform, too.
        prepared_tolerance: what it may differ by; None as much as any.
        prepared_with: what it has then, to say what went wrong.
        truth: what the model does on its own; None to ask ``module``.
        modes: those that may be tried.
        is_whole: ``module`` computes what the whole model does; False for a part of it, which cannot be asked.

    Raises:
        ModelLoadError: none does; says why, for each.
    """
    truth = truth or find_truth(module, architecture, vocab_size)
    lowered = LoweredReference.of(module, vocab_size, settings) if is_whole else None
    trials = _try_candidates(module, truth, lowered, settings, modes)
    smallest = max(SURE, min(trial.error for trial in trials))
    chosen = next(trial for trial in trials if trial.error <= _MUCH_CLOSER * smallest)
    told = _told(trials)
    if chosen.forward is None:
        raise ModelLoadError(f"{architecture} cannot be served. {told}")
    log.info("forward_mode", mode=chosen.candidate.name, architecture=architecture, why=told)
    # Made anew if others have changed the model's attention since.
    forward = chosen.forward if chosen is trials[-1] else chosen.candidate.build(module, settings)
    forward = prepare(forward)
    try:
        check_conformance(forward, truth, prepared_tolerance)
        if lowered is not None:
            lowered.check(forward, prepared_tolerance)
    except Exception as error:  # as above
        raise ModelLoadError(f"{architecture} cannot be served with {prepared_with}: {_sentence(error)}") from error
    return forward


@torch.inference_mode()
def find_truth(module: PreTrainedModel, architecture: str, vocab_size: int) -> ReferenceRun:
    """Ask ``module`` what its logits are.

    Raises:
        ModelLoadError: it fails, or they are no numbers.
    """
    try:
        truth = ReferenceRun.of(module, vocab_size)
    except Exception as error:  # whatever the architecture's own code raises
        raise ModelLoadError(f"{architecture} cannot be served: on its own it fails with {_sentence(error)}") from error
    if not all(bool(logits.isfinite().all()) for logits in truth.logits):
        # Only now are the weights looked at, so a good model costs nothing.
        reason = spoilt_tensors(module) or _out_of_range(module.dtype)
        raise ModelLoadError(f"{architecture} cannot be served: {reason}")
    return truth


def _try_candidates(
    module: PreTrainedModel,
    truth: ReferenceRun,
    lowered: LoweredReference | None,
    settings: ForwardSettings,
    modes: Collection[str],
) -> list[_Trial]:
    """Try them in order, until one conforms for sure, or all of the mode of the first that conforms are through."""
    trials: list[_Trial] = []
    for candidate in (each for each in CANDIDATES if each.mode in modes and each.suits(module)):
        good = next((trial for trial in trials if trial.forward is not None), None)
        if good is not None and (good.error <= SURE or candidate.mode != good.candidate.mode):
            break
        try:
            forward = candidate.build(module, settings)
            error = check_conformance(forward, truth)
            if lowered is not None:
                error = max(error, lowered.check(forward))
            trials.append(_Trial(candidate, forward, error))
        except Exception as error:  # whatever the architecture's own code raises
            trials.append(_Trial(candidate, reason=_sentence(error)))
    return trials


def _out_of_range(dtype: torch.dtype) -> str:
    told = "its logits are NaN or infinite, though its weights are not"
    return f"{told}; float16 may be too narrow for it: use dtype bfloat16" if dtype is torch.float16 else told


def _told(trials: list[_Trial]) -> str:
    """The reasons, each with the modes that it speaks against."""
    modes_by_reason: dict[str, dict[str, None]] = {}
    for trial in trials:
        if trial.reason:
            modes_by_reason.setdefault(trial.reason, {})[trial.candidate.mode] = None
    return "; ".join(f"{', '.join(modes)}: {reason}" for reason, modes in modes_by_reason.items())


def _sentence(error: Exception) -> str:
    first_line = next(iter(str(error).strip().splitlines()), "")
    return first_line if isinstance(error, ModelLoadError) else f"{type(error).__name__}: {first_line}"
