"""A check at load that our forward gives the same results as the model itself.

transformers has hundreds of architectures. Some keep state besides keys and values, or mix the tokens of a sequence
outside attention; packed with tokens of other requests they would give wrong results without an error. So each model
computes two short sequences alone, as transformers does, and then prefixes of them, cut and mixed as the engine does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ....kernels.paged_attention import PagedBatch
from ....shared.errors import ModelLoadError
from ..forward import Forward, ModelInput
from .wide_products import wide_products

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SEQUENCE_LENS = (6, 7)
# The sequence of which each request is a prefix. Two each, to detect a request that reads its neighbour's tokens.
_SEQUENCE_OF_REQUEST = (0, 1, 0, 1)
# (request, new tokens), decodes first. The first step begins prompts, one of them with a single token. In the second,
# three requests of different lengths decode, and the other is in the middle of its prompt. The third has only decodes,
# which CUDA graphs compute.
_STEPS = (((3, 1), (0, 5), (1, 3), (2, 2)), ((0, 1), (2, 1), (3, 1), (1, 4)), ((2, 1), (3, 1)))
_NAME_OF_SEQUENCE = ("one of two sequences", "the other of two sequences")
_BLOCK_SIZE = 4
_BLOCKS_PER_REQUEST = 2
# Medians over tokens of |difference| / |logits|, for small random models of 155 types: in float32 up to 5e-4 for right
# results and from 0.03 on for wrong ones; in bfloat16 up to 0.07 and from 0.03 on, so values between are doubtful. The
# median, because rounding may send a token to another expert.
SURE = 5e-3
_TOLERANCES = {torch.float32: SURE, torch.bfloat16: 0.1, torch.float16: 0.1}

# For weights and activations in bytes: random models, without outliers and without confident results, have 0.02 to 0.1.
# For keys and values in eight bits: the same models have 0.02 to 0.16 with e4m3, 0.05 to 0.23 with e5m2.
QUANTIZED_TOLERANCE = 0.3
# For weights in four bits: 0.04 in the demo model, which was trained; 0.36 and 0.66 in random ones of 4 and 30 layers,
# in which nothing outweighs the rounding. Logits of a different model would have 1.4.
FOUR_BITS_TOLERANCE = 0.9


@dataclass
class ReferenceRun:
    """Two sequences ``[len]`` of tokens and their logits ``[len, V]``, each computed alone by the model itself.

    Args:
        agree: returns the error that counts for all ranks, given the own one, since they must decide alike.
    """

    sequences: list[Tensor]
    logits: list[Tensor]
    dtype: torch.dtype
    agree: Callable[[float], float] = lambda error: error

    @classmethod
    def of(cls, module: PreTrainedModel, vocab_size: int) -> ReferenceRun:
        """Compute the logits by ``module``, whose attention is its own."""
        sequences = _make_sequences(vocab_size, module.device)
        with wide_products():
            logits = [module(input_ids=sequence[None], use_cache=False).logits[0].float() for sequence in sequences]
        return cls(sequences, logits, module.dtype)

    @classmethod
    def elsewhere(cls, module: PreTrainedModel, vocab_size: int) -> ReferenceRun:
        """Return a reference for a rank whose logits are not used: its errors do not count."""
        sequences = _make_sequences(vocab_size, module.device)
        return cls(sequences, [sequence.new_zeros(len(sequence), 1).float() for sequence in sequences], module.dtype)

    @classmethod
    def stored(cls, logits: list[bytes], vocab_size: int, dtype: torch.dtype) -> ReferenceRun:
        """Return the reference with stored logits, float32 ``[len, V]`` each."""
        sequences = _make_sequences(vocab_size, torch.device("cpu"))
        tensors = [torch.frombuffer(bytearray(each), dtype=torch.float32).view(-1, vocab_size) for each in logits]
        return cls(sequences, tensors, dtype)

    def to(self, device: torch.device, agree: Callable[[float], float]) -> ReferenceRun:
        """Return the same on ``device``, for ranks that ``agree``."""
        sequences, logits = ([each.to(device) for each in tensors] for tensors in (self.sequences, self.logits))
        return ReferenceRun(sequences, logits, self.dtype, agree)


def _make_sequences(vocab_size: int, device: torch.device) -> list[Tensor]:
    # Starts at 1, since token 0 is often padding, which some models treat differently.
    token_ids = torch.arange(1, 1 + sum(_SEQUENCE_LENS), device=device) * 7919 % vocab_size
    return list(token_ids.split(_SEQUENCE_LENS))


@dataclass(frozen=True)
class _Span:
    """Tokens ``start .. end`` of a request."""

    request: int
    start: int
    end: int

    @property
    def kind(self) -> str:
        if self.start == 0:
            return "prompts"
        return "decodes" if self.end - self.start == 1 else "later chunks of a prompt"

    @property
    def sequence(self) -> int:
        return _SEQUENCE_OF_REQUEST[self.request]


def check_conformance(
    forward: Forward,
    reference: ReferenceRun,
    tolerance: float | None = None,
    circumstance: str = "when requests are batched",
) -> float:
    """Compare the results of ``forward`` with ``reference``; return the error, which leaves doubt above ``SURE``.

    The caches of ``forward`` are allocated again, so allocate the real ones afterwards.

    Args:
        tolerance: largest error; None for that of rounding in the model's dtype.
        circumstance: for the message, when ``forward`` gives other results.

    Raises:
        ModelLoadError: they differ by more than rounding.
    """
    device = reference.sequences[0].device
    num_requests = len(_SEQUENCE_OF_REQUEST)
    forward.allocate(_BLOCKS_PER_REQUEST * num_requests, _BLOCK_SIZE, num_requests, device)
    num_computed = [0] * num_requests
    errors: dict[str, list[Tensor]] = {}
    for step in _STEPS:
        spans = [_Span(request, num_computed[request], num_computed[request] + num_new) for request, num_new in step]
        with wide_products():
            logits = forward.run(_model_input(spans, reference, device)).float()
        forward.commit()
        for span, ours in zip(spans, logits.split([span.end - span.start for span in spans]), strict=True):
            theirs = reference.logits[span.sequence][span.start : span.end]
            # A padding token may have no embedding, and then all its logits are zero.
            error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6)
            # By kind and by sequence, so that errors of a few tokens are not outvoted.
            errors.setdefault(span.kind, []).append(error)
            errors.setdefault(_NAME_OF_SEQUENCE[span.sequence], []).append(error)
            num_computed[span.request] = span.end
    medians = {
        kind: torch.cat(errors_of_kind).nan_to_num(torch.inf).median().item() for kind, errors_of_kind in errors.items()
    }
    kind, worst = max(medians.items(), key=lambda item: item[1])
    worst = reference.agree(worst)
    if worst > (tolerance_of(reference.dtype) if tolerance is None else tolerance):
        raise ModelLoadError(f"it gives other results {circumstance}: logits differ by {worst:.1%} in {kind}")
    return worst


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the largest error by rounding in ``dtype``, as the median of ``|difference| / |result|``."""
    return _TOLERANCES[dtype]


def _model_input(spans: list[_Span], reference: ReferenceRun, device: torch.device) -> ModelInput:
    """Return the spans as a step. Blocks of each request are contiguous, so a slot is an offset plus the position."""
    positions = torch.cat([torch.arange(span.start, span.end, device=device) for span in spans])
    requests = torch.tensor([span.request for span in spans], device=device)
    query_lens = [span.end - span.start for span in spans]
    offsets = requests * _BLOCKS_PER_REQUEST * _BLOCK_SIZE
    batch = PagedBatch(
        requests[:, None] * _BLOCKS_PER_REQUEST + torch.arange(_BLOCKS_PER_REQUEST, device=device),
        positions + offsets.repeat_interleave(torch.tensor(query_lens, device=device)),
        query_lens=query_lens,
        seq_lens=[span.end for span in spans],
        block_size=_BLOCK_SIZE,
    )
    return ModelInput(
        token_ids=torch.cat([reference.sequences[span.sequence][span.start : span.end] for span in spans]),
        positions=positions,
        logit_rows=torch.arange(len(positions), device=device),
        batch=batch,
        state_slots=np.array([span.request for span in spans]),
    )
