"""The lean path's steps as CUDA graphs: one launch instead of hundreds.

A step is copied from the host into buffers with fixed addresses, in one copy, and replayed at the next larger captured
size: a step of decodes only by its number of rows, another by its numbers of tokens and rows. Unused rows and tokens
have no slot and no length: they store nothing, read nothing and their results are ignored. A step of another kind, or a
larger one, runs one operation at a time, as without graphs.

A start captures a third of the sizes, of which each is at most twice the one before. The others follow between
requests, those that steps have asked for first; until then steps take a larger one.

The product with ``lm_head`` is in no graph. Its result belongs to the step, which changes it when it samples, so a
graph would have to return a copy: with 256 rows of 151,936 words in 16 bits 78 MB to read and to write, 50 us at 3
TB/s. And the pool would hold such a result per size. Leaving it out costs one launch more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import structlog
import torch
from torch import Tensor, nn

from ....kernels.paged_attention import is_capturable
from ..attention.page_layout import PageLayout
from ..forward import Forward, ModelInput
from .forward import LeanForward, LeanWrapper
from .layers.feed_forward import OwnMlp
from .layers.rotation import AngleTable
from .step_graphs import DecodeGraphs, GraphLayout, PromptGraphs, on_device

log = structlog.get_logger(__name__)

# Kinds of RoPE whose code reads positions on the host, or copies from there.
_ROPE_ON_HOST = ("dynamic", "longrope")

_MAX_ROWS = 512
_MAX_TOKENS = 2048
_TOKEN_SIZES = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, _MAX_TOKENS)
# For steps with prompts. Few rows with long contexts have their keys split among more programs than many rows.
_FEW_ROWS = 16
# Numbers of tokens of a deterministic forward, each a decode (``loading/fixed_shapes.py``).
TILE_SIZES = (1, 8, 32)
# Multiplications and additions of a layer's products that keep a device as busy as the host is when it launches the
# layer: 0.7 ms of a Python host at 600 TFLOP/s of a Hopper GPU (ops/lab/reports/gpu.md).
_LAYER_FLOP = 4e11


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows for which to capture decodes: 1, 2, 4, every 8th to 256, every 32nd to 512, and the
    largest.

    Decodes are bound by reading the weights, which up to some hundred rows are read once for all. So 7 rows of padding
    cost almost nothing, and neither do 31 of 300. This many sizes cost a start seconds and some memory. Beyond 512 rows
    the kernels take long enough to hide their launches. (vLLM captures 1, 2, 4, then every 8th to 256 and every 16th to
    512.)
    """
    limit = min(max_num_seqs, _MAX_ROWS)
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, _MAX_ROWS, 32))
    return (*(size for size in steps if size < limit), limit)


def token_sizes(token_budget: int, network: nn.Module) -> tuple[int, ...]:
    """Return the numbers of tokens for which to capture steps with prompts, ascending; from the second on at most a
    third is padding.

    They end where the device no longer waits for the host. Beyond that, padding costs more than launches.
    """
    layers: list[nn.Module] = list(network.get_submodule("layers").children())
    tensors = (tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers()))
    layer_weights = sum(tensor.numel() for tensor in tensors) / len(layers)
    limit = min(token_budget, _MAX_TOKENS, int(_LAYER_FLOP / (2 * layer_weights)))
    sizes = tuple(size for size in _TOKEN_SIZES if size <= limit)
    # Steps of a long prompt are as large as the budget.
    is_last = limit < token_budget or token_budget in sizes or token_budget < 2
    return sizes if is_last else (*sizes, token_budget)


def row_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows for which to capture steps with prompts, ascending."""
    limit = min(max_num_seqs, _MAX_ROWS)
    return (_FEW_ROWS, limit) if limit > _FEW_ROWS else (limit,)


def first_sizes(sizes: Sequence[int]) -> frozenset[int]:
    """Return those of ascending sizes to capture at the start: powers of two, and the largest."""
    return frozenset((*(size for size in sizes if size.bit_count() == 1), *sizes[-1:]))


# recorder(function) runs the function, and returns a callable that repeats it on the current contents of its tensors.
# The function must read and write tensors with fixed addresses, and read no number on the host.
Recorder = Callable[[Callable[[], object]], Callable[[], None]]


class CudaGraphRecorder:
    """The ``Recorder`` of a GPU. Its graphs share one memory pool, so they must be replayed one after the other.

    Use it for one set of graphs: when they are freed, their pool cannot be used again.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # Warm-up and capture use one stream, because cuBLAS has a workspace per stream.
        self._stream = torch.cuda.Stream(device)

    def __call__(self, function: Callable[[], object]) -> Callable[[], None]:
        # Run once outside the graph: Triton compiles and libraries load, which must not happen during a capture.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            function()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Only this thread is checked, since the engine's loop may free a pinned buffer meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        return graph.replay


@dataclass(frozen=True)
class _Graphs:
    """Graphs captured on the weights at these addresses."""

    kinds: tuple[PromptGraphs | DecodeGraphs, ...]
    weight_addresses: tuple[int, ...]

    @property
    def num_uncaptured(self) -> int:
        return sum(graphs.num_uncaptured for graphs in self.kinds)

    def log_graphs(self, started_s: float, num_bytes: int) -> None:
        """Log how many there are, of which the last ones took ``num_bytes``."""
        log.info(
            "cuda_graphs",
            count=sum(map(len, self.kinds)),
            missing=self.num_uncaptured,
            seconds=round(time.perf_counter() - started_s, 1),
            mib=num_bytes >> 20,
        )


@runtime_checkable
class CapturesLater(Protocol):
    """A forward that captures some of its graphs between steps."""

    @property
    def num_uncaptured(self) -> int:
        """Number of graphs that ``capture_next`` may still capture; 0 while weights or caches are asleep."""
        ...

    def capture_next(self) -> None:
        """Capture one of ``num_uncaptured`` graphs. Call it between steps."""
        ...


class CapturedForward(LeanWrapper):
    """A ``forward.Forward`` that replays a lean one, on the same weights and in the same caches.

    Args:
        token_budget: most tokens of a step.
        make_recorder: returns the recorder of a device; called for every set of graphs.
    """

    def __init__(
        self,
        lean: LeanForward,
        token_budget: int,
        make_recorder: Callable[[torch.device], Recorder] = CudaGraphRecorder,
    ) -> None:
        super().__init__(lean)
        # Otherwise the angles take a dozen small launches per step.
        lean.network.make_angles = AngleTable(lean.network.angles, lean.max_model_len)
        self._make_recorder = make_recorder
        self._token_sizes = () if lean.is_batch_invariant else token_sizes(token_budget, lean.network)
        self._num_slots = 0
        self._num_columns = 0
        self._num_groups = 1
        self._block_size = 0
        self._graphs: _Graphs | None = None

    @property
    def caches(self) -> list[Tensor]:
        """See ``LeanForward.caches``."""
        return self.lean.caches

    def allocate(self, num_blocks: int, block_size: int, num_slots: int, device: torch.device) -> None:
        self._release_graphs()
        self.lean.allocate(num_blocks, block_size, num_slots, device)
        if num_blocks > 0:
            self._capture_for(num_blocks, block_size, num_slots, device, num_groups=1)

    def allocate_pages(
        self, layout: PageLayout, num_pages: int, block_size: int, num_slots: int, device: torch.device
    ) -> None:
        """See ``pages.PagedByGroups``."""
        self._release_graphs()
        self.lean.allocate_pages(layout, num_pages, block_size, num_slots, device)
        self._capture_for(num_pages, block_size, num_slots, device, num_groups=len(layout.windows))

    def profile_graphs(self, max_num_seqs: int) -> None:
        """Compute the largest step that is captured for ``max_num_seqs`` rows, without a graph, to measure its
        memory.
        """
        self.lean.profile(max((*self._token_sizes, self._decode_sizes(max_num_seqs)[-1])), 1)

    def _release_graphs(self) -> None:
        """Release the graphs, which refer to the earlier caches."""
        self._graphs = None
        self._num_slots = 0

    def _capture_for(
        self, num_blocks: int, block_size: int, num_slots: int, device: torch.device, *, num_groups: int
    ) -> None:
        self._num_slots, self._num_groups = num_slots, num_groups
        self._block_size = block_size
        self._num_columns = min(num_blocks, -(-self.lean.max_model_len // block_size))
        # Weights may still be asleep when the cache wakes up; ``capture`` is called when they are back.
        if self.network.embed_tokens.weight.device.type == device.type:
            self.capture()

    def capture(self) -> None:
        """Capture the first sizes on the weights at their current addresses, unless that is done. Does nothing without
        a cache.
        """
        addresses = self._weight_addresses()
        if not self._num_slots or (self._graphs is not None and self._graphs.weight_addresses == addresses):
            return
        self._graphs = None  # release the earlier ones first
        self._graphs = self._capture()

    @property
    def num_uncaptured(self) -> int:
        """See ``CapturesLater``."""
        graphs = self._graphs
        is_awake = graphs is not None and graphs.weight_addresses == self._weight_addresses()
        return graphs.num_uncaptured if graphs is not None and is_awake else 0

    # As in ``_capture``.
    @torch.inference_mode()
    def capture_next(self) -> None:
        """Capture one of ``num_uncaptured`` graphs. Call it between steps, on all ranks that compute the model.

        Raises:
            torch.OutOfMemoryError: there is no memory for it, and several ranks compute the model.
        """
        graphs = self._graphs
        assert graphs is not None, "none is missing"
        kind = max(graphs.kinds, key=lambda kind: kind.num_wishes)
        started, device = time.perf_counter(), self.network.embed_tokens.weight.device
        free_before = _free_bytes(device)
        try:
            kind.capture_next()
        except torch.OutOfMemoryError as error:
            if self.lean.groups is not None:
                # The other ranks may have captured it, or wait in one of its collectives.
                raise
            # Steps go on with the larger graphs.
            log.warning("cuda_graphs_left_out", count=graphs.num_uncaptured, reason=str(error))
            for each in graphs.kinds:
                each.forget_missing()
        if not graphs.num_uncaptured:
            graphs.log_graphs(started, free_before - _free_bytes(device))

    def run(self, step: ModelInput) -> Tensor:
        self.capture()
        if self._graphs is not None and step.inputs_embeds is None:
            for graphs in self._graphs.kinds:
                hidden = graphs.replay(step)
                if hidden is not None:
                    # The result is read in stream order, before the next step's replay overwrites it.
                    return self.network.logits(hidden)
        return self.lean.run(on_device(step, self.network.embed_tokens.weight.device))

    def _weight_addresses(self) -> tuple[int, ...]:
        """Return the addresses of the first and last weight. Weights move together, so two addresses detect a move
        without scanning hundreds per step.
        """
        return self.network.embed_tokens.weight.data_ptr(), self.network.norm.weight.data_ptr()

    # Caches are allocated outside of steps, where autograd would keep the results of every layer.
    @torch.inference_mode()
    def _capture(self) -> _Graphs:
        """Capture the first sizes, the largest first, so that the others reuse its memory in the pool."""
        started = time.perf_counter()
        weight = self.network.embed_tokens.weight
        free_before = _free_bytes(weight.device)
        recorder = self._make_recorder(weight.device)
        graph_layout = GraphLayout(
            self._num_columns,
            self._num_groups,
            self._block_size,
            min(self.lean.max_model_len, self._num_columns * self._block_size),
            self._num_slots,
            weight,
            (False, True) if self.network.token_adapters.is_used else (False,),
        )

        def capture(step: ModelInput, out: Tensor) -> Callable[[], None]:
            return recorder(partial(self._transform, step, out))

        sizes = self._decode_sizes(self._num_slots)
        kinds: list[PromptGraphs | DecodeGraphs] = []
        if self._token_sizes:
            first, rows = first_sizes(self._token_sizes), row_sizes(self._num_slots)
            kinds.append(PromptGraphs(self._token_sizes, rows, first, graph_layout, capture))
        kinds.append(DecodeGraphs(sizes, first_sizes(sizes), graph_layout, capture))
        # Most steps are decodes, and any step that fits their graphs fits no better elsewhere.
        graphs = _Graphs((*reversed(kinds),), self._weight_addresses())
        graphs.log_graphs(started, free_before - _free_bytes(weight.device))
        return graphs

    def _decode_sizes(self, num_slots: int) -> tuple[int, ...]:
        return TILE_SIZES if self.lean.is_batch_invariant else capture_sizes(num_slots)

    def _transform(self, step: ModelInput, out: Tensor) -> None:
        # Copied out, so that the result holds no memory of the pool, which the other graphs use.
        out.copy_(self.lean.transform(step.with_fed_tokens()))


def make_captured(forward: Forward, token_budget: int) -> Forward:
    """Return a forward that computes ``forward`` and replays steps of up to ``token_budget`` tokens; ``forward`` itself
    if its steps cannot be captured.
    """
    if not isinstance(forward, LeanForward):
        return forward
    obstacle = _obstacle(forward)
    if obstacle is not None:
        log.info("no_cuda_graphs", reason=obstacle)
        return forward
    return CapturedForward(forward, token_budget)


def without_graphs(forward: Forward) -> Forward:
    """Return the forward that computes the same without graphs, in the same caches: ``forward`` itself unless it has
    graphs.
    """
    return forward.lean if isinstance(forward, CapturedForward) else forward


def _obstacle(lean: LeanForward) -> str | None:
    """Return why the steps of ``lean`` cannot be captured; None if they can."""
    weight = lean.network.embed_tokens.weight
    if lean.is_batch_invariant and lean.groups is not None:
        # The check at load observes the operations of each forward, and a replay by ranks shows none.
        return "deterministic ranks compute in tiles"
    if lean.keeps_state:
        return "it keeps states besides keys and values"
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
