"""Plain torch: the ground truth, and what runs where nothing is compiled.

A row draws by inverse CDF with one uniform number. That is the exact distribution, needs no noise of size ``[R, V]``
(62 ms at 64 x 49k for an exponential race, 4.6 ms for this), and is independent of the other rows.

The vocabulary is not sorted: the most probable tokens are taken first, and what does not end among them is found
another way. Which way depends on a row's own parameters and logits alone, or its neighbours could change its token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .draws import Draws

# How many of the most probable tokens are looked at: the first is enough for nearly every top_p.
_WIDTHS = (64, 1024)
_CDF_CHUNK = 256
# Passes of a bisection between the bit patterns of 0.0 and 1.0 (0x3F800000).
_FLOAT_BITS_BELOW_ONE = 30
# On the CPU rows are done a few at a time, in float32 of at most 8 MiB: above 32 MiB the C library maps and clears
# every buffer anew (argmax at 64 x 152k takes 27 ms in one piece and 10 ms in eight).
_CPU_PIECE_ELEMENTS = 1 << 21


def argmax(logits: Tensor) -> Tensor:
    """See ``sampling.argmax``."""
    # On bfloat16 it takes 5.6 ms at 64 x 49k, after a cast 1.3 ms.
    return torch.cat([piece.float().argmax(dim=-1) for piece in logits.split(_piece_rows(logits))])


def sample(logits: Tensor, draws: Draws) -> Tensor:
    """See ``sampling.sample``."""
    draws = draws.to(torch.device("cpu"))  # which row goes which way is decided there
    size = _piece_rows(logits)
    index = torch.arange(len(logits)).split(size)
    pieces = zip(logits.split(size), index, strict=True)
    return torch.cat([_sample_piece(piece.float(), draws.take(rows)) for piece, rows in pieces])


def _piece_rows(logits: Tensor) -> int:
    return max(1, len(logits) if logits.is_cuda else _CPU_PIECE_ELEMENTS // logits.shape[1])


def _sample_piece(logits: Tensor, draws: Draws) -> Tensor:
    is_random = draws.temperature > 0
    if is_random.all():
        return _sample_random(logits, draws)
    tokens = torch.argmax(logits, dim=-1)
    rows = torch.nonzero(is_random)[:, 0]
    index = rows.to(logits.device)
    tokens[index] = _sample_random(logits[index], draws.take(rows))
    return tokens


def _sample_random(logits: Tensor, draws: Draws) -> Tensor:
    """Sample rows that have a temperature; ``logits``, float32, is changed."""
    vocab_size = logits.shape[1]
    logits.div_(_column(draws.temperature, logits))
    tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    has_limit = (draws.top_k > 0) & (draws.top_k < vocab_size)
    is_nucleus = ~has_limit & (draws.top_p < 1)
    is_free = ~has_limit & ~is_nucleus
    for width in (*_WIDTHS, vocab_size):
        fits = has_limit & (draws.top_k <= width)
        has_limit &= ~fits
        now = torch.nonzero(fits | is_nucleus if width == _WIDTHS[0] else fits)[:, 0]
        if len(now):
            drawn, is_covered = _draw_from_top(_take(logits, now), draws.take(now), min(width, vocab_size))
            tokens[now.to(logits.device)] = drawn
            is_nucleus[now[is_covered]] = False
    for remaining, draw in ((is_nucleus, _draw_from_nucleus), (is_free, _draw_from_all)):
        now = torch.nonzero(remaining)[:, 0]
        if len(now):
            tokens[now.to(logits.device)] = draw(_take(logits, now), draws.take(now))
    return tokens


def _draw_from_top(logits: Tensor, draws: Draws, width: int) -> tuple[Tensor, Tensor]:
    """Draw from the ``width`` most probable tokens.

    Returns:
        The tokens ``[R]``, and on the CPU ``[R]`` whether a row's prefix ends within ``width``: else its token is void.
    """
    values, ids = logits.topk(width, dim=-1)
    weights = torch.exp(values - values[:, :1])
    threshold = _column(draws.min_p, weights)
    limit = torch.where(draws.top_k > 0, draws.top_k, logits.shape[1]).to(logits.device)[:, None]
    is_kept = (torch.arange(width, device=logits.device) < limit) & (weights >= threshold)
    weights.masked_fill_(~is_kept, 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rows whose prefix may go on behind the last token looked at: what top_p is a share of lies there too.
    goes_on = is_kept[:, -1:] & (limit > width)
    if goes_on.any():
        all_weights = torch.exp(logits - values[:, :1])
        all_weights.masked_fill_(all_weights < threshold, 0.0)
        total = torch.where(goes_on, all_weights.sum(dim=-1, keepdim=True).double(), total)
    nucleus = total * _column(draws.top_p, cumulative)
    is_covered = ~goes_on | (cumulative[:, -1:] >= nucleus)
    weights.masked_fill_(cumulative - weights >= nucleus, 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    index = _inverse_cdf(cumulative, _column(draws.uniforms, cumulative) * cumulative[:, -1:])
    return ids.gather(1, index)[:, 0], is_covered[:, 0].cpu()


def _draw_from_nucleus(logits: Tensor, draws: Draws) -> Tensor:
    """Draw from the smallest set that reaches ``top_p``, however many tokens that takes; ``logits`` is changed.

    The weight of its last token is found by bisection over the bits of a float: 30 passes, 0.4 ms a row of 49k where
    sorting takes 3.5. The draw then goes in the order of the vocabulary. Tokens tied with the last one are all kept.
    """
    weights = _weights(logits, draws)
    nucleus = weights.sum(dim=-1, keepdim=True) * _column(draws.top_p, weights)
    # Bit patterns of non-negative floats are in the order of their values. Between low and high: the set of weights
    # at least as large as low reaches the nucleus, that of high does not. Weights are at most 1.
    low = torch.zeros(len(weights), 1, dtype=torch.int32, device=weights.device)
    high = torch.ones_like(weights[:, :1]).view(torch.int32) + 1
    kept = torch.empty_like(weights)
    for _ in range(_FLOAT_BITS_BELOW_ONE):
        middle = (low + high) // 2
        # Comparing into floats and multiplying: torch.where takes ten times as long here.
        torch.ge(weights, middle.view(torch.float32), out=kept).mul_(weights)
        reaches = kept.sum(dim=-1, keepdim=True) >= nucleus
        low, high = torch.where(reaches, middle, low), torch.where(reaches, high, middle)
    weights.masked_fill_(weights < low.view(torch.float32), 0.0)
    return _draw(weights, draws)


def _draw_from_all(logits: Tensor, draws: Draws) -> Tensor:
    """Draw from the whole vocabulary, filtered by ``min_p`` alone; ``logits`` is changed."""
    return _draw(_weights(logits, draws), draws)


def _weights(logits: Tensor, draws: Draws) -> Tensor:
    """Probabilities relative to the row's largest, ``[R, V]``, 0 below ``min_p``; in the place of ``logits``."""
    weights = logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()
    if draws.min_p.any():
        weights.masked_fill_(weights < _column(draws.min_p, weights), 0.0)
    return weights


def _draw(weights: Tensor, draws: Draws) -> Tensor:
    """Draw by inverse CDF from ``weights``, ``[R, V]``.

    The CDF is made in two levels, sums of chunks and then one chunk: a cumulative sum over everything, in the
    float64 it needs, takes several times as long.
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
    """First index whose cumulative weight exceeds ``target``: ``[R, N]`` and ``[R, 1]`` to ``[R, 1]``.

    Never one of weight zero, even where rounding puts ``target`` at the total.
    """
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)


def _take(logits: Tensor, rows: Tensor) -> Tensor:
    """Some rows of ``logits``; a copy unless it is all of them."""
    return logits if len(rows) == len(logits) else logits[rows.to(logits.device)]


def _column(parameter: Tensor, like: Tensor) -> Tensor:
    """``[R]`` to ``[R, 1]`` with dtype and device of ``like``."""
    return parameter.to(like.device, like.dtype)[:, None]
