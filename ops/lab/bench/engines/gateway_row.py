"""The gateway compared with the client's streams: the same worker and requests, in alternating rounds.

The gateway runs twice, with one process and with two. Both loads run in their own processes (``gateway_load``), which
share the machine with worker, Redis and, over HTTP, the gateway. vLLM's HTTP server gets the same requests afterwards,
if it is among the rivals.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from .....shared.errors import ConfigurationError
from ....local.server import LocalGateway
from ....local.stack import LocalStack
from ....statistics import percentile
from ..workload import ALL_AT_ONCE, IDLE, WARM_UP, Phase, timed_phases
from .gateway_load import CLIENT, HTTP, LoadResult
from .judge import read_vocab_size
from .sides import VLLM_HTTP, Side

NUM_STREAMS = 64
LOAD_TIMEOUT_S = 600.0


class GatewayWay(msgspec.Struct, kw_only=True):
    """Results of one way by round: tokens/s, TTFT (p50, ms) of all requests and of a single one, CPU of the load."""

    tokens_per_s: list[float] = []
    ttft_ms: list[float] = []
    idle_ttft_ms: list[float] = []
    load_cpu_us_per_token: list[float] = []

    def add(self, everything: LoadResult, idle: LoadResult) -> None:
        self.tokens_per_s.append(everything.tokens_per_s)
        self.ttft_ms.append(percentile(everything.ttft_ms, 0.5))
        self.idle_ttft_ms.append(percentile(idle.ttft_ms, 0.5))
        self.load_cpu_us_per_token.append(1e6 * everything.cpu_s / everything.num_tokens)


class GatewayRow(msgspec.Struct, kw_only=True):
    """Results of all ways. ``two`` is the gateway with two workers; ``vllm_missing`` says why vLLM has no rounds."""

    model: str
    num_streams: int
    client: GatewayWay
    gateway: GatewayWay
    gateway_cpu_us_per_token: list[float]
    two: GatewayWay
    two_cpu_us_per_token: list[float]
    vllm: GatewayWay
    vllm_missing: str = ""

    @property
    def ratio(self) -> float:
        """Tokens/s of the gateway over the client's in each round, the median of the rounds."""
        pairs = zip(self.gateway.tokens_per_s, self.client.tokens_per_s, strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    @property
    def two_over_one(self) -> float:
        """Tokens/s of two workers over those of one in each round, the median of the rounds."""
        pairs = zip(self.two.tokens_per_s, self.gateway.tokens_per_s, strict=True)
        return statistics.median(two / one for two, one in pairs)

    @property
    def added_ttft_ms(self) -> float:
        """Return the time that the gateway adds to the first token of a single request, the median of the rounds."""
        pairs = zip(self.gateway.idle_ttft_ms, self.client.idle_ttft_ms, strict=True)
        return statistics.median(ours - theirs for ours, theirs in pairs)


def measure_gateway(
    name: str,
    model: Path,
    engine_options: list[str],
    rivals: list[Side],
    rounds: int,
    seed: int,
    scratch: Path,
    tell: Callable[[str], None],
) -> GatewayRow:
    """Measure ``rounds`` of both ways.

    Raises:
        ConfigurationError: a process failed, or a way did not give the tokens that were asked for.
    """
    model = _with_words(model, scratch / f"{name}-with-words")
    phases = [
        phase
        for phase in timed_phases(NUM_STREAMS, 0, read_vocab_size(model), seed)
        if phase.name in (WARM_UP, ALL_AT_ONCE, IDLE)
    ]
    row = GatewayRow(
        model=name,
        num_streams=NUM_STREAMS,
        client=GatewayWay(),
        gateway=GatewayWay(),
        gateway_cpu_us_per_token=[],
        two=GatewayWay(),
        two_cpu_us_per_token=[],
        vllm=GatewayWay(),
    )
    options = ["--log-level", "warning", "--device", "cpu", "--dtype", "bfloat16", "--served-model-name", "bench"]
    options += [*engine_options, "--max-num-seqs", str(NUM_STREAMS)]
    with (
        LocalStack(model, options) as stack,
        LocalGateway(stack.url, ["--log-level", "warning"], scratch / "gateway.log") as one,
        LocalGateway(stack.url, ["--log-level", "warning", "--workers", "2"], scratch / "two.log") as two,
    ):
        ways = [
            _Way("client", CLIENT, stack.url, row.client, [], []),
            _Way("gateway", HTTP, one.base_url, row.gateway, _family(one), row.gateway_cpu_us_per_token),
            _Way("gateway, 2 workers", HTTP, two.base_url, row.two, _family(two), row.two_cpu_us_per_token),
        ]
        for number in range(rounds):
            for way in ways if number % 2 == 0 else ways[::-1]:
                tell(f"gateway, round {number + 1} of {rounds}: {way.name} …")
                way.measure(phases, scratch)
    _measure_rival(row, model, rivals, phases, scratch, tell)
    return row


class _Way(NamedTuple):
    """A way of sending requests, and its results; ``family`` has the processes of the gateway, if it uses one."""

    name: str
    load: str
    url: str
    figures: GatewayWay
    family: list[psutil.Process]
    cpu_us_per_token: list[float]

    def measure(self, phases: list[Phase], scratch: Path) -> None:
        """Measure one round.

        Raises:
            ConfigurationError: the output has a wrong number of tokens.
        """
        before = self._cpu_s()
        _, everything = _run_load(self.load, self.url, phases[:2], scratch)
        cpu_s = self._cpu_s() - before
        (idle,) = _run_load(self.load, self.url, phases[2:], scratch)
        self.figures.add(everything, idle)
        if self.family:
            self.cpu_us_per_token.append(1e6 * cpu_s / everything.num_tokens)
        expected = sum(item.max_tokens for item in phases[1].items)
        if everything.num_tokens != expected:
            raise ConfigurationError(f"{self.name} gave {everything.num_tokens} tokens, not {expected}")

    def _cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.family)


def _family(gateway: LocalGateway) -> list[psutil.Process]:
    parent = psutil.Process(gateway.pid)
    return [parent, *parent.children(recursive=True)]


def _with_words(model: Path, folder: Path) -> Path:
    """Copy a random model, with text for every token.

    In the original only the 256 bytes have text, so most deltas would be empty and not sent over HTTP.
    """
    shutil.copytree(model, folder, dirs_exist_ok=True)
    path = folder / "tokenizer.json"
    tokenizer = msgspec.json.decode(path.read_bytes())
    vocab = tokenizer["model"]["vocab"]
    # The first character is a space, as byte-level tokenizers spell it.
    vocab |= {f"\u0120w{token_id}": token_id for token_id in range(len(vocab), read_vocab_size(model))}
    path.write_bytes(msgspec.json.encode(tokenizer))
    return folder


def _run_load(way: str, url: str, phases: list[Phase], scratch: Path) -> list[LoadResult]:
    work, result = scratch / "phases.json", scratch / "loaded.json"
    work.write_bytes(msgspec.json.encode(phases))
    command = [sys.executable, "-m", "penstock.ops.lab.bench.engines.gateway_load", way, url, str(work), str(result)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S, check=False)
    if completed.returncode != 0:
        raise ConfigurationError(f"the load by {way} failed: {completed.stderr.strip()[-1500:]}")
    return msgspec.json.decode(result.read_bytes(), type=list[LoadResult])


def _measure_rival(
    row: GatewayRow, model: Path, rivals: list[Side], phases: list[Phase], scratch: Path, tell: Callable[[str], None]
) -> None:
    """vLLM's HTTP server, one life of it."""
    rival = next((side for side in rivals if side.name == VLLM_HTTP), None)
    row.vllm_missing = "not asked for" if rival is None else rival.why_missing
    if rival is None or row.vllm_missing:
        return
    tell(f"gateway: {rival.name} …")
    run = rival.run(model, phases, "bfloat16", scratch)
    everything, idle = run.phase(ALL_AT_ONCE), run.phase(IDLE)
    row.vllm.tokens_per_s.append(everything.tokens_per_s)
    row.vllm.ttft_ms.append(percentile(everything.ttft_ms, 0.5))
    row.vllm.idle_ttft_ms.append(percentile(idle.ttft_ms, 0.5))
