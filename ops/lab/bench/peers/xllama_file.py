# pyright: reportMissingImports=false
"""``python xllama_file.py FILE PROMPT OUTPUT``: llama.cpp by the package xllamacpp, for ``bench/real_file.py``.

Writes its figures as one line of JSON.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp

_TOKEN_IDS = 1000


def main() -> None:
    """Start the server in this process, and send it requests."""
    model, num_prompt, num_output = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    started, used = time.perf_counter(), time.process_time()
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = num_prompt + num_output + 8
    server = xllamacpp.Server(params)
    ready_s, start_s = time.perf_counter() - started, time.process_time() - used
    prompts = random.Random(0)
    timings = [
        _complete(server.listening_address, [prompts.randrange(_TOKEN_IDS) for _ in range(num_prompt)], num_output)
        for _ in range(3)
    ][1:]
    match = re.search(r"^Pss: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert match is not None
    figures = {
        "name": "llama.cpp",
        "ready_s": ready_s,
        "start_s": start_s,
        "memory_bytes": int(match[1]) * 1024,
        "prompt_rate": max(each["prompt_per_second"] for each in timings),
        "rate": max(each["predicted_per_second"] for each in timings),
    }
    print(json.dumps(figures), flush=True)


def _complete(address: str, prompt: list[int], num_output: int) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": num_output, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
    request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        return json.load(response)["timings"]


if __name__ == "__main__":
    main()
