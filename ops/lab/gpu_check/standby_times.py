"""``python -m penstock.ops.lab.gpu_check.standby_times``: kills of an engine that has a standby, as JSON.

Memory of the standby is what becomes less free on the device while it starts. On a CPU it is its own memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from ....worker.processes.gpu import free_device_bytes
from ...local.stack import LocalStack
from ..bench.queue.recovery import NUM_STREAMS, STANDBY_OPTIONS, kill_repeatedly, own_bytes, standby_pids

_GPU = "0"


def _measure(options: argparse.Namespace) -> dict[str, object]:
    words = ["--device", options.device, "--served-model-name", "demo", "--dtype", "bfloat16", *STANDBY_OPTIONS]
    words += ["--load-format", "dummy", "--max-model-len", str(options.max_model_len)]
    words += ["--max-num-seqs", str(NUM_STREAMS), "--kv-cache-memory", str(options.kv_cache_memory)]
    with LocalStack(options.model, words) as stack:
        is_gpu = options.device == "cuda"
        free_bytes = free_device_bytes(_GPU) if is_gpu else 0
        pids = asyncio.run(standby_pids(stack, 1))
        standby_bytes = free_bytes - free_device_bytes(_GPU) if is_gpu else sum(map(own_bytes, pids))
        seconds = asyncio.run(kill_repeatedly(stack, 1, has_standby=True, num_kills=options.kills))
        return {"standby_bytes": standby_bytes, "seconds": seconds, "ready_s": stack.ready_time_s}


def main() -> None:
    """Serve the model, kill its core again and again, and write what was measured."""
    parser = argparse.ArgumentParser("penstock.ops.lab.gpu_check.standby_times")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--kv-cache-memory", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.write_text(json.dumps(_measure(options)))


if __name__ == "__main__":
    main()
