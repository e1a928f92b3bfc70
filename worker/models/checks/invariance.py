"""A check at load that a model's logits do not depend on the batch, bit by bit.

A way of computing may say that of itself (``rows_alone.py``): then it is tried in forwards of any size. For the others
there are forwards of few sizes. They leave three questions open: whether this machine's products give a row the same
bits wherever it stands, and in each of those sizes, and whether the model computes in shapes that follow the data, as
one that sends tokens to experts does. None is written down anywhere. So a short prompt is computed in many ways, by the
forwards that will serve. Every shape that they will ever have is among them; hence the third question has its own test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ....shared.errors import ConfigurationError
from ..loader import LoadedModel
from ..ways.fixed_shapes import IntArray, PackedTokens, forward_at_once, forward_in_tiles

# The large one is for throughput, the small one for a request alone: the demo model makes 138 tokens/s in forwards of
# 32, 283 of 8 and 294 of 4, and 32 requests together 2,790, 1,250 and 700.
_TILE_SIZES = (32, 8)
# Tokens of a forward of any size, in the check: more than two tiles of any processor, and no multiple of one.
_MANY_TOKENS = 41
_PROMPT_LEN = 6
_BLOCK_SIZE = 4
_BLOCKS_PER_SEQUENCE = 2
# Multiplies a matrix for each expert, as many rows as it gets; its own shape does not tell.
_OPS_OVER_EXPERTS = ("_grouped_mm", "_scaled_grouped_mm")

# Logits of the packed tokens of a step.
Compute = Callable[[PackedTokens], Tensor]
# (sequence, position) of each token of a step. Sequences below the tile size are copies of the prompt, others random.
Step = list[tuple[int, int]]

log = structlog.get_logger(__name__)


@torch.inference_mode()
def keeps_bits(model: LoadedModel) -> bool:
    """Whether the logits of ``model`` have the same bits however requests are cut and batched, in forwards of any size.

    Asked of what says so of itself (``rows_alone.py``). Its caches are made anew: allocate the real ones afterwards.
    """
    if not model.computes_rows_alone:
        return False
    is_invariant = _invariant_logits(model, _MANY_TOKENS, partial(forward_at_once, model, block_size=_BLOCK_SIZE))
    if is_invariant is not None:
        log.info("deterministic", tile_sizes=[])
    return is_invariant is not None


@torch.inference_mode()
def choose_tile_sizes(model: LoadedModel) -> tuple[int, ...]:
    """Return sizes of a forward, ascending, such that the logits of ``model`` have the same bits in any of them.

    The caches of ``model.forward``, whose attention must be batch-invariant, are made anew: allocate the real ones
    afterwards.

    Raises:
        ConfigurationError: not even forwards of one token do, or the model is not computed packed.
    """
    if model.forward.mode not in ("lean", "packed"):
        raise ConfigurationError(
            f"--deterministic needs a model whose tokens are packed, and {model.architecture} is computed in the mode "
            f"{model.forward.mode!r}; start without --deterministic"
        )
    if model.forward.keeps_state:
        # A state is that of its request's last token: what was computed before cannot be computed again beside it.
        raise ConfigurationError(
            f"--deterministic needs a model that keeps nothing but keys and values of a request, and "
            f"{model.architecture} keeps states, too; start without --deterministic"
        )
    sizes: list[int] = []
    expected = None
    for tile_size in _TILE_SIZES:
        logits = _logits_in_tiles(model, tile_size) if _has_fixed_shapes(model, tile_size) else None
        expected = logits if expected is None else expected
        if logits is not None and expected is not None and torch.equal(logits, expected):
            sizes.insert(0, tile_size)
    if not sizes and _logits_in_tiles(model, 1) is not None:
        sizes = [1]
    if not sizes:
        raise ConfigurationError(
            f"--deterministic cannot be kept: the logits of {model.architecture} depend on the batch here, even with "
            f"one token per forward; start without --deterministic"
        )
    log.info("deterministic", tile_sizes=sizes)
    return tuple(sizes)


def _has_fixed_shapes(model: LoadedModel, tile_size: int) -> bool:
    """Whether a tile of equal tokens and one of random ones make the same operations on tensors of equal shapes."""
    token_ids = _allocate(model, tile_size)
    traces = []
    for first in (0, tile_size):
        with _ShapeTrace() as trace:
            tokens = _packed(token_ids, [(first + row, 0) for row in range(tile_size)])
            forward_in_tiles(model, tokens, (tile_size,), _BLOCK_SIZE)
        traces.append(trace.calls)
    has_experts = any(name.split(".")[1] in _OPS_OVER_EXPERTS for name, *_ in traces[0])
    return traces[0] == traces[1] and not has_experts


def _logits_in_tiles(model: LoadedModel, tile_size: int) -> Tensor | None:
    return _invariant_logits(
        model, tile_size, partial(forward_in_tiles, model, tile_sizes=(tile_size,), block_size=_BLOCK_SIZE)
    )


def _invariant_logits(model: LoadedModel, num_tokens: int, compute: Compute) -> Tensor | None:
    """The prompt's logits ``[_PROMPT_LEN, V]`` if ``compute`` gives the same in all ``_steps``."""
    token_ids = _allocate(model, num_tokens)
    expected = None
    for step in _steps(num_tokens):
        logits = compute(_packed(token_ids, step))
        if expected is None:
            expected = logits
        rows = [row for row, (sequence, _) in enumerate(step) if sequence < num_tokens]
        if not torch.equal(logits[rows], expected[[step[row][1] for row in rows]]):
            return None
    return expected


def _steps(tile_size: int) -> Iterator[Step]:
    """The first computes the prompt alone and at once; what follows computes it again in other ways."""
    prompt, other = 0, tile_size
    yield _span(prompt, 0, _PROMPT_LEN)
    for start, stop in ((0, 1), (1, 3), (3, _PROMPT_LEN)):
        yield _span(prompt, start, stop)
    yield _span(other, 0, 3) + _span(prompt, 0, _PROMPT_LEN) + _span(other + 1, 0, _PROMPT_LEN)
    # Every token of the prompt in every row of a tile.
    for position in range(_PROMPT_LEN):
        yield [(sequence, position) for sequence in range(tile_size)]
    # In random rows among others. What is computed again is computed to its end, as in serving: a value may be stored
    # with a zero for its successor.
    random = np.random.default_rng(0)
    sequences = random.permutation(2 * tile_size)[:tile_size]
    for position in range(_PROMPT_LEN):
        yield [(sequence, position) for sequence in random.permutation(sequences).tolist()]


def _span(sequence: int, start: int, stop: int) -> Step:
    return [(sequence, position) for position in range(start, stop)]


def _allocate(model: LoadedModel, num_tokens: int) -> IntArray:
    """Make caches for the sequences; return their token ids, ``[2 * num_tokens + 1, _PROMPT_LEN]``."""
    num_sequences = 2 * num_tokens + 1
    model.forward.allocate(num_sequences * _BLOCKS_PER_SEQUENCE, _BLOCK_SIZE, num_sequences, model.device)
    token_ids = np.random.default_rng(0).integers(0, model.vocab_size, (num_sequences, _PROMPT_LEN))
    token_ids[:num_tokens] = token_ids[0]
    return token_ids


def _packed(token_ids: IntArray, step: Step) -> PackedTokens:
    """All tokens of ``step``; the blocks of a sequence lie one after the other, and the sequences too."""
    sequences, positions = np.ascontiguousarray(np.array(step).T)
    return PackedTokens(
        token_ids=token_ids[sequences, positions],
        positions=positions,
        slot_mapping=sequences * _BLOCKS_PER_SEQUENCE * _BLOCK_SIZE + positions,
        block_table=np.arange(len(token_ids) * _BLOCKS_PER_SEQUENCE).reshape(-1, _BLOCKS_PER_SEQUENCE),
        table_rows=sequences,
        logit_rows=np.arange(len(step)),
    )


class _ShapeTrace(TorchDispatchMode):
    """Notes the name and the shapes of the arguments of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.calls.append((str(func), *(arg.shape for arg in args if isinstance(arg, Tensor))))
        return func(*args, **(kwargs or {}))
