"""Forwards of one or two sizes, and the check at load that logits do not depend on the batch, bit by bit.

The packed tokens of a step are cut into tiles in order, across requests and within them, so the shapes of a forward do
not follow the batch. Tiles run one after the other, so a later one finds the keys and values of the earlier ones in the
cache. The last tile is filled up with copies of its last token, whose slot is -1: they are not stored, and their
results are not read.

A forward that is row independent by construction (``row_independence.py``) is tried in any size. For other forwards
three questions are open: whether this machine's matrix products give a row the same bits wherever it stands, whether
they do so in each of the sizes, and whether shapes inside the model follow the data, as they do when tokens are sent to
experts. No documentation answers them. So the check computes a short prompt in many ways, by the forwards that will
serve. They use every shape that will ever occur, which answers the first two; the third has its own test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ....kernels.paged_attention import PagedBatch
from ....shared.errors import ConfigurationError
from ..forward import ModelInput
from ..lean.captured import TILE_SIZES, CapturedForward, without_graphs
from ..loaded import LoadedModel
from ..placing.device import to_device

log = structlog.get_logger(__name__)

# The large size is for throughput, the small one for a single request. The demo model: 138 tokens/s in forwards of 32,
# 283 of 8 and 294 of 4; with 32 requests 2,790, 1,250 and 700. One token is the last resort.
_ONE, *_TILE_SIZES = TILE_SIZES
# Tokens of a forward of any size in the check: more than two tiles of any processor, and no multiple of one.
_MANY_TOKENS = 41
_PROMPT_LEN = 6
_BLOCK_SIZE = 4
_BLOCKS_PER_SEQUENCE = 2
# Multiplications with one matrix per expert, whose rows depend on the data although the arguments' shapes do not.
_OPS_OVER_EXPERTS = ("_grouped_mm", "_scaled_grouped_mm")

IntArray = NDArray[np.int64]


@dataclass
class PackedTokens:
    """Tokens of any requests; those of one request are in order.

    Args:
        token_ids, positions, slot_mapping: ``[T]``.
        block_table: ``[B, MB]``.
        table_rows: ``[T]``, each token's row of ``block_table``.
        logit_rows: ``[R]`` ascending, indices of tokens that need logits.
        inputs_embeds: ``[T, hidden size]``, used instead of the embeddings of ``token_ids``; None for those.
        token_lora: ``[T]``, as in ``ModelInput``.
        group_tables, group_slots: ``[G, B, MB]`` and ``[G, T]``, as in ``PagedBatch``.
    """

    token_ids: IntArray
    positions: IntArray
    slot_mapping: IntArray
    block_table: IntArray
    table_rows: IntArray
    logit_rows: IntArray
    inputs_embeds: Tensor | None = None
    token_lora: IntArray | None = None
    group_tables: IntArray | None = None
    group_slots: IntArray | None = None


def forward_in_tiles(model: LoadedModel, tokens: PackedTokens, tile_sizes: tuple[int, ...], block_size: int) -> Tensor:
    """Run ``tokens`` through the model in forwards of ``tile_sizes``, ascending; return logits ``[R, V]``."""
    tiles = _cut(len(tokens.token_ids), tile_sizes)
    return torch.cat([_forward_tile(model, tokens, start, size, block_size) for start, size in tiles])


def forward_at_once(model: LoadedModel, tokens: PackedTokens, block_size: int) -> Tensor:
    """Run ``tokens`` through the model in one forward; return logits ``[R, V]``.

    Adjacent tokens of a request are computed as one chunk.
    """
    device = model.device
    starts = np.flatnonzero(np.diff(tokens.table_rows, prepend=-1))
    query_lens = np.diff(starts, append=len(tokens.token_ids))
    rows = tokens.table_rows[starts]
    batch = PagedBatch(
        block_table=to_device(tokens.block_table[rows], device),
        slot_mapping=to_device(tokens.slot_mapping, device),
        query_lens=query_lens.tolist(),
        seq_lens=(tokens.positions[starts + query_lens - 1] + 1).tolist(),
        block_size=block_size,
    )
    return model.forward.run(
        ModelInput(
            token_ids=to_device(tokens.token_ids, device),
            positions=to_device(tokens.positions, device),
            logit_rows=to_device(tokens.logit_rows, device),
            batch=batch,
            state_slots=rows,
        )
    )


def _cut(num_tokens: int, tile_sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield start and size of each tile: of the largest size, and of the smallest that holds the rest."""
    start = 0
    while start < num_tokens:
        size = next((size for size in tile_sizes if size >= num_tokens - start), tile_sizes[-1])
        yield start, size
        start += size


def _forward_tile(model: LoadedModel, tokens: PackedTokens, start: int, tile_size: int, block_size: int) -> Tensor:
    """Return the requested logits of the tile that begins with token ``start``."""
    device = model.device
    # Graphs take all inputs from the host in one copy.
    input_device = torch.device("cpu") if isinstance(model.forward, CapturedForward) else device
    stop = min(start + tile_size, len(tokens.token_ids))
    index = np.minimum(np.arange(start, start + tile_size), stop - 1)
    is_token = np.arange(tile_size) < stop - start
    seq_lens = tokens.positions[index] + 1
    num_blocks = -(-int(seq_lens.max()) // block_size)
    # Every token is a row, a decode, so a request's second token in a tile is like any other.
    batch = PagedBatch(
        block_table=to_device(tokens.block_table[tokens.table_rows[index], :num_blocks], input_device),
        slot_mapping=to_device(np.where(is_token, tokens.slot_mapping[index], -1), input_device),
        query_lens=[1] * tile_size,
        seq_lens=seq_lens.tolist(),
        block_size=block_size,
    )
    if tokens.group_tables is not None and tokens.group_slots is not None:
        tables = tokens.group_tables[:, tokens.table_rows[index], :num_blocks]
        batch.group_tables = to_device(np.ascontiguousarray(tables), input_device)
        batch.group_slots = to_device(np.where(is_token, tokens.group_slots[:, index], -1), input_device)
    rows = tokens.logit_rows[(tokens.logit_rows >= start) & (tokens.logit_rows < stop)] - start
    # The last layer also gets a whole tile. A tile without requested logits computes one unused row.
    logit_rows = np.arange(tile_size if len(rows) else 1)
    step = ModelInput(
        token_ids=to_device(tokens.token_ids[index], input_device),
        positions=to_device(tokens.positions[index], input_device),
        logit_rows=to_device(logit_rows, input_device),
        batch=batch,
        state_slots=tokens.table_rows[index],
        inputs_embeds=None if tokens.inputs_embeds is None else tokens.inputs_embeds[to_device(index, device)],
        token_lora=None if tokens.token_lora is None else to_device(tokens.token_lora[index], input_device),
    )
    logits = model.forward.run(step)
    return logits[to_device(rows, device)]


# Returns the logits of a step's packed tokens.
Compute = Callable[[PackedTokens], Tensor]
# (sequence, position) of each token of a step. Sequences below the tile size are copies of the prompt, others random.
Step = list[tuple[int, int]]


@torch.inference_mode()
def is_invariant_in_any_size(model: LoadedModel) -> bool:
    """Whether logits have the same bits however requests are cut and batched, in forwards of any size.

    False unless the layers show it (``row_independence.py``). Caches are allocated again: allocate the real ones after
    it.
    """
    if not model.is_row_independent:
        return False
    is_invariant = _invariant_logits(model, _MANY_TOKENS, partial(forward_at_once, model, block_size=_BLOCK_SIZE))
    if is_invariant is not None:
        log.info("deterministic", tile_sizes=[])
    return is_invariant is not None


@torch.inference_mode()
def choose_tile_sizes(model: LoadedModel) -> tuple[int, ...]:
    """Return sizes of a forward, ascending, for which the logits of ``model`` have the same bits.

    The caches of ``model.forward``, whose attention must be batch-invariant, are allocated again: allocate the real
    ones afterwards.

    Raises:
        ConfigurationError: even forwards of one token do not, or the model is not computed packed.
    """
    if model.forward.mode not in ("lean", "packed"):
        raise ConfigurationError(
            f"--deterministic needs a model whose tokens are packed, and {model.architecture} is computed in the mode "
            f"{model.forward.mode!r}; start without --deterministic"
        )
    if model.forward.keeps_state:
        # A state is that of the request's last token, so earlier tokens cannot be computed again in the same step.
        raise ConfigurationError(
            f"--deterministic needs a model that keeps nothing but keys and values of a request, and "
            f"{model.architecture} keeps states, too; start without --deterministic"
        )
    sizes: list[int] = []
    expected = None
    for tile_size in reversed(_TILE_SIZES):
        logits = _logits_in_tiles(model, tile_size) if _has_fixed_shapes(model, tile_size) else None
        expected = logits if expected is None else expected
        if logits is not None and expected is not None and torch.equal(logits, expected):
            sizes.insert(0, tile_size)
    if not sizes and _logits_in_tiles(model, _ONE) is not None:
        sizes = [_ONE]
    if not sizes:
        raise ConfigurationError(
            f"--deterministic cannot be kept: the logits of {model.architecture} depend on the batch here, even with "
            f"one token per forward; start without --deterministic"
        )
    log.info("deterministic", tile_sizes=sizes)
    return tuple(sizes)


def _has_fixed_shapes(model: LoadedModel, tile_size: int) -> bool:
    """Whether a tile of equal tokens and one of random tokens run the same operations on tensors of equal shapes."""
    token_ids = _allocate(model, tile_size)
    # A graph's replay shows no operations.
    model = replace(model, forward=without_graphs(model.forward))
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
    """Return the prompt's logits ``[_PROMPT_LEN, V]``; None unless ``compute`` gives the same ones in all
    ``_steps``.
    """
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
    """Yield steps. The first computes the prompt alone in one forward; the others compute it again in other ways."""
    prompt, other = 0, tile_size
    yield _span(prompt, 0, _PROMPT_LEN)
    for start, stop in ((0, 1), (1, 3), (3, _PROMPT_LEN)):
        yield _span(prompt, start, stop)
    yield _span(other, 0, 3) + _span(prompt, 0, _PROMPT_LEN) + _span(other + 1, 0, _PROMPT_LEN)
    # Every token of the prompt in every row of a tile.
    for position in range(_PROMPT_LEN):
        yield [(sequence, position) for sequence in range(tile_size)]
    # Random rows among other sequences. A prompt that is computed again is computed to its end, as in serving, because
    # a value may be stored together with a zero for its successor.
    random = np.random.default_rng(0)
    sequences = random.permutation(2 * tile_size)[:tile_size]
    for position in range(_PROMPT_LEN):
        yield [(sequence, position) for sequence in random.permutation(sequences).tolist()]


def _span(sequence: int, start: int, stop: int) -> Step:
    return [(sequence, position) for position in range(start, stop)]


def _allocate(model: LoadedModel, num_tokens: int) -> IntArray:
    """Allocate caches for the sequences; return their token ids, ``[2 * num_tokens + 1, _PROMPT_LEN]``."""
    num_sequences = 2 * num_tokens + 1
    model.forward.allocate(num_sequences * _BLOCKS_PER_SEQUENCE, _BLOCK_SIZE, num_sequences, model.device)
    token_ids = np.random.default_rng(0).integers(0, model.vocab_size, (num_sequences, _PROMPT_LEN))
    token_ids[:num_tokens] = token_ids[0]
    return token_ids


def _packed(token_ids: IntArray, step: Step) -> PackedTokens:
    """Return all tokens of ``step``. Blocks of a sequence are contiguous, and sequences follow each other."""
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
    """Records the name and argument shapes of every operation."""

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
