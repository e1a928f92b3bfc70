"""``worker start --ray``: options refused before any cluster is asked, and the options of agents."""

from __future__ import annotations

import importlib.util
from typing import Any

import msgspec
import pytest

from penstock.worker import cli as worker_cli
from penstock.worker.config.ranks import KEY_VARIABLE, read_node_key
from penstock.worker.fleet.backend import AgentPhase, AgentSpec, AgentStatus, specs_of_hosts
from penstock.worker.fleet.run import passed_on, resources_of
from penstock.worker.programs import START

from ..options.harness import read

FLEET = ("--ray", "auto", "--engines", "1:8", "--redis-url", "redis://here")


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert worker_cli.main(["start", "--model", "some/model", *words]) != 0
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ray", "auto", "--redis-url", "redis://here"), "--ray requires --engines MIN:MAX"),
        (("--ray", "auto", "--engines", "1:8"), "--ray needs --redis-url"),
        ((*FLEET, "--engines", "3:2"), "3 is more than 2"),
        ((*FLEET, "--engines", "0:0"), "at least 1"),
        ((*FLEET, "--engines", "1:"), "MIN:MAX such as 1:8"),
        ((*FLEET, "--engines", "-1:8"), "expected one argument"),
        ((*FLEET, "--gpus", "0,1"), "are those that Ray gives it"),
        ((*FLEET, "--data-parallel-size", "2"), "--data-parallel-size 2: engines of a fleet come and go one by one"),
        ((*FLEET, "--data-parallel-group", "big"), "--data-parallel-group big: engines of a fleet"),
        ((*FLEET, "--metrics-port", "9000"), "--metrics-port 9000: several engines"),
        ((*FLEET, "--master-addr", "a"), "--master-addr: with --ray the hosts of an engine find each other"),
        (
            (*FLEET, "--pipeline-parallel-size", "2", "--nnodes", "2", "--ray-placement-group", "mine"),
            "--ray-placement-group mine: an engine over 2 hosts needs a group of its own",
        ),
        ((*FLEET, "--ray", "ray://host:10001"), "with --ray auto"),
        ((*FLEET, "--wanted-wait", "0"), "--wanted-wait must be"),
        ((*FLEET, "--redis-url", "nowhere"), "nowhere"),
        (("--engines", "1:8"), "--engines 1:8 is for a fleet; give --ray"),
        (("--wanted-wait", "3"), "--wanted-wait is for a fleet; give --ray"),
        (("--ray-placement-group", "mine"), "--ray-placement-group is for a fleet"),
    ],
)
def test_contradicting_options_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    try:
        sentence = refusal(capsys, *words)
    except SystemExit:
        sentence = capsys.readouterr().err
    assert message in sentence


def test_without_ray_a_sentence_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec

    def without_ray(name: str, package: str | None = None) -> Any:
        return None if name == "ray" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_ray)
    assert "pip install 'penstock-llm[ray]'" in refusal(capsys, *FLEET)


def test_agents_get_the_given_options_without_the_fleets() -> None:
    settings = read(
        START,
        *FLEET,
        "--model",
        "m",
        "--max-num-seqs",
        "8",
        "--no-log-requests",
        "--rpc-module",
        "a",
        "--rpc-module",
        "b",
        "--worker-name",
        "w",
        "--wanted-wait",
        "3",
        "--kv-cache-memory",
        "1GiB",
        environment={"PENSTOCK_DTYPE": "float32"},
    )
    assert passed_on(settings, "cpu", 2) == {
        "PENSTOCK_DEVICE": "cpu",
        "PENSTOCK_MODEL": "m",
        "PENSTOCK_REDIS_URL": "redis://here",
        "PENSTOCK_MAX_NUM_SEQS": "8",
        "PENSTOCK_LOG_REQUESTS": "no",
        "PENSTOCK_RPC_MODULE": "a,b",
        "PENSTOCK_KV_CACHE_MEMORY": str(1 << 30),
        "PENSTOCK_DTYPE": "float32",
        "PENSTOCK_THREADS": "2",
    }
    # They read the given options.
    again = read(START, environment=passed_on(settings, "cpu", 2))
    same = {"model", "max_num_seqs", "log_requests", "rpc_module", "kv_cache_memory", "dtype"}
    values = [{s.declared.name: s.value for s in one.all if s.declared.name in same} for one in (settings, again)]
    assert values[0] == values[1]


def test_an_engine_asks_for_its_threads_or_for_its_gpus() -> None:
    assert resources_of(read(START, *FLEET), "cpu") == {"CPU": 1.0}
    assert resources_of(read(START, *FLEET, "--threads", "6"), "cpu") == {"CPU": 6.0}
    assert resources_of(read(START, *FLEET, "--gpus-per-engine", "4"), "cuda") == {"CPU": 1.0, "GPU": 4.0}
    hosts = ("--tensor-parallel-size", "4", "--pipeline-parallel-size", "2", "--nnodes", "2")
    assert resources_of(read(START, *FLEET, *hosts, "--threads", "3"), "cpu") == {"CPU": 12.0}
    assert resources_of(read(START, *FLEET, *hosts), "cuda") == {"CPU": 1.0, "GPU": 4.0}


def test_the_hosts_of_an_engine_share_a_secret_and_have_numbers() -> None:
    options = {"PENSTOCK_MODEL": "m", "PENSTOCK_NNODES": "2", "PENSTOCK_STAT_LOGGERS": "a"}
    spec = msgspec.msgpack.encode(AgentSpec(worker_name="w", options=options))
    assert specs_of_hosts(spec, 1) == [spec]
    first, second = (msgspec.msgpack.decode(each, type=AgentSpec).options for each in specs_of_hosts(spec, 2))
    key = {KEY_VARIABLE: first[KEY_VARIABLE]}
    assert first == {**options, **key}
    assert second == {"PENSTOCK_MODEL": "m", "PENSTOCK_NNODES": "2", "PENSTOCK_NODE_RANK": "1", **key}
    assert len(read_node_key(first)) == 64


@pytest.mark.parametrize(
    ("status", "words", "cause"),
    [
        (1, ["{...}", "error: there is no model"], "there is no model"),
        (-9, ["{...}"], "worker start ended with signal 9 on h"),
        (0, [], "worker start ended with status 0 on h"),
    ],
)
def test_why_a_worker_has_ended(status: int, words: list[str], cause: str) -> None:
    ended = AgentStatus(
        worker_name="w",
        host="h",
        agent_pid=1,
        pid=2,
        phase=AgentPhase.ENDED,
        exit_status=status,
        last_words=words,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ended), type=AgentStatus).cause == cause
