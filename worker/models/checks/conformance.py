"""A check at load that a model gives the same results our way as its own way.

transformers holds hundreds of architectures. Some keep state besides keys and values, or mix the tokens of a sequence
elsewhere than in attention; packed with other requests' tokens they would answer nonsense without an error. So each
model computes two short sequences alone, as transformers does it, and then their beginnings cut up and mixed, as the
engine does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ....kernels.paged_attention import PagedBatch
from ....shared.errors import ModelLoadError
from ..forward import Forward, ModelInput

_SEQUENCE_LENS = (6, 7)
# The sequence whose beginning each request is. Two each, so that one that reads its neighbour's tokens is found out.
_SEQUENCE_OF_REQUEST = (0, 1, 0, 1)
# (request, new tokens), decodes first. The first step begins prompts, one of them of a single token; in the second
# three requests of different lengths decode, and the other is in the middle of its prompt; the third has decodes alone,
# which CUDA graphs compute.
_STEPS = (((3, 1), (0, 5), (1, 3), (2, 2)), ((0, 1), (2, 1), (3, 1), (1, 4)), ((2, 1), (3, 1)))
_NAME_OF_SEQUENCE = ("one of two sequences", "the other of two sequences")
_BLOCK_SIZE = 4
_BLOCKS_PER_REQUEST = 2
# Medians over tokens of |difference| / |logits|, seen on small random models of 155 types: in float32 up to 5e-4 where
# all is well and from 0.03 on where it is not; in bfloat16 up to 0.07 and from 0.03 on, so that between is doubt. The
# median, because rounding may send a token to another expert.
SURE = 5e-3
_TOLERANCES = {torch.float32: SURE, torch.bfloat16: 0.1, torch.float16: 0.1}

# Of weights and activations in bytes: random models, which have no outliers but no certainty either, have 0.02 to 0.1.
# Of keys and values in eight bits: the same models have 0.02 to 0.16 with e4m3, 0.05 to 0.23 with e5m2.
QUANTIZED_TOLERANCE = 0.3
# Of weights in four bits: 0.04 in the demo model, which was trained; 0.36 and 0.66 in random ones of 4 and 30 layers,
# which have nothing that outweighs the rounding. Logits of another model altogether would have 1.4.
FOUR_BITS_TOLERANCE = 0.9


@dataclass
class ReferenceRun:
    """Two sequences ``[len]`` of tokens and their logits ``[len, V]``, each computed by the model alone.

    Args:
        agree: of what each rank has found, what counts for all; they have to decide alike.
    """

    sequences: list[Tensor]
    logits: list[Tensor]
    dtype: torch.dtype
    agree: Callable[[float], float] = lambda found: found

    @classmethod
    def of(cls, module: PreTrainedModel, vocab_size: int) -> ReferenceRun:
        """Ask ``module``, whose attention is its own."""
        sequences = _make_sequences(vocab_size, module.device)
        logits = [module(input_ids=sequence[None], use_cache=False).logits[0].float() for sequence in sequences]
        return cls(sequences, logits, module.dtype)

    @classmethod
    def elsewhere(cls, module: PreTrainedModel, vocab_size: int) -> ReferenceRun:
        """Of a rank whose logits nobody looks at: what it finds does not count."""
        sequences = _make_sequences(vocab_size, module.device)
        return cls(sequences, [sequence.new_zeros(len(sequence), 1).float() for sequence in sequences], module.dtype)

    def to(self, device: torch.device, agree: Callable[[float], float]) -> ReferenceRun:
        """The same on ``device``, for ranks that ``agree``."""
        sequences, logits = ([each.to(device) for each in found] for found in (self.sequences, self.logits))
        return ReferenceRun(sequences, logits, self.dtype, agree)


def _make_sequences(vocab_size: int, device: torch.device) -> list[Tensor]:
    # From 1 on: token 0 is often padding, which some models do not count.
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
    truth: ReferenceRun,
    tolerance: float | None = None,
    circumstance: str = "when requests are batched",
) -> float:
    """Compare what ``forward`` computes with ``truth``; return the error, above ``SURE`` if it leaves doubt.

    The caches of ``forward`` are made anew, so allocate the real ones afterwards.

    Args:
        tolerance: what they may differ by; None for that of rounding in the model's dtype.
        circumstance: in which ``forward`` is then said to give other results.

    Raises:
        ModelLoadError: they differ by more than rounding.
    """
    device = truth.sequences[0].device
    num_requests = len(_SEQUENCE_OF_REQUEST)
    forward.allocate(_BLOCKS_PER_REQUEST * num_requests, _BLOCK_SIZE, num_requests, device)
    num_computed = [0] * num_requests
    errors: dict[str, list[Tensor]] = {}
    for step in _STEPS:
        spans = [_Span(request, num_computed[request], num_computed[request] + num_new) for request, num_new in step]
        logits = forward.run(_model_input(spans, truth, device)).float()
        forward.commit()
        for span, ours in zip(spans, logits.split([span.end - span.start for span in spans]), strict=True):
            theirs = truth.logits[span.sequence][span.start : span.end]
            # A padding token may have no embedding, and then all its logits are zero.
            error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6)
            # By kind and by sequence, so that what goes wrong with a few tokens is not outvoted.
            errors.setdefault(span.kind, []).append(error)
            errors.setdefault(_NAME_OF_SEQUENCE[span.sequence], []).append(error)
            num_computed[span.request] = span.end
    medians = {kind: torch.cat(found).nan_to_num(torch.inf).median().item() for kind, found in errors.items()}
    kind, worst = max(medians.items(), key=lambda item: item[1])
    worst = truth.agree(worst)
    if worst > (tolerance_of(truth.dtype) if tolerance is None else tolerance):
        raise ModelLoadError(f"it gives other results {circumstance}: logits differ by {worst:.1%} in {kind}")
    return worst


def tolerance_of(dtype: torch.dtype) -> float:
    """What rounding in ``dtype`` may make of results, by the median of ``|difference| / |result|``."""
    return _TOLERANCES[dtype]


def _model_input(spans: list[_Span], truth: ReferenceRun, device: torch.device) -> ModelInput:
    """Each request has its blocks one after the other, so a token's slot is an offset plus its position."""
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
        token_ids=torch.cat([truth.sequences[span.sequence][span.start : span.end] for span in spans]),
        positions=positions,
        logit_rows=torch.arange(len(positions), device=device),
        batch=batch,
        state_slots=np.array([span.request for span in spans]),
    )
