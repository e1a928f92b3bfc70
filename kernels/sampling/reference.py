"""Reference in plain torch: the ground truth of tests, and the fallback on any device.

A row draws by inverse CDF with one uniform number. This samples the exact distribution, needs no noise of size
``[R, V]`` (an exponential race takes 62 ms for 64 x 49k, this method 4.6 ms), and is independent of the other rows.

The vocabulary is not sorted. The most probable tokens are considered first, and rows that need more tokens use another
method. A row's own parameters and logits decide the method, so that other rows cannot change its token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .draws import Draws

# Numbers of most probable tokens to consider. The first is enough for nearly every top_p.
_WIDTHS = (64, 1024)
_CDF_CHUNK = 256
# Passes of a bisection between the bit patterns of 0.0 and 1.0 (0x3F800000).
_FLOAT_BITS_BELOW_ONE = 30
# On the CPU rows are processed in pieces of at most 8 MiB of float32, because the C library maps and clears every
# buffer above 32 MiB anew (argmax of 64 x 152k takes 27 ms in one piece and 10 ms in eight).
_CPU_PIECE_ELEMENTS = 1 << 21


def argmax(logits: Tensor) -> Tensor:
    """See ``sampling.argmax``."""
    # For 64 x 49k, argmax of bfloat16 takes 5.6 ms, and 1.3 ms after a cast.
    return torch.cat([piece.float().argmax(dim=-1) for piece in logits.split(_piece_rows(logits))])


def sample(logits: Tensor, draws: Draws) -> Tensor:
    """See ``sampling.sample``."""
    draws = draws.to(torch.device("cpu"))  # where the method of each row is chosen
    size = _piece_rows(logits)
    index = torch.arange(len(logits)).split(size)
    pieces = zip(logits.split(size), index, strict=True)
    return torch.cat([_sample_piece(piece.float(), draws.select(rows)) for piece, rows in pieces])


def _piece_rows(logits: Tensor) -> int:
    return max(1, len(logits) if logits.is_cuda else _CPU_PIECE_ELEMENTS // logits.shape[1])


def _sample_piece(logits: Tensor, draws: Draws) -> Tensor:
    is_random = draws.temperature > 0
    if is_random.all():
        return _sample_random(logits, draws)
    tokens = torch.argmax(logits, dim=-1)
    rows = torch.nonzero(is_random)[:, 0]
    index = rows.to(logits.device)
    tokens[index] = _sample_random(logits[index], draws.select(rows))
    return tokens


def _sample_random(logits: Tensor, draws: Draws) -> Tensor:
    """Sample rows with a temperature; ``logits``, float32, are overwritten."""
    vocab_size = logits.shape[1]
    logits.div_(_column(draws.temperature, logits))
    tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    has_limit = (draws.top_k > 0) & (draws.top_k < vocab_size)
    is_nucleus = ~has_limit & (draws.top_p < 1)
    is_free = ~has_limit & ~is_nucleus
    for width in (*_WIDTHS, vocab_size):
        fits = has_limit & (draws.top_k <= width)
        has_limit &= ~fits
        rows = torch.nonzero(fits | is_nucleus if width == _WIDTHS[0] else fits)[:, 0]
        if len(rows):
            drawn, is_covered = _draw_from_top(_select(logits, rows), draws.select(rows), min(width, vocab_size))
            tokens[rows.to(logits.device)] = drawn
            is_nucleus[rows[is_covered]] = False
    for remaining, draw in ((is_nucleus, _draw_from_nucleus), (is_free, _draw_from_all)):
        rows = torch.nonzero(remaining)[:, 0]
        if len(rows):
            tokens[rows.to(logits.device)] = draw(_select(logits, rows), draws.select(rows))
    return tokens


def _draw_from_top(logits: Tensor, draws: Draws, width: int) -> tuple[Tensor, Tensor]:
    """Draw from the ``width`` most probable tokens.

    Returns:
        The tokens ``[R]``, and ``[R]`` on the CPU whether a row's prefix ends within ``width``; its token is only valid
        then.
    """
    values, ids = logits.topk(width, dim=-1)
    weights = torch.exp(values - values[:, :1])
    threshold = _column(draws.min_p, weights)
    limit = torch.where(draws.top_k > 0, draws.top_k, logits.shape[1]).to(logits.device)[:, None]
    is_kept = (torch.arange(width, device=logits.device) < limit) & (weights >= threshold)
    weights.masked_fill_(~is_kept, 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rows whose prefix may continue after these tokens. The total that top_p refers to includes the rest, too.
    continues = is_kept[:, -1:] & (limit > width)
    if continues.any():
        all_weights = torch.exp(logits - values[:, :1])
        all_weights.masked_fill_(all_weights < threshold, 0.0)
        total = torch.where(continues, all_weights.sum(dim=-1, keepdim=True).double(), total)
    nucleus = total * _column(draws.top_p, cumulative)
    is_covered = ~continues | (cumulative[:, -1:] >= nucleus)
    weights.masked_fill_(cumulative - weights >= nucleus, 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    index = _inverse_cdf(cumulative, _column(draws.uniforms, cumulative) * cumulative[:, -1:])
    return ids.gather(1, index)[:, 0], is_covered[:, 0].cpu()


def _draw_from_nucleus(logits: Tensor, draws: Draws) -> Tensor:
    """Draw from the smallest set that reaches ``top_p``, of any number of tokens; ``logits`` are overwritten.

    The weight of its last token is found by bisection over the bits of a float: 30 passes, 0.4 ms for a row of 49k
    where sorting takes 3.5 ms. The draw then uses the order of the vocabulary. All tokens tied with the last one are
    kept.
    """
    weights = _weights(logits, draws)
    nucleus = weights.sum(dim=-1, keepdim=True) * _column(draws.top_p, weights)
    # Bit patterns of non-negative floats have the order of their values. Invariant: the weights of at least low reach
    # the nucleus, those of at least high do not. Weights are at most 1.
    low = torch.zeros(len(weights), 1, dtype=torch.int32, device=weights.device)
    high = torch.ones_like(weights[:, :1]).view(torch.int32) + 1
    kept_weights = torch.empty_like(weights)
    for _ in range(_FLOAT_BITS_BELOW_ONE):
        middle = (low + high) // 2
        # Compare into floats and multiply, because torch.where takes ten times as long here.
        torch.ge(weights, middle.view(torch.float32), out=kept_weights).mul_(weights)
        reaches = kept_weights.sum(dim=-1, keepdim=True) >= nucleus
        low, high = torch.where(reaches, middle, low), torch.where(reaches, high, middle)
    weights.masked_fill_(weights < low.view(torch.float32), 0.0)
    return _draw(weights, draws)


def _draw_from_all(logits: Tensor, draws: Draws) -> Tensor:
    """Draw from the whole vocabulary, filtered by ``min_p`` only; ``logits`` are overwritten."""
    return _draw(_weights(logits, draws), draws)


def _weights(logits: Tensor, draws: Draws) -> Tensor:
    """Overwrite ``logits`` ``[R, V]`` with probabilities relative to the row's largest, 0 below ``min_p``."""
    weights = logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()
    if draws.min_p.any():
        weights.masked_fill_(weights < _column(draws.min_p, weights), 0.0)
    return weights


def _draw(weights: Tensor, draws: Draws) -> Tensor:
    """Draw by inverse CDF from ``weights``, ``[R, V]``.

    The CDF has two levels, sums of chunks and then one chunk, because a cumulative sum over all tokens, which must be
    float64, takes several times as long.
    """
    vocab_size = weights.shape[1]
    whole = vocab_size // _CDF_CHUNK * _CDF_CHUNK
    sums = torch.cat(
        [weights[:, :whole].unflatten(1, (-1, _CDF_CHUNK)).sum(dim=-1), weights[:, whole:].sum(dim=-1, keepdim=True)],
        dim=-1,
    ).double()
    cumulative = sums.cumsum(dim=-1)
    target = _column(draws.uniforms, cumulative) * cumulative[:, -1:]
    chunk = _inverse_cdf(cumulative, target)
    before = cumulative.gather(1, chunk) - sums.gather(1, chunk)
    ids = chunk * _CDF_CHUNK + torch.arange(_CDF_CHUNK, device=weights.device)
    inner = weights.gather(1, ids.clamp(max=vocab_size - 1)).masked_fill_(ids >= vocab_size, 0.0)
    index = _inverse_cdf(inner.cumsum(dim=-1, dtype=torch.float64), target - before)
    return ids.gather(1, index)[:, 0]


def _inverse_cdf(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the first index whose cumulative weight exceeds ``target``: ``[R, N]`` and ``[R, 1]`` to ``[R, 1]``.

    It never has weight zero, even if rounding makes ``target`` equal to the total.
    """
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)


def _select(logits: Tensor, rows: Tensor) -> Tensor:
    """Return some rows of ``logits``; a copy, unless all rows are selected."""
    return logits if len(rows) == len(logits) else logits[rows.to(logits.device)]


def _column(parameter: Tensor, like: Tensor) -> Tensor:
    """Return ``[R]`` as ``[R, 1]`` with dtype and device of ``like``."""
    return parameter.to(like.device, like.dtype)[:, None]
