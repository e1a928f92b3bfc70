"""Assign the engines of a host to data-parallel groups."""

from __future__ import annotations

import msgspec

from ...shared.process.command_line import UsageError
from ..config.engine_config import EngineConfig

_HERE = "127.0.0.1"


def group_engines(engine: EngineConfig, num_engines: int, worker_name: str) -> list[EngineConfig]:
    """Return the configuration of each engine of the host, in order. Without a named group they form groups here.

    Raises:
        UsageError: the engines cannot be divided into groups.
    """
    size = engine.data_parallel_size
    if not engine.is_grouped or engine.data_parallel_group:
        return [engine] * num_engines
    if num_engines % size:
        raise UsageError(
            f"--data-parallel-size {size} does not divide the {num_engines} engines of this host; give another number "
            "(--engines on the CPU), or name a group of several hosts (--data-parallel-group)"
        )
    return [
        msgspec.structs.replace(
            engine, data_parallel_group=f"{worker_name}-{index // size}", data_parallel_address=_HERE
        )
        for index in range(num_engines)
    ]
