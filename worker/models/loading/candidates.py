"""Candidates for computing a model, in the order in which they are tried: the first that conforms is used.

transformers does not document which mode suits a model, and has hundreds of architectures. So each candidate is tried
on the loaded model and compared with the model itself (``checks/conformance.py``). To add a mode, add a line to
``CANDIDATES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import structlog
import torch
from torch import nn
from transformers import PreTrainedModel

from ....shared.errors import ModelLoadError
from ..checkpoint.load import spoilt_tensors
from ..checks.conformance import SURE, ReferenceRun
from ..checks.lengths import LoweredReference
from ..checks.references import References
from ..forward import Forward, ForwardSettings
from ..lean.reading.decoder import has_layers
from ..lean.staged import lean_forward
from ..modes.cached import gather_forward, split_forward
from ..modes.packed import PackedForward
from ..modes.packed_with_past import PackedWithPast
from ..modes.partition import CutRule

# Tokens that "gather" collects of a layer at a time: 512 MiB with 4,096 dimensions of keys in bfloat16 and as many of
# values.
_MAX_GATHERED_TOKENS = 1 << 15
# A careful candidate is preferred if the other's error is more than this multiple of its own. Jamba, whose later chunks
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
    """A way to compute a model.

    Args:
        name: the mode, and a variant after a comma. Candidates of a mode are adjacent, the careful ones last.
        build: creates the ``Forward``, or raises with the reason why the model cannot be computed like this.
        suits: whether to try it on the model at all.
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
    """The result of trying a candidate: a ``Forward`` with its error, or the reason why there is none."""

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
    prepared_tolerance: Callable[[nn.Module], float | None] = lambda network: None,
    prepared_with: Callable[[nn.Module], str] = lambda network: "packed layers",
    *,
    reference: ReferenceRun | None = None,
    modes: Collection[str] = MODES,
    is_whole: bool = True,
) -> tuple[Forward, References]:
    """Return the first of ``CANDIDATES`` that computes the same as ``module`` with eager attention, and the results
    that it was compared with.

    In 16 bits rounding may hide an error. Then the more careful candidates of the mode are tried, too, and one that is
    much closer is preferred.

    Args:
        prepare: converts the chosen forward to a faster one. The choice is made before, because with the arithmetic of
            the model's own layers rounding hides fewer errors. The converted forward must conform, too.
        prepared_tolerance: returns its tolerance, given its network; None for that of the dtype.
        prepared_with: returns its properties, given its network, for messages.
        reference: results of the model itself; None to compute them by ``module``.
        modes: those that may be tried.
        is_whole: ``module`` computes the whole model; False for a part of it, which cannot compute a reference.

    Raises:
        ModelLoadError: no candidate conforms; the message has the reason for each.
    """
    reference = reference or run_reference(module, architecture, vocab_size)
    references = References(reference, LoweredReference.of(module, vocab_size, settings) if is_whole else None)
    trials = _try_candidates(module, references, settings, modes)
    smallest = max(SURE, min(trial.error for trial in trials))
    chosen = next(trial for trial in trials if trial.error <= _MUCH_CLOSER * smallest)
    reasons = _reasons_of(trials)
    if chosen.forward is None:
        raise ModelLoadError(f"{architecture} cannot be served. {reasons}")
    log.info("forward_mode", mode=chosen.candidate.name, architecture=architecture, why=reasons)
    # Built again if other candidates have changed the model's attention since.
    forward = chosen.forward if chosen is trials[-1] else chosen.candidate.build(module, settings)
    forward = prepare(forward)
    try:
        references.compare_with(forward, prepared_tolerance(forward.network))
    except Exception as error:  # any exception of the architecture's own code
        form = prepared_with(forward.network)
        raise ModelLoadError(f"{architecture} cannot be served with {form}: {_sentence(error)}") from error
    return forward, references


@torch.inference_mode()
def run_reference(module: PreTrainedModel, architecture: str, vocab_size: int) -> ReferenceRun:
    """Compute the reference logits by ``module``.

    Raises:
        ModelLoadError: it fails, or they are not finite.
    """
    try:
        reference = ReferenceRun.of(module, vocab_size)
    except Exception as error:  # any exception of the architecture's own code
        raise ModelLoadError(f"{architecture} cannot be served: on its own it fails with {_sentence(error)}") from error
    if not all(bool(logits.isfinite().all()) for logits in reference.logits):
        # Weights are scanned only now, so a good model costs nothing.
        reason = spoilt_tensors(module) or _out_of_range(module.dtype)
        raise ModelLoadError(f"{architecture} cannot be served: {reason}")
    return reference


def _try_candidates(
    module: PreTrainedModel,
    references: References,
    settings: ForwardSettings,
    modes: Collection[str],
) -> list[_Trial]:
    """Try them in order, until one surely conforms, or all of the mode of the first that conforms are tried."""
    trials: list[_Trial] = []
    for candidate in (each for each in CANDIDATES if each.mode in modes and each.suits(module)):
        conforming = next((trial for trial in trials if trial.forward is not None), None)
        if conforming is not None and (conforming.error <= SURE or candidate.mode != conforming.candidate.mode):
            break
        try:
            forward = candidate.build(module, settings)
            trials.append(_Trial(candidate, forward, references.compare_with(forward)))
        except Exception as error:  # any exception of the architecture's own code
            trials.append(_Trial(candidate, reason=_sentence(error)))
    return trials


def _out_of_range(dtype: torch.dtype) -> str:
    fact = "its logits are NaN or infinite, though its weights are not"
    return f"{fact}; float16 may be too narrow for it: use dtype bfloat16" if dtype is torch.float16 else fact


def _reasons_of(trials: list[_Trial]) -> str:
    """Return the reasons, each with the modes that it excludes."""
    modes_by_reason: dict[str, dict[str, None]] = {}
    for trial in trials:
        if trial.reason:
            modes_by_reason.setdefault(trial.reason, {})[trial.candidate.mode] = None
    return "; ".join(f"{', '.join(modes)}: {reason}" for reason, modes in modes_by_reason.items())


def _sentence(error: Exception) -> str:
    first_line = next(iter(str(error).strip().splitlines()), "")
    return first_line if isinstance(error, ModelLoadError) else f"{type(error).__name__}: {first_line}"
