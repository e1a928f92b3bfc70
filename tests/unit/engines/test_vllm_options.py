"""The options of ``worker start`` that vLLM gets, and those that are refused; vLLM itself is not asked."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from penstock.shared.errors import ConfigurationError
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.other_engines.vllm.options import (
    SUPPORTED_OPTIONS,
    check_options,
    lora_setup,
    vllm_environment,
    vllm_words,
)
from penstock.worker.other_engines.vllm.versions import check_version


def _config(**fields: Any) -> EngineConfig:
    return EngineConfig(model="/m", engine="vllm", **fields)


def test_options_are_translated_to_vllms() -> None:
    config = _config(max_model_len=512, enforce_eager=True, kv_cache_memory=1 << 20, dtype="float32", max_num_seqs=8)
    words = vllm_words(config, "/m")
    pairs = dict(itertools.pairwise(words))
    assert pairs["--model"] == "/m"
    assert pairs["--dtype"] == "float32"
    assert pairs["--max-num-seqs"] == "8"
    assert pairs["--max-model-len"] == "512"
    assert pairs["--kv-cache-memory-bytes"] == str(1 << 20)
    assert "--enforce-eager" in words
    # vLLM chooses the values that were not given.
    assert not {"--block-size", "--gpu-memory-utilization", "--trust-remote-code", "--runner"} & set(words)
    assert not [word for word in words if "prefix-caching" in word]
    assert "--no-enable-prefix-caching" in vllm_words(_config(enable_prefix_caching=False), "/m")
    assert vllm_words(_config(runner="pooling"), "/m")[-2:] == ["--runner", "pooling"]


def test_ranks_are_vllms_own() -> None:
    words = vllm_words(_config(tensor_parallel_size=2, pipeline_parallel_size=3, enable_expert_parallel=True), "/m")
    pairs = dict(itertools.pairwise(words))
    assert (pairs["--tensor-parallel-size"], pairs["--pipeline-parallel-size"]) == ("2", "3")
    assert "--enable-expert-parallel" in words


def test_adapters_on_a_cpu_leave_the_last_slot_of_vllm_empty() -> None:
    for device, num_in_memory, passed in (("cpu", 3, ("4", "4")), ("cuda", 9, ("3", "9"))):
        config = _config(enable_lora=True, max_loras=3, max_cpu_loras=9, max_lora_rank=16, device=device)
        check_options(config)
        pairs = dict(itertools.pairwise(vllm_words(config, "/m")))
        assert (pairs["--max-loras"], pairs["--max-cpu-loras"], pairs["--max-lora-rank"]) == (*passed, "16")
        setup = lora_setup(config)
        assert setup is not None
        assert (setup.max_loras, setup.max_cpu_loras) == (3, num_in_memory)
    assert "--enable-lora" not in vllm_words(_config(), "/m")


def test_the_operators_vllm_options_come_last() -> None:
    words = vllm_words(_config(engine_options="--tensor-parallel-size 2 --served-model-name 'a b'"), "/m")
    assert words[-4:] == ["--tensor-parallel-size", "2", "--served-model-name", "a b"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"deterministic": True}, "deterministic True is for Penstock's engine, not for 'vllm'; leave it out"),
        (
            {"quantization": "int8"},
            "quantization 'int8' is for Penstock's engine, not for 'vllm'; use vLLM's own",
        ),
        (
            {"scheduling_policy": "mine:Order"},
            "scheduling_policy 'mine:Order' is for Penstock's engine, not for 'vllm'; it has fcfs and priority",
        ),
        ({"engine_options": "--a 'b"}, "engine_options cannot be read: No closing quotation"),
    ],
)
def test_options_without_a_vllm_equivalent_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_options(_config(**fields))
    assert str(caught.value).startswith(sentence)


def test_options_that_vllm_takes_are_fields() -> None:
    assert {field.name for field in msgspec.structs.fields(EngineConfig)} >= SUPPORTED_OPTIONS
    check_options(_config(max_num_seqs=3, enforce_eager=True))


@pytest.mark.parametrize("name", ["engine_python", "engine_options"])
def test_our_engine_takes_no_options_of_another(name: str) -> None:
    fields: dict[str, Any] = {name: "x"}
    with pytest.raises(ConfigurationError, match=f"^{name} is not for Penstock's own engine"):
        EngineConfig(model="/m", **fields)


def test_options_set_by_the_operator_are_not_replaced() -> None:
    config = _config(num_engines_on_host=2)
    variables = vllm_environment(config, {"VLLM_CONFIGURE_LOGGING": "1"}, num_cores=8)
    assert variables["OMP_NUM_THREADS"] == "4"
    assert "VLLM_CONFIGURE_LOGGING" not in variables
    assert "OMP_NUM_THREADS" not in vllm_environment(_config(device="cuda"), {}, num_cores=8)


@pytest.mark.parametrize("version", ["0.31.4", "0.34.0", "1.0", "dev", ""])
def test_a_version_that_was_not_tried_is_refused(version: str) -> None:
    assert [check_version(one) for one in ("0.32.7+cpu", "0.33.0")] == ["0.32.7+cpu", "0.33.0"]
    with pytest.raises(ConfigurationError, match=r"supports vLLM 0\.32 to 0\.33"):
        check_version(version)
