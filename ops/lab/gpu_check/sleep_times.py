"""``python -m penstock.ops.lab.gpu_check.sleep_times``: sleeps and wakes of one engine, as JSON.

Memory is that of the whole device, so that contexts and graphs count. On a CPU it is that of this process.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from ....shared.control.calls import Utility
from ....shared.control.engine import Sleep, WakeUp
from ....shared.messages.core import UtilityCall
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.sampling import SamplingParams
from ....worker.config.engine_config import EngineConfig
from ....worker.engine.composition import Engine, build_engine

NUM_TOKENS = 16
PROMPT = list(range(8, 72))


def measure(engine: Engine, level: int, num_cycles: int) -> dict[str, Any]:
    """Return times and memory of each cycle, and whether the tokens of a prompt stayed the same."""
    expected = _tokens(engine)
    rows: list[dict[str, float]] = []
    is_same = True
    for _ in range(num_cycles):
        sleep_s = _time_call(engine, Sleep(level=level))
        asleep_bytes = _used_bytes()
        wake_s = _time_call(engine, WakeUp())
        started = time.perf_counter()
        is_same = _tokens(engine) == expected and is_same
        first_s = time.perf_counter() - started
        rows.append({"sleep_s": sleep_s, "wake_s": wake_s, "first_s": first_s, "asleep_bytes": asleep_bytes})
    return {"level": level, "cycles": rows, "is_same": is_same}


def _time_call(engine: Engine, call: Utility) -> float:
    started = time.perf_counter()
    while (output := engine.control.answer(UtilityCall(1, call))) is None:
        engine.core.step_fn()
    assert output.error is None, output.error
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _tokens(engine: Engine) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    request = EngineCoreRequest(request_id="r", prompt_token_ids=PROMPT, sampling_params=params)
    tokens: list[int] = []
    assert engine.core.add_request(request) is None
    while engine.core.has_work:
        for output in engine.core.step_fn():
            tokens += output.new_token_ids
    return tokens


def _used_bytes() -> int:
    if not torch.cuda.is_available():
        return psutil.Process().memory_full_info().uss
    free, total = torch.cuda.mem_get_info()
    return total - free


def main() -> None:
    """Build the engine, measure, and write the rows of each level."""
    parser = argparse.ArgumentParser("penstock.ops.lab.gpu_check.sleep_times")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    config = EngineConfig(
        model=str(options.model),
        device=options.device,
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=options.max_model_len,
        max_num_seqs=64,
        kv_cache_memory=1 << 30 if options.device == "cuda" else 1 << 26,
    )
    engine = build_engine(config, options.model)
    levels: list[dict[str, Any]] = []
    try:
        for level in (1, 2):
            levels.append(measure(engine, level, options.cycles))
            options.output.write_text(json.dumps({"levels": levels}))
    finally:
        engine.close()


if __name__ == "__main__":
    main()
