"""Records what a function does on a GPU, so that it can be done again in one launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

# recorder(function) runs the function, and returns what does the same again on what then lies in its tensors. The
# function is to read and write tensors that stay where they are, and to look at no number on the host.
Recorder = Callable[[Callable[[], object]], Callable[[], None]]


class CudaGraphRecorder:
    """The ``Recorder`` of a GPU. Its graphs share one memory pool, so they must be replayed one after the other.

    It is for one set of graphs: once they are gone their pool cannot be taken up again.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # Warm-up and capture in one stream: cuBLAS has a workspace for each.
        self._stream = torch.cuda.Stream(device)

    def __call__(self, function: Callable[[], object]) -> Callable[[], None]:
        # Once outside the graph: Triton compiles, libraries load, and neither may happen during a capture.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            function()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Only what this thread does is watched: the engine's loop may free a pinned buffer meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        return graph.replay
