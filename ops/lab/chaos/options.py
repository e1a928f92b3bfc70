"""Options of `penstock chaos`, and of its engines."""

from __future__ import annotations

import msgspec

# Name of the demo model among those that share a device.
DEMO = "demo"


class ChaosOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a chaos run; see ``penstock chaos --help``."""

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
    num_models: int = 1
    models: list[str] = []
    device_memory: str = ""
    min_swaps: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    engine: str = "penstock"
    engine_python: str = ""
    speculative: str = "off"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of each engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def is_deterministic(self) -> bool:
        """Whether engines generate the same tokens of a request regardless of the rest of its batch.

        For vLLM that is unknown, so only greedy requests are compared.
        """
        return self.engine == "penstock"

    @property
    def device_arguments(self) -> list[str]:
        """Options of `worker start` for the device. All engines share the first GPU, with equal parts of its memory."""
        if self.device == "cpu":
            return ["--device", "cpu", "--threads", "1"]
        return ["--gpus", "0", "--kv-cache-memory", "256MiB"]

    @property
    def engine_arguments(self) -> list[str]:
        """Options of `worker start` for the engine."""
        if self.engine == "penstock":
            ranks = ["--tensor-parallel-size", str(self.tensor_parallel_size)]
            ranks += ["--pipeline-parallel-size", str(self.pipeline_parallel_size)]
            exact = ["--deterministic"] if self.is_deterministic else []
            return [*exact, "--speculative", self.speculative, *ranks]
        python = ["--engine-python", self.engine_python] if self.engine_python else []
        small = ["--enforce-eager", "--kv-cache-memory", "64MiB", "--max-model-len", "512"]
        return ["--engine", self.engine, *python, *small]
