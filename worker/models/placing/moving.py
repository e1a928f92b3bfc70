"""Move the weights of a module to a GPU through pinned memory, which several threads fill.

A copy from other memory goes through a small pinned buffer of the driver, which one thread fills. The weights of a
checkpoint are mapped files, which are read at that moment, also by that thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

BUFFER_BYTES = 16 << 20
_MAX_THREADS = 8


class Buffer(Protocol):
    """Memory of the host that a device reads."""

    @property
    def memory(self) -> NDArray[np.uint8]: ...

    def start_copy(self, target: Tensor) -> None:
        """Begin to copy the first bytes of ``memory`` to ``target``, of bytes."""
        ...

    def await_device(self) -> None:
        """Wait until the device has read ``memory``."""
        ...


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move all parameters and buffers of ``module`` to ``device``, in place. Shared ones stay shared."""
    if device.type == "cuda":
        move_parameters(module, device, _PinnedBuffer)
    nn.Module.to(module, device)


@torch.no_grad()
def move_parameters(
    module: nn.Module, device: torch.device, make_buffer: Callable[[torch.device], Buffer], num_threads: int = 0
) -> None:
    """Move the parameters of ``module`` that are in contiguous memory of the host to ``device``, in place.

    Args:
        num_threads: by default as many as there are cores, but at most eight.
    """
    parameters = [each for each in module.parameters() if each.device.type == "cpu" and each.is_contiguous()]
    moved = [torch.empty_like(parameter.data, device=device) for parameter in parameters]
    num_threads = num_threads or min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    # The device reads one buffer of a thread while the thread fills the other.
    free: SimpleQueue[Buffer] = SimpleQueue()
    for _ in range(2 * num_threads):
        free.put(make_buffer(device))

    @torch.inference_mode()
    def copy_part(part: tuple[Tensor, Tensor]) -> None:
        source, target = part
        buffer = free.get()
        try:
            buffer.await_device()
            # Unlike torch's, this copy takes one thread.
            np.copyto(buffer.memory[: len(source)], source.numpy())
            buffer.start_copy(target)
        finally:
            free.put(buffer)

    with ThreadPoolExecutor(num_threads) as threads:
        # Also raises what a thread has raised.
        list(threads.map(copy_part, _byte_parts([parameter.data for parameter in parameters], moved)))
    while not free.empty():
        free.get().await_device()
    for parameter, target in zip(parameters, moved, strict=True):
        parameter.data = target


def _byte_parts(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of the bytes of each source and its target, of the size of a buffer at most."""
    for pair in zip(sources, targets, strict=True):
        if pair[0].numel():
            source, target = (tensor.reshape(-1).view(torch.uint8).split(BUFFER_BYTES) for tensor in pair)
            yield from zip(source, target, strict=True)


class _PinnedBuffer:
    def __init__(self, device: torch.device) -> None:
        self._tensor = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self.memory = self._tensor.numpy()
        self._stream = torch.cuda.current_stream(device)
        self._was_read = torch.cuda.Event()

    def start_copy(self, target: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(self._tensor[: len(target)], non_blocking=True)
            self._was_read.record(self._stream)

    def await_device(self) -> None:
        self._was_read.synchronize()
