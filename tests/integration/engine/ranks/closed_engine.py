"""``python -m tests.integration.engine.ranks.closed_engine MODEL``: opens files once an engine of two ranks is closed.

Writes how many bytes are in them when nothing is left of the engine.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import build_engine

# More than an engine closes.
NUM_FILES = 64


def main(model: str) -> None:
    config = EngineConfig(model=model, num_threads=1, kv_cache_memory=1 << 22, tensor_parallel_size=2)
    engine = build_engine(config, Path(model))
    engine.ranks.close()
    files = [os.memfd_create(str(number)) for number in range(NUM_FILES)]
    del engine
    gc.collect()
    sys.stdout.write(f"{sum(os.fstat(file).st_size for file in files)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
