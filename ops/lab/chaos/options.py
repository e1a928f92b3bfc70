"""What `penstock chaos` is to do, and which engines it does it to."""

from __future__ import annotations

import msgspec


class ChaosOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to do; see ``penstock chaos --help``."""

    num_requests: int
    min_seconds: float
    min_events: int
    num_engines: int
    concurrency: int
    interval_s: float
    seed: int
    json_path: str
    log_path: str
    interval_tokens: int = 0
    has_sentinels: bool = False
    loses_data: bool = False
    num_shards: int = 0
    num_partitions: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    engine: str = "penstock"
    engine_python: str = ""
    speculative: str = "off"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def num_ranks(self) -> int:
        """Of each engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def is_deterministic(self) -> bool:
        """Whether engines make the same tokens of a request whatever they compute beside it.

        Of vLLM nobody knows it: of its requests greedy ones alone have one right answer.
        """
        return self.engine == "penstock"

    @property
    def device_arguments(self) -> list[str]:
        """Of `worker start`, for where engines compute; all of them on the first GPU, as much memory for each."""
        if self.device == "cpu":
            return ["--device", "cpu", "--threads", "1"]
        return ["--gpus", "0", "--kv-cache-memory", "256MiB"]

    @property
    def engine_arguments(self) -> list[str]:
        """Of `worker start`, for the engine."""
        if self.engine == "penstock":
            ranks = ["--tensor-parallel-size", str(self.tensor_parallel_size)]
            ranks += ["--pipeline-parallel-size", str(self.pipeline_parallel_size)]
            exact = ["--deterministic"] if self.is_deterministic else []
            return [*exact, "--speculative", self.speculative, *ranks]
        python = ["--engine-python", self.engine_python] if self.engine_python else []
        small = ["--enforce-eager", "--kv-cache-memory", "64MiB", "--max-model-len", "512"]
        return ["--engine", self.engine, *python, *small]
