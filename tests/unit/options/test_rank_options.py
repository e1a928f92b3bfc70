"""The number of ranks of an engine, and options that exclude them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.deployment.records import EngineSetup
from penstock.shared.errors import ConfigurationError
from penstock.shared.messages.core import RankSetup
from penstock.shared.process.command_line import UsageError
from penstock.worker import cli as worker_cli
from penstock.worker.cli.listing import _ranks
from penstock.worker.cli.plan import check_gpus_per_engine, gpus_per_engine
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.programs import HostOptions


def test_ranks_are_stages_times_parts() -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2, pipeline_parallel_size=3)
    assert config.num_ranks == config.layout.world_size == 6
    assert EngineConfig.decode(config.encode()).layout == config.layout
    assert EngineConfig(model="m").num_ranks == 1


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"kv_offload_dir": "/d", "nnodes": 2, "master_addr": "a"},
            "kv_offload_dir '/d' is for engines of one host, whose ranks share memory, and nnodes is 2",
        ),
        (
            {"kv_offload_memory": 1 << 20, "nnodes": 2, "master_addr": "a"},
            "kv_offload_memory 1048576 is for engines of one host",
        ),
        (
            {"pipeline_parallel_size": 2, "async_scheduling": True},
            "async_scheduling is for engines of one stage, and pipeline_parallel_size 2 schedules a batch for each",
        ),
        ({"pipeline_parallel_size": 64}, "are 128 ranks, and an engine has at most 64"),
        (
            {"pipeline_parallel_size": 2, "enable_expert_parallel": True},
            "enable_expert_parallel shares whole experts in one stage, and pipeline_parallel_size is 2; leave one",
        ),
        ({"nnodes": 2}, "nnodes needs master_addr"),
        ({"nnodes": 3, "master_addr": "a"}, "nnodes is 3, which does not divide the 2 ranks"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "a"}, "the hosts are numbered from 0 to 1"),
        ({"nnodes": 2, "master_addr": "a", "engine": "vllm"}, "nnodes 2 is for Penstock's own ranks, not for engine"),
        ({"nnodes": 2, "master_addr": "a", "executor": "m:n"}, "not for executor"),
        ({"node_rank": 1}, "node_rank 1 is for an engine over several hosts; set nnodes, too"),
        ({"tensor_parallel_size": 1, "enable_expert_parallel": True}, "raise tensor_parallel_size, or leave it out"),
    ],
)
def test_options_that_ranks_lack_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EngineConfig(**{"model": "m", "tensor_parallel_size": 2, **fields})
    assert sentence in str(caught.value)


@pytest.mark.parametrize("option", [("--metrics-port", "0"), ("--stat-logger", "a:b")])
def test_reports_on_an_engine_are_refused_where_only_ranks_run(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "a", "--pipeline-parallel-size", "2")
    assert worker_cli.main(["start", "--model", "m", *hosts, *option]) != 0
    assert f"{option[0]} is for the host with the engine, node_rank 0" in capsys.readouterr().err


def gpus(count: int = 1, **ranks: int) -> tuple[int, str]:
    values = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "nnodes": 1, **ranks}
    return gpus_per_engine(HostOptions(gpus_per_engine=count), values)


def test_ranks_determine_the_gpus_of_an_engine() -> None:
    assert gpus() == (1, "--gpus-per-engine 1")
    assert gpus(4) == (4, "--gpus-per-engine 4")
    assert gpus(tensor_parallel_size=2) == gpus(2, tensor_parallel_size=2) == (2, "--tensor-parallel-size 2")
    both = "--tensor-parallel-size 2 --pipeline-parallel-size 3"
    assert gpus(tensor_parallel_size=2, pipeline_parallel_size=3) == (6, both)
    assert gpus(tensor_parallel_size=2, pipeline_parallel_size=3, nnodes=3) == (2, both)
    with pytest.raises(UsageError, match="--gpus-per-engine 4 contradicts --tensor-parallel-size 2, which needs 2"):
        gpus(4, tensor_parallel_size=2)


def test_gpus_beyond_its_ranks_are_vllms_alone() -> None:
    host = HostOptions(gpus_per_engine=2)
    check_gpus_per_engine(host, EngineConfig(model="m", engine="vllm"))
    check_gpus_per_engine(host, EngineConfig(model="m", tensor_parallel_size=2))
    with pytest.raises(UsageError, match="a GPU for each rank; give --tensor-parallel-size 2"):
        check_gpus_per_engine(host, EngineConfig(model="m"))


def test_how_ranks_are_listed() -> None:
    ranks = RankSetup(
        tensor_parallel_size=2, pids=[1, 2], weight_bytes=[3 << 20] * 2, kv_cache_bytes=[1 << 20, 2 << 20]
    )
    assert _ranks(EngineSetup(ranks=ranks)) == "tp 2, 5 MiB each"
    assert _ranks(EngineSetup()) == "-"


def test_description_of_ranks() -> None:
    assert RankSetup(tensor_parallel_size=2).describe() == "tp 2"
    whole = RankSetup(tensor_parallel_size=2, pipeline_parallel_size=3, enable_expert_parallel=True)
    assert whole.describe() == "tp 2, pp 3, ep"
