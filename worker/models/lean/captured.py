"""The lean path's decodes as CUDA graphs: one launch in the place of hundreds.

A step whose rows are all decodes is copied into buffers that stay where they are, and replayed at the next larger of
the sizes that were captured. Rows that are not in use have no slot and a length of 0: they store nothing, read nothing
and are not looked at. Every other step runs one operation at a time, as it would without graphs.

The product with ``lm_head`` is in no graph. Its result belongs to the step, which changes it when it samples, so a
graph would have to hand out a copy: with 256 rows of 151,936 words in 16 bits 78 MB to read and to write, 50 us at
3 TB/s. And the pool would hold such a result for each size. What it costs is one launch more.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from ....kernels.paged_attention import PagedBatch, is_capturable
from ..cache.page_layout import PageLayout
from ..forward import Forward, ModelInput
from .cuda_graph import CudaGraphRecorder, Recorder
from .feed_forward import OwnMlp
from .forward import LeanForward
from .of_lean import OfLean

_MAX_SIZE = 512
# Their code looks at positions on the host, or copies from there.
_ROPE_ON_HOST = ("dynamic", "longrope")

log = structlog.get_logger(__name__)


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of rows to capture, ascending: 1, 2, 4, every 8th to 256, every 32nd to 512, and the largest batch.

    A decode waits for the weights, which up to some hundred rows are read once for all: 7 rows of padding cost next to
    nothing, and neither do 31 of 300. So many sizes cost a start seconds and some memory; beyond 512 the kernels are
    long enough to hide their launches. (vLLM captures 1, 2, 4, then every 8th to 256 and every 16th to 512.)
    """
    limit = min(max_num_seqs, _MAX_SIZE)
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, _MAX_SIZE, 32))
    return (*(size for size in steps if size < limit), limit)


class DecodeBuffers:
    """Inputs and result of decodes of up to ``N`` rows, at addresses that stay. At first no row is in use.

    Args:
        num_columns: of the block table.
        like: a tensor ``[..., hidden size]`` of the result's dtype and device.
        num_groups: how many block tables a request has.
    """

    def __init__(self, num_rows: int, num_columns: int, like: Tensor, num_groups: int = 1) -> None:
        new = partial(torch.zeros, dtype=torch.int64, device=like.device)
        self._token_ids, self._positions = new(num_rows), new(num_rows)
        self._slots = new((num_groups, num_rows)) - 1
        self._tables = new((num_groups, num_rows, num_columns))
        self._seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=like.device)
        self._logit_rows = torch.arange(num_rows, device=like.device)
        self._token_lora = new(num_rows) - 1
        self.hidden = like.new_zeros(num_rows, like.shape[-1])

    def input_of(self, size: int, max_seq_len: int, block_size: int, *, has_adapters: bool) -> ModelInput:
        """The first ``size`` rows as a step whose requests have at most ``max_seq_len`` tokens."""
        tables, slots = self._tables[:, :size], self._slots[:, :size]
        of_groups = (tables, slots) if len(tables) > 1 else ()
        return ModelInput(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            logit_rows=self._logit_rows[:size],
            batch=PagedBatch.captured_decode(
                tables[0], slots[0], self._seq_lens[:size], max_seq_len, block_size, *of_groups
            ),
            state_slots=np.zeros(size, np.int64),
            token_lora=self._token_lora[:size] if has_adapters else None,
        )

    def fill(self, step: ModelInput, size: int) -> None:
        """Copy the rows of ``step``, all decodes; the others of the first ``size`` are not in use then."""
        batch, num_rows = step.batch, len(step.token_ids)
        self._token_ids[:num_rows].copy_(step.token_ids)
        self._positions[:num_rows].copy_(step.positions)
        slots = batch.slot_mapping if batch.group_slots is None else batch.group_slots
        tables = batch.block_table if batch.group_tables is None else batch.group_tables
        self._slots[:, :num_rows].copy_(slots)
        # What a table has beyond is of no request.
        table = tables[..., : self._tables.shape[2]]
        self._tables[:, :num_rows, : table.shape[-1]].copy_(table)
        self._seq_lens[:num_rows].copy_(batch.device_rows.seq_lens)
        if step.token_lora is not None:
            self._token_lora[:num_rows].copy_(step.token_lora)
            self._token_lora[num_rows:size].fill_(-1)
        if num_rows < size:
            self._slots[:, num_rows:size].fill_(-1)
            self._seq_lens[num_rows:size].zero_()


@dataclass(frozen=True)
class _Graphs:
    """What was captured: ``replays`` by size and whether with adapters, on ``buffers`` and on the weights at these
    addresses."""

    replays: dict[tuple[int, bool], Callable[[], None]]
    buffers: DecodeBuffers
    weight_addresses: tuple[int, ...]


class CapturedForward(OfLean):
    """See ``forward.Forward``: what a lean one computes, on the same weights and in the same caches.

    Args:
        make_recorder: what captures on a device; called for every set of graphs.
    """

    def __init__(
        self, lean: LeanForward, make_recorder: Callable[[torch.device], Recorder] = CudaGraphRecorder
    ) -> None:
        super().__init__(lean)
        self._make_recorder = make_recorder
        self._sizes: tuple[int, ...] = ()
        self._num_columns = 0
        self._num_groups = 1
        self._block_size = 0
        self._graphs: _Graphs | None = None

    @property
    def caches(self) -> list[Tensor]:
        """See ``LeanForward.caches``."""
        return self.lean.caches

    def allocate(self, num_blocks: int, block_size: int, num_slots: int, device: torch.device) -> None:
        self._let_go()
        self.lean.allocate(num_blocks, block_size, num_slots, device)
        if num_blocks > 0:
            self._capture_for(num_blocks, block_size, num_slots, device, num_groups=1)

    def allocate_pages(
        self, layout: PageLayout, num_pages: int, block_size: int, num_slots: int, device: torch.device
    ) -> None:
        """See ``pages.PagedByGroups``."""
        self._let_go()
        self.lean.allocate_pages(layout, num_pages, block_size, num_slots, device)
        self._capture_for(num_pages, block_size, num_slots, device, num_groups=len(layout.windows))

    def _let_go(self) -> None:
        """Of what holds the caches that were."""
        self._graphs = None
        self._sizes = ()

    def _capture_for(
        self, num_blocks: int, block_size: int, num_slots: int, device: torch.device, *, num_groups: int
    ) -> None:
        self._sizes, self._num_groups = capture_sizes(num_slots), num_groups
        self._block_size = block_size
        self._num_columns = min(num_blocks, -(-self.lean.max_model_len // block_size))
        # Weights may still be asleep when the cache wakes up; then ``capture`` is called when they are back.
        if self.network.embed_tokens.weight.device.type == device.type:
            self.capture()

    def capture(self) -> None:
        """Capture every size, unless that is done, on the weights where they are now. Does nothing without a cache."""
        if not self._sizes or (self._graphs is not None and self._graphs.weight_addresses == self._weight_addresses()):
            return
        self._graphs = None  # first let go of what was
        self._graphs = self._capture()

    def run(self, step: ModelInput) -> Tensor:
        num_rows = len(step.batch.query_lens)
        place = bisect_left(self._sizes, num_rows)
        if place == len(self._sizes) or step.batch.num_decodes < num_rows or step.inputs_embeds is not None:
            return self.lean.run(step)
        self.capture()
        assert self._graphs is not None
        size, buffers = self._sizes[place], self._graphs.buffers
        buffers.fill(step, size)
        self._graphs.replays[size, step.token_lora is not None]()
        is_whole = len(step.logit_rows) == num_rows
        # It is read in the order of the stream, before the next step's replay writes over it.
        return self.network.logits(buffers.hidden[:num_rows] if is_whole else buffers.hidden[step.logit_rows])

    def _weight_addresses(self) -> tuple[int, ...]:
        """Of the first and the last weight: who moves weights moves all, and asking hundreds would cost every step."""
        return self.network.embed_tokens.weight.data_ptr(), self.network.norm.weight.data_ptr()

    # Caches are made outside of steps, where autograd would keep what every layer has computed.
    @torch.inference_mode()
    def _capture(self) -> _Graphs:
        """Capture every size, the largest first, so that the others find its memory in the pool."""
        started = time.perf_counter()
        weight = self.network.embed_tokens.weight
        free_before = _free_bytes(weight.device)
        recorder = self._make_recorder(weight.device)
        buffers = DecodeBuffers(self._sizes[-1], self._num_columns, weight, self._num_groups)
        max_seq_len = min(self.lean.max_model_len, self._num_columns * self._block_size)
        replays = {}
        kinds = (False, True) if self.network.token_adapters.is_used else (False,)
        for size, has_adapters in itertools.product(reversed(self._sizes), kinds):
            step = buffers.input_of(size, max_seq_len, self._block_size, has_adapters=has_adapters)
            replays[size, has_adapters] = recorder(partial(self._transform, step, buffers.hidden[:size]))
        log.info(
            "cuda_graphs",
            count=len(replays),
            max_rows=self._sizes[-1],
            seconds=round(time.perf_counter() - started, 1),
            mib=(free_before - _free_bytes(weight.device)) >> 20,
        )
        return _Graphs(replays, buffers, self._weight_addresses())

    def _transform(self, step: ModelInput, out: Tensor) -> None:
        # Copied out, so that nothing keeps memory of the pool from the other graphs.
        out.copy_(self.lean.transform(step))


def make_captured(forward: Forward) -> Forward:
    """Return ``forward``, or what computes the same and replays its decodes, where there is such a thing."""
    if not isinstance(forward, LeanForward):
        return forward
    obstacle = _obstacle(forward)
    if obstacle is not None:
        log.info("no_cuda_graphs", reason=obstacle)
        return forward
    return CapturedForward(forward)


def plain_of(forward: Forward) -> Forward:
    """What computes the same without graphs, in the same caches: ``forward`` itself unless it has some."""
    return forward.lean if isinstance(forward, CapturedForward) else forward


def _obstacle(lean: LeanForward) -> str | None:
    """Why the decodes of ``lean`` cannot be captured; None if they can."""
    weight = lean.network.embed_tokens.weight
    if lean.keeps_state:
        return "it keeps states besides keys and values"
    if lean.is_batch_invariant:
        # The check at load watches the operations of each forward, and a replay shows none.
        return "a deterministic engine computes in tiles"
    if not is_capturable(weight.device, weight.dtype, lean.attention_backend):
        return f"there is no attention kernel for {weight.dtype} on {weight.device.type}"
    if any(isinstance(part, OwnMlp) for part in lean.network.modules()):
        return "its experts are computed by transformers"
    if any(_looks_at_positions(module) for module in lean.network.rotary_embs):
        return "its rotary embedding follows the batch"
    return None


def _looks_at_positions(rotary_emb: nn.Module) -> bool:
    kinds: Any = getattr(rotary_emb, "rope_type", None)
    return any(kind in _ROPE_ON_HOST for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
