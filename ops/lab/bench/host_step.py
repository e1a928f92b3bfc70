"""Processor time of a step outside the model: ``python -m penstock.ops.lab.bench.host_step``.

An engine of the demo model runs with a forward that computes nothing and returns the same logits. What remains is the
host's share of a step: scheduling, inputs, sampling, the outputs and their encoding. Other load makes the figures
noisier, but hardly larger.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from ....shared.messages.core import EngineCoreOutputs
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.sampling import SamplingParams
from ....shared.process.processor import this_processor
from ....worker.config.engine_config import EngineConfig
from ....worker.core.garbage import freeze_loaded_objects
from ....worker.engine.composition import build_engine
from ....worker.engine.core.engine_core import EngineCore
from ....worker.models.forward import ModelInput
from ...demo.run import MODEL

NUM_REQUESTS = (1, 64, 256)
TEMPERATURES = (0.0, 1.0)
NUM_TOKENS = 400
# Steps at the beginning and the end of a round, in which requests enter and leave.
NUM_LEFT_OUT = 5


def main() -> None:
    parser = argparse.ArgumentParser(description="The processor time of a step of which the model computes nothing.")
    parser.add_argument("--rounds", type=int, default=5, help="of each number of requests; the least is printed (5)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    core = build_core()
    table = Table(title=f"Processor time of a step without the model, in us: {this_processor()[0]}")
    for title in ("requests", *(f"temperature {temperature:g}" for temperature in TEMPERATURES)):
        table.add_column(title, justify="right")
    for num_requests in NUM_REQUESTS:
        least_us = [min(run_round(core, num_requests, heat) for _ in range(rounds)) for heat in TEMPERATURES]
        table.add_row(str(num_requests), *(f"{time_us:.0f}" for time_us in least_us))
    Console().print(table)


def build_core() -> EngineCore:
    """Return the core of an engine whose forward returns random logits, the same in each step."""
    config = EngineConfig(model=str(MODEL), device="cpu", max_num_seqs=max(NUM_REQUESTS), max_model_len=512)
    engine = build_engine(config, Path(config.model))
    logits = torch.randn(max(NUM_REQUESTS), engine.ready.vocab_size)

    def run(step: ModelInput) -> torch.Tensor:
        # A copy, because the sampler may overwrite it.
        return logits[: len(step.logit_rows)].clone()

    engine.runner._model.forward.run = run
    freeze_loaded_objects()
    return engine.core


def run_round(core: EngineCore, num_requests: int, temperature: float) -> float:
    """Run ``num_requests`` to their ends, and return the median of a step's processor time in microseconds."""
    for number in range(num_requests):
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True)
        core.add_request(EngineCoreRequest(request_id=str(number), prompt_token_ids=[5, 6, 7], sampling_params=params))
    encoder, times_ns = msgspec.msgpack.Encoder(), []
    while core.has_work:
        began_ns = time.thread_time_ns()
        outputs = core.step_fn()
        stats, digests = core.take_step_stats(), core.take_lora_digests()
        encoder.encode(EngineCoreOutputs(outputs, core.stats(), time.monotonic(), stats, digests))
        times_ns.append(time.thread_time_ns() - began_ns)
    return statistics.median(times_ns[NUM_LEFT_OUT:-NUM_LEFT_OUT]) / 1e3


if __name__ == "__main__":
    main()
