"""Kernels of the lean path that are chosen when a model is loaded, by their results and their times on its weights.

Each way computes the entries of all layers, one after the other, as a step does. So weights come from memory and not
from a cache of the device, and every layer's results are compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import structlog
import torch
from torch import Tensor

from ....kernels.dispatch import AUTO, KernelInputError
from ....kernels.normed_linear import MAX_ROWS, normed_linear
from ....kernels.paged_attention import PagedBatch, paged_attention
from ....kernels.paged_attention.batch import Variant
from ....kernels.paged_attention.library import MIN_PROMPT_LEN, installed, suits
from ..attention.call import AttentionCall
from ..forward import Forward
from ..lean.captured import CudaGraphRecorder
from ..lean.forward import LeanForward
from ..lean.layers.decoder import LeanDecoder
from ..lean.layers.few_rows import Product, make_enter, make_feed
from ..lean.layers.layer import LeanLayer
from .choice import Choice, MeasureUs, choose

log = structlog.get_logger(__name__)

# Numbers of rows for which ways are compared, ascending.
_NUM_ROWS = (1, 4, MAX_ROWS)
_NUM_TIMES = 5
_PLAIN, _FUSED = "separate", "fused"
# Of the prompt by which attention is chosen; from about here on its time counts beside that of the products. Its last
# block has free slots.
_PROMPT_TOKENS = 4 * MIN_PROMPT_LEN - 1
# A layer's entry: of the addition to the stream and the stream, tensors of which the last is the new stream.
_Entry = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def choose_kernels(forward: Forward, block_size: int, *, is_fixed: bool, has_adapters: bool) -> None:
    """Let the layers of ``forward`` compute few rows, and attend in long prompts, by the faster kernels, on a GPU.

    Args:
        block_size: tokens per block of its caches.
        is_fixed: make no choice, since another start may choose differently.
        has_adapters: make none for the products to which adapters add.
    """
    if is_fixed or not isinstance(forward, LeanForward) or forward.is_batch_invariant:
        return
    device = forward.network.embed_tokens.weight.device
    if device.type == "cuda":
        choose_by_times(forward, block_size, GraphClock(device), has_adapters=has_adapters)


def choose_by_times(forward: LeanForward, block_size: int, measure_us: MeasureUs, *, has_adapters: bool) -> None:
    """Do as ``choose_kernels``. Each of several ranks only makes a choice for the heads with which it attends."""
    if not has_adapters and forward.groups is None:
        choose_entries(forward.network, measure_us)
    if forward.attention_backend == AUTO:
        choose_prompt_attention(forward, measure_us, block_size, installed())


@torch.inference_mode()
def choose_entries(network: LeanDecoder, measure_us: MeasureUs, product: Product = normed_linear) -> None:
    """Replace the entries of the layers' parts by ``product`` up to the number of rows to which it is faster."""
    layers: list[Any] = list(network.layers)
    for part, plain_name, make in (("enter", "add_and_project", make_enter), ("feed", "add_and_feed", make_feed)):
        suitable = [layer for layer in layers if make(layer, MAX_ROWS, product) is not None]
        if not suitable:
            continue
        started = time.monotonic()
        plain = [getattr(layer, plain_name) for layer in suitable]
        fused: Any = [make(layer, MAX_ROWS, product) for layer in suitable]
        choices = [_choose(network, plain, fused, num_rows, measure_us) for num_rows in _NUM_ROWS]
        max_rows = _largest_fused(choices)
        for layer in suitable:
            setattr(layer, part, make(layer, max_rows, product) if max_rows else getattr(layer, plain_name))
        log.info(
            "kernels_chosen",
            part=part,
            layers=len(suitable),
            fused_rows=max_rows,
            us=dict(
                zip(_NUM_ROWS, [{name: round(us) for name, us in each.us.items()} for each in choices], strict=True)
            ),
            refused="; ".join(dict.fromkeys(reason for each in choices for reason in each.refused.values())),
            seconds=round(time.monotonic() - started, 2),
        )


@torch.inference_mode()
def choose_prompt_attention(
    forward: LeanForward,
    measure_us: MeasureUs,
    block_size: int,
    libraries: Sequence[str],
    num_tokens: int = _PROMPT_TOKENS,
) -> None:
    """Let the layers of ``forward`` attend in long prompts by the fastest of our kernel and ``libraries``."""
    by_form: dict[Any, list[tuple[LeanLayer, AttentionCall]]] = {}
    for layer, call in zip(forward.attending_layers, forward.attention_calls, strict=True):
        if layer.sinks is None and call.source is None and call.cache_format.dtype == call.dtype:
            rules = layer.scale, call.window, layer.attention.softcap
            form = layer.num_heads, call.key_shape, call.value_shape, rules
            by_form.setdefault(form, []).append((layer, call))
    for (*_, rules), members in by_form.items():
        started = time.monotonic()
        trial = _PromptTrial(*members[0], Variant(*rules), block_size, num_tokens)
        ways = {_PLAIN: partial(trial, None), **{each: partial(trial, each) for each in libraries}}
        choice = choose(_PLAIN, ways, measure_us)
        for _, call in members:
            call.prompt_library = None if choice.name == _PLAIN else choice.name
        log.info(
            "kernels_chosen",
            part="prompts",
            layers=len(members),
            window=members[0][1].window,
            library=members[0][1].prompt_library,
            us={name: round(us) for name, us in choice.us.items()},
            refused="; ".join(f"{name}: {reason}" for name, reason in choice.refused.items()),
            seconds=round(time.monotonic() - started, 2),
        )


class _PromptTrial:
    """Attention of a layer for a prompt, and for its second half behind the first, with NaN in free slots."""

    def __init__(
        self, layer: LeanLayer, call: AttentionCall, variant: Variant, block_size: int, num_tokens: int
    ) -> None:
        device = layer.qkv_proj.weight.device
        generator = torch.Generator().manual_seed(0)
        num_blocks = -(-num_tokens // block_size)
        shapes = [(num_tokens, layer.num_heads, call.key_shape[1])]
        shapes += [(num_blocks, block_size, *shape) for shape in (call.key_shape, call.value_shape)]
        query, keys, values = (torch.randn(shape, generator=generator).to(device, call.dtype) for shape in shapes)
        table = torch.arange(num_blocks, device=device).flip(0)[None]
        slots = (table.T * block_size + torch.arange(block_size, device=device)).flatten()
        for cache in (keys, values):
            cache.flatten(0, 1)[slots[num_tokens:]] = torch.nan
        half = num_tokens // 2
        whole, later = (
            PagedBatch(table, slots[num_tokens - length : num_tokens], [length], [num_tokens], block_size)
            for length in (num_tokens, half)
        )
        self._variant = variant
        self._steps = [(query, keys, values, whole), (query[-half:], keys, values, later)]

    def __call__(self, library: str | None) -> list[Tensor]:
        """Return the results by ``library``, or by our kernel if it is None or does not serve later parts.

        Raises:
            KernelInputError: ``library`` does not serve the whole prompt.
        """
        variant = self._variant
        if library is not None and not suits(*self._steps[0], variant, library):
            raise KernelInputError(f"no window of {variant.window} or no cap of {variant.softcap}")
        rules: Any = {"scale": variant.scale, "window": variant.window, "softcap": variant.softcap}
        return [paged_attention(*step, **rules, prompt_library=library) for step in self._steps]


def _choose(
    network: LeanDecoder,
    plain: Sequence[_Entry],
    fused: Sequence[_Entry],
    num_rows: int,
    measure_us: MeasureUs,
) -> Choice:
    weight = network.embed_tokens.weight
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(2, num_rows, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    ways = {_PLAIN: partial(_run_entries, plain, *rows), _FUSED: partial(_run_entries, fused, *rows)}
    return choose(_PLAIN, ways, measure_us)


def _run_entries(entries: Sequence[_Entry], hidden: Tensor, residual: Tensor) -> list[Tensor]:
    """Return the results of all layers on the same rows; either argument may be overwritten by a layer."""
    results: list[Tensor] = []
    for entry in entries:
        rows, stream = entry(hidden.clone(), residual.clone())
        results += [rows, *(stream if isinstance(stream, tuple) else (stream,))]
    return results


def _largest_fused(choices: Sequence[Choice]) -> int:
    """Return the number of rows up to which the fused way was always chosen."""
    largest = 0
    for num_rows, choice in zip(_NUM_ROWS, choices, strict=True):
        if choice.name != _FUSED:
            break
        largest = num_rows
    return largest


class GraphClock:
    """Measures calls on a GPU as the engine's graphs run them: without the host's time for launches."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, call: Callable[[], object]) -> float:
        """Return the median microseconds of ``call``."""
        replay = CudaGraphRecorder(self._device)(call)
        replay()  # the first replay also uploads the graph
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_NUM_TIMES)]
        for start, end in events:
            start.record()
            replay()
            end.record()
        torch.cuda.synchronize(self._device)
        return statistics.median(1e3 * start.elapsed_time(end) for start, end in events)
