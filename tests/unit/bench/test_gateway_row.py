"""The row of the gateway, from figures and replies made by hand."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from penstock.ops.lab.bench.engines.gateway_load import HttpStream
from penstock.ops.lab.bench.engines.gateway_row import GatewayRow, GatewayWay
from penstock.ops.lab.bench.engines.report import gateway_table
from penstock.ops.lab.bench.goals import State, gateway_goals
from penstock.shared.errors import BrokerError

EVENT = b'data: {"choices": [{"text": "%b"}], "usage": null}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\ndata: [DONE]\n\n'


def way(*tokens_per_s: float, idle_ttft_ms: float = 1.0) -> GatewayWay:
    num_rounds = len(tokens_per_s)
    return GatewayWay(
        tokens_per_s=list(tokens_per_s),
        ttft_ms=[5.0] * num_rounds,
        idle_ttft_ms=[idle_ttft_ms] * num_rounds,
        load_cpu_us_per_token=[2.0] * num_rounds,
    )


def test_a_ratio_is_that_of_a_round() -> None:
    row = GatewayRow(
        model="tiny",
        num_streams=64,
        client=way(1000, 100, 1000),
        gateway=way(900, 80, 700, idle_ttft_ms=3.5),
        gateway_cpu_us_per_token=[30.0, 40.0, 50.0],
        two=way(990, 100, 770),
        two_cpu_us_per_token=[33.0, 44.0, 55.0],
        vllm=GatewayWay(),
        vllm_missing="not installed",
    )
    assert row.ratio == pytest.approx(0.8)
    assert row.added_ttft_ms == pytest.approx(2.5)
    (goal,) = gateway_goals(row)
    assert goal.state == State.NOT_MET
    console = Console(file=io.StringIO(), width=200)
    console.print(gateway_table(row))
    printed = console.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO
    for word in ("700.0", "40.0", "44.0", "two workers over one 1.10", "vLLM HTTP server not installed", "0.80"):
        assert word in printed


async def test_received_bytes_are_parsed_after_the_measurement() -> None:
    stream = HttpStream()
    for piece in (b"HTTP/1.1 200 OK\r\n\r\n30\r\n", EVENT % b"a", b"\r\n30\r\n" + EVENT % b" b" + b"\r\n" + USAGE):
        stream.data_received(piece)
    assert stream.read() == ("a b", 7)
    assert stream.first_at > 0


@pytest.mark.parametrize("reply", [b"HTTP/1.1 503 no\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n" + EVENT % b"cut", b""])
async def test_a_reply_that_is_no_whole_stream_is_an_error(reply: bytes) -> None:
    stream = HttpStream()
    stream.data_received(reply)
    with pytest.raises(BrokerError, match="the gateway did not stream"):
        stream.read()
