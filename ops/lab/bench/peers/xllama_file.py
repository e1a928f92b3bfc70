# pyright: reportMissingImports=false
"""``python xllama_file.py FILE PROMPT OUTPUT STREAMS SHORT``: llama.cpp by the package xllamacpp.

For ``bench/real_file.py``. Writes its figures as one line of JSON.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xllamacpp

_TOKEN_IDS = 1000


def main() -> None:
    """Start the server in this process, and send it requests."""
    model = sys.argv[1]
    num_prompt, num_output, num_streams, num_short = map(int, sys.argv[2:])
    started, used = time.perf_counter(), time.process_time()
    params = xllamacpp.CommonParams()
    params.model.path = model
    # All streams share the cache, so it is no larger than the longest request or all short ones.
    params.kv_unified = True
    params.n_ctx = max(num_prompt + num_output, num_streams * (num_short + num_output)) + 8 * num_streams
    params.n_parallel = num_streams
    server = xllamacpp.Server(params)
    ready_s, start_s = time.perf_counter() - started, time.process_time() - used
    draws = random.Random(0)

    def complete(size: int) -> dict[str, Any]:
        return _complete(server.listening_address, [draws.randrange(_TOKEN_IDS) for _ in range(size)], num_output)

    timings = [complete(num_prompt) for _ in range(3)][1:]
    begun = time.perf_counter()
    with ThreadPoolExecutor(num_streams) as threads:
        num_tokens = sum(each["predicted_n"] for each in threads.map(complete, [num_short] * num_streams))
    rate_of_all = num_tokens / (time.perf_counter() - begun)
    match = re.search(r"^Pss: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert match is not None
    figures = {
        "name": "llama.cpp",
        "ready_s": ready_s,
        "start_s": start_s,
        "memory_bytes": int(match[1]) * 1024,
        "prompt_rate": max(each["prompt_per_second"] for each in timings),
        "rate": max(each["predicted_per_second"] for each in timings),
        "rate_of_all": rate_of_all,
    }
    print(json.dumps(figures), flush=True)


def _complete(address: str, prompt: list[int], num_output: int) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": num_output, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
    request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        return json.load(response)["timings"]


if __name__ == "__main__":
    main()
