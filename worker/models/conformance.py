"""A check at load that a model gives the same results our way as its own way.

transformers holds hundreds of architectures. Some keep state besides keys and values, or mix the tokens of a sequence
elsewhere than in attention; packed with other requests' tokens they would answer nonsense without an error. So each
model computes two short sequences alone, as transformers does it, and then cut up and mixed, as the engine does it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.paged_attention import PagedBatch
from ...shared.errors import ModelLoadError
from .attention import PagedAttention

# Tokens of the two sequences that each of two steps computes. In the second the first sequence decodes and the other
# is in the middle of its prompt; decodes come first.
_STEPS = (((0, 5), (1, 3)), ((0, 1), (1, 4)))
_SEQUENCE_LENS = (6, 7)
_BLOCK_SIZE = 4
_BLOCKS_PER_SEQUENCE = 2
# Median over tokens of |difference| / |logits|. Seen on 22 architectures: below 1e-6 in float32 and 0 in bfloat16 where
# all is well, above 0.6 where it is not. The median, because rounding may send a token to another expert.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def sample_sequences(vocab_size: int, device: torch.device) -> list[Tensor]:
    """Token ids of the two sequences."""
    ids = torch.arange(sum(_SEQUENCE_LENS), device=device) * 7919 % vocab_size
    return list(ids.split(_SEQUENCE_LENS))


def check_conformance(architecture: str, forward: Forward, attention: PagedAttention, expected: list[Tensor]) -> None:
    """Compare packed steps with ``expected``, the logits ``[len, V]`` of each sequence on its own.

    Args:
        forward: ``LoadedModel.forward``.
        attention: recorded; its caches are made anew, so allocate the real ones afterwards.

    Raises:
        ModelLoadError: they differ by more than rounding.
    """
    device, vocab_size = expected[0].device, expected[0].shape[1]
    sequences = sample_sequences(vocab_size, device)
    attention.allocate(_BLOCKS_PER_SEQUENCE * len(sequences), _BLOCK_SIZE, device)
    num_computed = [0] * len(sequences)
    errors = []
    for step in _STEPS:
        spans = [(row, num_computed[row], num_computed[row] + num_new) for row, num_new in step]
        attention.begin(_packed(spans, device))
        positions = torch.cat([torch.arange(start, end, device=device) for _, start, end in spans])
        token_ids = torch.cat([sequences[row][start:end] for row, start, end in spans])
        logits = forward(token_ids, positions, torch.arange(len(positions), device=device)).float()
        truth = torch.cat([expected[row][start:end] for row, start, end in spans]).float()
        # A padding token may have no embedding, and then all its logits are zero.
        errors.append((logits - truth).norm(dim=-1) / truth.norm(dim=-1).clamp(min=1e-6))
        for row, _, end in spans:
            num_computed[row] = end
    error = torch.cat(errors).median().item()
    if not error <= _TOLERANCES[expected[0].dtype]:
        raise ModelLoadError(
            f"{architecture} gives other results when requests are batched (logits differ by {error:.1%}): it keeps "
            f"state besides keys and values, or mixes tokens outside attention, so it cannot be served"
        )


def _packed(spans: list[tuple[int, int, int]], device: torch.device) -> PagedBatch:
    """Each sequence has its blocks one after the other, so a token's slot is an offset plus its position."""
    blocks = torch.arange(_BLOCKS_PER_SEQUENCE, device=device)
    tables = [row * _BLOCKS_PER_SEQUENCE + blocks for row, _, _ in spans]
    slots = [
        row * _BLOCKS_PER_SEQUENCE * _BLOCK_SIZE + torch.arange(start, end, device=device) for row, start, end in spans
    ]
    return PagedBatch(
        torch.stack(tables),
        torch.cat(slots),
        query_lens=[end - start for _, start, end in spans],
        seq_lens=[end for _, _, end in spans],
        block_size=_BLOCK_SIZE,
    )
